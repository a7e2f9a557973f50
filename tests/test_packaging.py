"""The wheel holds what it should and imports from anywhere; the checkout works beside it."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORTS = "import sonicmoe_hf, sonicmoe_hf.kernels.eager, sonicmoe_hf.model_patches, sonicmoe_hf.demo"


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*arguments, path, cwd):
    """Run Python with `path` before the dependencies, and without site: an editable install's finder stays out."""
    dependencies = next(folder for folder in sys.path if (Path(folder) / "torch").is_dir())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), dependencies])}
    return run(sys.executable, "-S", *arguments, cwd=cwd, env={**environment, "PYTHONDONTWRITEBYTECODE": "1"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, without isolation and without network."""
    folder = tmp_path_factory.mktemp("packaging")
    ignored = (
        "--exclude=./.*",
        "--exclude=./tests",
        "--exclude=./build",
        "--exclude=./outputs",
        "--exclude=*.egg-info",
    )
    (folder / "sources").mkdir()
    sources = subprocess.run(["tar", "-c", *ignored, "."], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder / "sources", input=sources, check=True)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, str(folder), cwd=folder / "sources")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the wheel's packages, as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_the_packages_the_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "sonicmoe_hf/kernels/eager.py" in names
    assert "sonicmoe_hf/model_patches/qwen3_moe.py" in names
    assert any(re.fullmatch(r"sonicmoe_hf-[\d.]+\.dist-info/licenses/LICENSE", name) for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sonicmoe_hf"}


def test_every_package_of_the_checkout_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, prefix in (("sonicmoe_hf", ""), ("kernels", "sonicmoe_hf/"), ("model_patches", "sonicmoe_hf/")):
        for path in (ROOT / folder).rglob("*.py"):
            assert prefix + path.relative_to(ROOT).as_posix() in names, "list its package in pyproject.toml"


def test_the_wheel_imports_from_anywhere(installed, tmp_path):
    code = f"{IMPORTS}; print(sonicmoe_hf.kernels.__file__)"
    printed = python("-c", code, path=[installed], cwd=tmp_path)
    assert Path(printed.strip()).is_relative_to(installed)


def test_the_checkout_imports_without_an_install(tmp_path):
    code = f"{IMPORTS}; print(sonicmoe_hf.kernels.__file__)"
    printed = python("-c", code, path=[ROOT], cwd=tmp_path)
    assert Path(printed.strip()) == ROOT / "kernels" / "__init__.py"


@pytest.mark.parametrize("module", ["sonicmoe_hf", "sonicmoe_hf.cli"])
def test_python_m_works_from_the_repository_root_beside_an_installed_wheel(installed, module):
    """There `sonicmoe_hf` is the checkout's, whose kernels/ lies beside it, not inside."""
    assert python("-m", module, "--version", path=[installed], cwd=ROOT).startswith("sonicmoe-hf ")


def test_importing_the_kernels_folder_from_the_root_does_not_disturb_transformers():
    """Transformers looks for a package `kernels`; with the repository root on sys.path it finds ours."""
    run(sys.executable, "-c", "import kernels, transformers; transformers.Qwen3MoeForCausalLM", cwd=ROOT)


def test_the_pins_satisfy_the_declared_ranges():
    from packaging.requirements import Requirement

    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    pinned = {Requirement(line).name: str(Requirement(line).specifier).removeprefix("==") for line in pins}
    for text in re.findall(r'"([a-z][\w.-]*(?:[<>=]=?)[^"]*)"', declared):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[wanted.name]), f"{text} but {pinned[wanted.name]} is pinned"
