"""Whether kernels of kernels/hopper have the machine code of those in other copies of that folder, which are called by
this tree's names and parameters: copies from the commit on that gave the kernels the words of this tree (LoraTerm,
up_backward_input).

    git worktree add /tmp/before HEAD~1
    python benchmarks/compare_kernels.py /tmp/before/kernels/hopper [FOLDER ...] [--shape T,H,I,E,K ...]

Compiles every kernel that a step of these sizes may launch, in processes of their own. Needs no GPU. Kernels that differ
are timed by `python -m benchmarks.layer.layer_kernels --contender hopper` in both trees, in turn.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this also runs by its path

from benchmarks.common.command import ROOT
from benchmarks.common.shapes import SHAPES, Shape, shape_of
from sonicmoe_hf.kernels.interface import Activation

TREE = ROOT / "kernels" / "hopper"


@functools.cache
def load(folder: Path):
    """The copy as a package beside the others of sonicmoe_hf.kernels."""
    name = "sonicmoe_hf.kernels.copy_" + re.sub(r"\W", "_", str(folder))
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def part(folder: Path, name: str):
    return importlib.import_module(f"{load(folder).__name__}.{name}")


def kernels(folder: Path, shape: Shape):
    """(function of compiled.py, its parameters) of all that a step of this size may launch."""
    up = (torch.bfloat16, shape.H, shape.I, True, False, True, True, Activation(), False, 0)
    up = (*up, part(folder, "config").tile("gemm_up", 2 * shape.I))
    return [("gemm_up", up), *part(folder, "variants").training_step_kernels(*up)]


def machine_code(folder, shape, number):
    """The SASS of one kernel, a line an instruction, without addresses and encodings."""
    name, parameters = kernels(folder, shape)[number]
    dump = Path(os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp()))
    os.environ |= {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_NO_CACHE": "1"}
    getattr(part(folder, "compiled"), name).__wrapped__.__wrapped__(*parameters)  # past both caches
    (cubin,) = dump.glob("*.cubin")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    cubin.unlink()
    lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in found.splitlines())
    return [line for line in lines if line.endswith(";")]


def code_of_every_kernel(pool, folders, shape):
    """For each folder {(function of compiled.py, its parameters as text): machine code}."""
    found = []
    for folder in folders:
        # a tile of another copy may have other fields; its text says what it is
        names = [(name, *map(str, parameters)) for name, parameters in kernels(folder, shape)]
        found.append({name: pool.submit(machine_code, folder, shape, number) for number, name in enumerate(names)})
    return [{name: of_one.result() for name, of_one in of_folder.items()} for of_folder in found]


def compare_code(pool, folders, shape):
    ours, *others = code_of_every_kernel(pool, folders, shape)
    for folder, theirs in zip(folders[1:], others):
        print(f"{shape} {folder}", flush=True)
        for kernel in dict.fromkeys((*ours, *theirs)):
            words = "same" if ours.get(kernel) == theirs.get(kernel) else "DIFFERENT"
            if kernel not in theirs or kernel not in ours:
                words = "only there" if kernel in theirs else "only in the tree"
            sizes = [text for text in kernel[1:] if text.isdigit()]
            print(f"  {words:16s} {kernel[0]} {' '.join(sizes)} in tiles of {kernel[-1]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", type=Path, help="a copy of kernels/hopper")
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given several times")
    options = parser.parse_args()
    folders = [TREE, *(folder.resolve() for folder in options.folder)]
    for folder in folders:
        source = folder / "compiled.py"
        if not source.is_file():
            parser.error(f"{folder} is no copy of kernels/hopper: it has no compiled.py")
        if not re.search(r"def gemm_up\([^)]*\brank\b", source.read_text()):
            parser.error(
                f"{source} has no gemm_up with a rank: the copy is too old to be called as this tree's kernels"
            )
    os.environ["LOCAL_RANK"] = "1"  # no further processes that compile
    # a fork of a process that uses CUDA cannot be used
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for shape in [shape_of(text) for text in options.shape or ()] or SHAPES.values():
            compare_code(pool, folders, shape)


if __name__ == "__main__":
    main()
