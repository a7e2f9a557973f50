"""The kernels of kernels/hopper beside those of other copies of that folder, which are called by this tree's names and
parameters: copies from the commit on that gave the kernels the words of this tree (LoraTerm, up_backward_input).

    git worktree add /tmp/before HEAD~1
    python benchmarks/compare_kernels.py --code /tmp/before/kernels/hopper      # the same machine code? needs no GPU
    python benchmarks/compare_kernels.py /tmp/before/kernels/hopper [FOLDER ...] [--shape T,H,I,E,K ...] [--same dW1 ...]

Without --code, every kernel in place in a layer's forward and backward by torch's profiler, bf16, SwiGLU, the copies
taking turns: microseconds, and how many percent more than the tree's. `--same` names kernels that do not differ: what the
clock did to them meanwhile is taken out. Results whose bits are not the tree's are named. Compiles in processes of their
own first.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this also runs by its path

from benchmarks.common.paths import ROOT
from benchmarks.common.shapes import SHAPES, Shape, problem
from sonicmoe_hf.kernels.interface import Activation

TREE = ROOT / "kernels" / "hopper"
FUNCTIONS = ("up", "down", "down_backward", "up_backward_input", "gate_up_gradient", "down_gradient")
LAST_COLUMNS = ("combine", "the rest", "sum")


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


def compiled(folder, shape, number):
    """Compile one kernel into the cache."""
    name, parameters = kernels(folder, shape)[number]
    getattr(part(folder, "compiled"), name)(*parameters)


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


def of_every_kernel(pool, function, folders, shape):
    """For each folder {(function of compiled.py, its parameters as text): what `function` returns for that kernel}."""
    found = []
    for folder in folders:
        # a tile of another copy may have other fields; its text says what it is
        names = [(name, *map(str, parameters)) for name, parameters in kernels(folder, shape)]
        found.append({name: pool.submit(function, folder, shape, number) for number, name in enumerate(names)})
    return [{name: of_one.result() for name, of_one in of_folder.items()} for of_folder in found]


def compare_code(pool, folders, shape):
    ours, *others = of_every_kernel(pool, machine_code, folders, shape)
    for folder, theirs in zip(folders[1:], others):
        print(f"{shape} {folder}", flush=True)
        for kernel in dict.fromkeys((*ours, *theirs)):
            words = "same" if ours.get(kernel) == theirs.get(kernel) else "DIFFERENT"
            if kernel not in theirs or kernel not in ours:
                words = "only there" if kernel in theirs else "only in the tree"
            sizes = [text for text in kernel[1:] if text.isdigit()]
            print(f"  {words:16s} {kernel[0]} {' '.join(sizes)} in tiles of {kernel[-1]}", flush=True)


def use(hopper, copy):
    for name in FUNCTIONS:
        setattr(hopper, name, getattr(copy, name))


def measure(folders, shape, rounds, same):
    from benchmarks.common.contenders import available
    from benchmarks.layer.layer_kernels import PRODUCTS, launches, times_by_role
    from benchmarks.layer.moe_layer import Step
    from sonicmoe_hf.kernels import hopper

    step = Step(available(["hopper"], shape)["hopper"], problem(shape), "forward+backward")
    first, times = None, {folder: [] for folder in folders}
    for folder in folders:
        use(hopper, load(folder))
        found = [step(), *step.gradients]
        first = first or found
        if not all(map(torch.equal, first, found)):
            print(f"  {folder}: NOT THE BITS of the tree", flush=True)
    for number in range(rounds):
        start = number % len(folders)
        for folder in (*folders[start:], *folders[:start]):
            use(hopper, load(folder))
            step()  # so that the one after it runs on a GPU as hot as in training
            times[folder].append(launches(step))
    columns = (*PRODUCTS["hopper"], *LAST_COLUMNS)
    print(f"{shape}\n{'':12s}" + "".join(f"{column:>16s}" for column in columns), flush=True)
    of_tree = None
    for number, runs in enumerate(times.values()):
        figures = dict.fromkeys(columns, 0.0)
        for role, of_role in times_by_role("hopper", runs, "forward+backward"):
            role = role if role in columns else "combine" if "combine" in role else "the rest"
            figures[role] += statistics.median(of_role)
        of_tree = of_tree or figures
        clock = sum(figures[name] for name in same) / sum(of_tree[name] for name in same) if same else 1.0
        words = (f"{us:9.1f} {100 * (us / of_tree[role] / clock - 1):+5.1f}%" for role, us in figures.items())
        print(f"{number or 'tree':<12}" + "".join(map("{:>16s}".format, words)) + f"  clock {clock:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", type=Path, help="a copy of kernels/hopper")
    parser.add_argument("--code", action="store_true", help="compare machine code; no GPU")
    parser.add_argument("--shape", action="append", help="T,H,I,E,K; may be given several times")
    parser.add_argument("--same", action="append", default=[], help="a kernel that does not differ: up, dW1, ...")
    parser.add_argument("--rounds", type=int, default=10)
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
    shapes = [Shape(*map(int, text.split(","))) for text in options.shape] if options.shape else list(SHAPES.values())
    os.environ["LOCAL_RANK"] = "1"  # no further processes that compile
    if not options.code and not torch.cuda.is_available():
        raise SystemExit("timing needs a CUDA GPU; --code does not")
    # a fork of a process that uses CUDA cannot be used
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for shape in shapes:
            if options.code:
                compare_code(pool, folders, shape)
            else:
                of_every_kernel(pool, compiled, folders, shape)
    if not options.code:
        for shape in shapes:
            measure(folders, shape, options.rounds, options.same)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
