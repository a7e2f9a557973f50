"""The wheel holds what it should and imports from anywhere; the checkout works beside it."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import sonicmoe_hf
from sonicmoe_hf.private.versions import TESTED

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = "import sonicmoe_hf, sonicmoe_hf.kernels.eager, sonicmoe_hf.model_patches, sonicmoe_hf.demo"
WHERE = f"{IMPORTS}; print(*sonicmoe_hf.kernels.__path__)"


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
def sources(tmp_path_factory):
    """A copy of the checkout, so that building leaves nothing in it."""
    folder = tmp_path_factory.mktemp("packaging")
    ignored = [f"--exclude={name}" for name in ("./.*", "./build", "./outputs", "*.egg-info", "__pycache__")]
    sources = subprocess.run(["tar", "-c", *ignored, "."], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=sources, check=True)
    return folder


def build(kind, sources, folder):
    """Build a wheel, an editable one or an sdist, without isolation and without network; returns its path."""
    folder.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    return folder / run(sys.executable, "-c", code, str(folder), cwd=sources).splitlines()[-1]


@pytest.fixture(scope="module")
def without_links(sources, tmp_path_factory):
    """The sources as a zip archive, or a clone with core.symlinks=false, has them: each link is a file with its text."""
    folder = tmp_path_factory.mktemp("without") / "links"
    shutil.copytree(sources, folder, symlinks=True)
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        text = os.readlink(link)
        link.unlink()
        link.write_text(text)
    return folder


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """The wheel that users install."""
    return build("wheel", sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the wheel's packages, as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory):
    """Folders for sys.path with Hugging Face's `kernels`: the installed one, under a version that Transformers takes."""
    found = importlib.metadata.distribution("kernels").locate_file("")
    metadata = tmp_path_factory.mktemp("kernels") / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n", encoding="utf-8")
    return [metadata.parent.parent, found]


def test_the_wheel_holds_the_packages_the_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "sonicmoe_hf/kernels/eager.py" in names
    assert "sonicmoe_hf/model_patches/olmoe.py" in names
    assert any(re.fullmatch(r"sonicmoe_hf-[\d.]+\.dist-info/licenses/LICENSE", name) for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sonicmoe_hf"}


def test_every_package_of_the_checkout_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("sonicmoe_hf", "examples", "kernels", "model_patches"):
        prefix = "" if folder == "sonicmoe_hf" else "sonicmoe_hf/"
        for path in (ROOT / folder).rglob("*.py"):
            assert prefix + path.relative_to(ROOT).as_posix() in names, "list its package in pyproject.toml"
    tracked = run("git", "ls-files", "examples", cwd=ROOT).split()
    assert [name for name in tracked if f"sonicmoe_hf/{name}" not in names] == [], "list its suffix in package-data"


@pytest.mark.slow
def test_a_build_without_links_gives_the_same_wheel_and_an_editable_install_says_that_it_needs_them(
    wheel, without_links, tmp_path
):
    built = build("wheel", without_links, tmp_path / "wheel")
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
    with pytest.raises(
        AssertionError,
        match=r"needs sonicmoe_hf/examples, sonicmoe_hf/kernels, sonicmoe_hf/model_patches as links to folders",
    ):
        build("editable", without_links, tmp_path / "editable")


@pytest.mark.slow
def test_the_sdist_has_no_tests_and_builds_the_same_wheel(wheel, sources, tmp_path):
    with tarfile.open(build("sdist", sources, tmp_path)) as archive:
        archive.extractall(tmp_path)
    (unpacked,) = [path for path in tmp_path.glob("sonicmoe_hf-*") if path.is_dir()]
    assert not (unpacked / "tests").exists()
    built = build("wheel", unpacked, tmp_path / "wheel")
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_an_installed_wheel_imports_from_anywhere_prints_its_examples_and_they_start(installed, tmp_path):
    code = f"{WHERE}; from sonicmoe_hf.cli.main import main; main(['example', 'qlora'])"
    where, _, example = python("-c", code, path=[installed], cwd=tmp_path).partition("\n")
    assert Path(where) == installed / "sonicmoe_hf" / "kernels"
    (tmp_path / "mine.py").write_text(example, encoding="utf-8")
    assert "--model MODEL" in python("mine.py", "--help", path=[installed], cwd=tmp_path)  # it imports two others


@pytest.mark.slow
def test_the_checkout_imports_without_an_install(tmp_path):
    printed = Path(python("-c", WHERE, path=[ROOT], cwd=tmp_path).strip())
    assert printed.samefile(ROOT / "kernels")


@pytest.mark.slow
def test_an_editable_install_imports_from_anywhere(sources, tmp_path):
    zipfile.ZipFile(build("editable", sources, tmp_path)).extractall(tmp_path)
    printed = python("-c", f"import site; site.addsitedir({str(tmp_path)!r}); {WHERE}", path=[], cwd=tmp_path)
    assert Path(printed.strip()).samefile(sources / "kernels")


@pytest.mark.slow
def test_python_m_works_from_the_repository_root_beside_an_installed_wheel(installed, with_kernels):
    """There `sonicmoe_hf` is the checkout's, which links to kernels/ beside it; the folder does not shadow `kernels`."""
    version = python("-m", "sonicmoe_hf", "--version", path=[installed, *with_kernels], cwd=ROOT)
    assert version.startswith("sonicmoe-hf ")


def test_every_export_is_there_and_known_to_type_checkers():
    tree = ast.parse((ROOT / "sonicmoe_hf" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.asname or alias.name for node in typed.body for alias in node.names}
    assert names == set(sonicmoe_hf.__all__)
    assert [name for name in names if not hasattr(sonicmoe_hf, name)] == []


@pytest.mark.slow
def test_transformers_knows_our_names_in_whatever_order_things_are_imported():
    ask = "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as found; assert 'sonicmoe_hf' in found"
    native = "from transformers import AutoConfig; assert AutoConfig.for_model('sonicmoe_olmoe').model_type"
    # a process each, forked from one that has imported what Transformers does of torch, which is most of the time
    in_processes = (
        "import os, sys, torch._dynamo, torch.distributed.tensor\n"
        "for code in sys.argv[1:]:\n    child = os.fork()\n    if child == 0:\n        "
    )
    in_processes += "exec(code)\n        os._exit(0)\n    assert os.waitpid(child, 0)[1] == 0, code"
    orders = (
        "import sonicmoe_hf",
        "import sonicmoe_hf.patching.experts",
        "import sonicmoe_hf.checkpoints.modeling",
        "import transformers.modeling_utils, sonicmoe_hf",
    )
    run(sys.executable, "-c", in_processes, *(f"{first}; {ask}; {native}" for first in orders), cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "pytest", "--collect-only", "-q", "tests/layer/test_bad_input.py"),
        ("-c", "import transformers, sys; transformers.Qwen3MoeForCausalLM; assert 'kernels.layer' in sys.modules"),
    ],
    ids=["pytest", "a model's import"],
)
def test_the_folder_kernels_does_not_shadow_the_package_kernels(with_kernels, arguments):
    """Transformers imports Hugging Face's `kernels` where it is installed; the root's folder comes first on sys.path."""
    python(*arguments, path=with_kernels, cwd=ROOT)


def test_the_extras_hold_what_they_promise(wheel):
    from packaging.metadata import parse_email

    text = zipfile.ZipFile(wheel).read(f"{wheel.name.rsplit('-', 3)[0]}.dist-info/METADATA")
    wanted = [Requirement(line) for line in parse_email(text)[0]["requires_dist"]]

    def of(extra):
        facts = {"extra": extra, "platform_system": "Linux"}
        direct = [one for one in wanted if one.marker is not None and one.marker.evaluate(facts)]
        inner = [of(name) for one in direct if one.name == "sonicmoe-hf" for name in one.extras]
        return {one.name for one in direct}.union(*inner)

    assert of("hopper") == {"apache-tvm-ffi", "nvidia-cutlass-dsl", "triton"}, "what backends.HOPPER_PACKAGES asks for"
    assert of("all") >= of("hopper") | of("peft") | of("train")


def test_the_pins_satisfy_the_declared_ranges():
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    pinned = {Requirement(line).name: str(Requirement(line).specifier).removeprefix("==") for line in pins}
    for text in re.findall(r'"([a-z][\w.-]*(?:[<>=]=?)[^"]*)"', declared):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[wanted.name]), f"{text} but {pinned[wanted.name]} is pinned"


def test_the_oldest_and_the_newest_tested_versions_are_those_of_ci():
    declared, ci = (ROOT / "pyproject.toml").read_text(encoding="utf-8"), ROOT / ".ci"
    oldest, newest = ((ci / f"{name}.txt").read_text(encoding="utf-8").splitlines() for name in ("oldest", "newest"))
    for package, (least, most) in TESTED.items():
        assert f'"{package}>={least}"' in declared  # and no newest: the next release locks nobody out
        assert f"{package}=={least}.0" in oldest
        assert any(line.startswith(f"{package}=={most}.") for line in newest)


def test_make_takes_a_python_whose_path_has_a_space(tmp_path):
    options = [f"VENV={tmp_path}/new", "PYTHON=/with space/python3"]
    assert '"/with space/python3" -m venv' in run("make", "-n", *options, f"{tmp_path}/new/.installed", cwd=ROOT)


def test_every_address_of_the_project_is_the_one_of_pyproject():
    """A release puts the owner there; the others cannot read it."""
    (address,) = re.findall(
        r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    for name in ("README.md", "CITATION.cff", "mkdocs.yml", "pyproject.toml"):
        found = re.findall(r"https://github\.com/[\w-]+/sonicmoe-hf", (ROOT / name).read_text(encoding="utf-8"))
        assert found and set(found) == {address}, f"{name}: make owner NAME=... writes it"
