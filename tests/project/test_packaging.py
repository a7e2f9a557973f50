"""The wheel holds what it should and imports from anywhere; the checkout works beside it."""

import ast
import importlib.metadata
import json
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
from packaging.version import Version
from transformers.utils.import_utils import KERNELS_MIN_VERSION

import sonicmoe_hf
from sonicmoe_hf.errors import deprecated
from sonicmoe_hf.private.versions import TESTED

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = """
import json, os, sys, traceback

for name, folder, path, code in json.loads(sys.stdin.read()):
    if not name:
        exec(code)
    elif not (child := os.fork()):
        with open(name, "w") as told:
            os.dup2(told.fileno(), 1)
        os.chdir(folder)
        sys.path[:0] = ["", *path]
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException as error:
            if getattr(error, "code", error):  # not of a program that exits with 0
                traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    else:
        os.waitpid(child, 0)
"""
IMPORTS = "import sonicmoe_hf, sonicmoe_hf.kernels.eager, sonicmoe_hf.model_patches, sonicmoe_hf.tools.demo"
WHERE = f"{IMPORTS}; print(*sonicmoe_hf.kernels.__path__)"


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Make a copy of the checkout, so that building leaves nothing in it."""
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
    """Copy the sources as a zip archive, or a clone without symlinks, has them: each link is a file with its text."""
    folder = tmp_path_factory.mktemp("without") / "links"
    shutil.copytree(sources, folder, symlinks=True)
    for link in [path for path in folder.rglob("*") if path.is_symlink()]:
        text = os.readlink(link)
        link.unlink()
        link.write_text(text)
    return folder


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory):
    """Make the wheel that users install."""
    return build("wheel", sources, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Make a folder that holds the wheel's packages, as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory):
    """Make folders for sys.path with Hugging Face's `kernels`: the installed one, under a version that Transformers
    takes."""
    found = importlib.metadata.distribution("kernels").locate_file("")
    metadata = tmp_path_factory.mktemp("kernels") / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n", encoding="utf-8")
    return [metadata.parent.parent, found]


@pytest.mark.pinned
def test_the_wheel_holds_the_packages_the_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "sonicmoe_hf/kernels/eager.py" in names
    assert "sonicmoe_hf/model_patches/olmoe.py" in names
    assert any(re.fullmatch(r"sonicmoe_hf-[\d.]+\.dist-info/licenses/LICENSE", name) for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sonicmoe_hf", "sonicmoe_hf_command.py"}


@pytest.mark.pinned
def test_the_readme_of_a_package_index_links_to_files_that_the_repository_has(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    ours = r"https://(github|raw\.githubusercontent)\.com/[\w-]+/sonicmoe-hf/(?:blob/)?main/([^#]+)"
    links = [match.groups() for target in targets if (match := re.match(ours, target))]
    assert len(links) > 30 and [path for _, path in links if not (ROOT / path).exists()] == []
    assert [path for host, path in links if host != "github"] == ["docs/images/moe_layer.png"]


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


COLLECTED = "tests/layer/test_bad_input.py"
ASK = "from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as found; assert 'sonicmoe_hf' in found"
NATIVE = "from transformers import AutoConfig; assert AutoConfig.for_model('sonicmoe_olmoe').model_type"


@pytest.fixture(scope="module")
def told(installed, with_kernels, sources, tmp_path_factory):
    """Run programs; returns what they printed, by name. Each runs in a process of its own, forked from one that has
    imported what Transformers does of torch, or Transformers; without site, so that an editable install's finder stays
    out."""
    folder, editable = tmp_path_factory.mktemp("told"), tmp_path_factory.mktemp("editable")
    zipfile.ZipFile(build("editable", sources, editable)).extractall(editable)
    as_module = "import runpy, sys; sys.argv[1:] = {}; runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
    qwen3 = "import transformers, sys; transformers.Qwen3MoeForCausalLM; assert 'kernels.layer' in sys.modules"
    example = "import sys; sys.argv[1:] = ['--help']; exec(open('wheel').read().partition('\\n')[2])"
    printing = "from sonicmoe_hf.tools.cli.main import main; main(['example', 'qlora'])"
    programs = [
        ("", "", [], "import torch._dynamo, torch.distributed.tensor"),
        ("before Transformers", ROOT, [ROOT], f"import sonicmoe_hf; {ASK}; {NATIVE}"),
        ("python -m", ROOT, [installed, *with_kernels], as_module.format(["--version"], "sonicmoe_hf")),
        ("pytest", ROOT, with_kernels, as_module.format(["--collect-only", "-q", COLLECTED], "pytest")),
        ("a model's import", ROOT, with_kernels, qwen3),
        ("", "", [], "import transformers.modeling_utils, transformers.models.auto.modeling_auto"),
        ("wheel", folder, [installed], f"{WHERE}; {printing}"),
        ("example", folder, [installed], example),
        (
            "command",
            folder,
            [installed],
            "import sys, sonicmoe_hf_command as it; sys.argv[1:] = ['doctor']; it.main()",
        ),
        ("checkout", folder, [ROOT], WHERE),
        ("editable", folder, [], f"import site; site.addsitedir({str(editable)!r}); {WHERE}"),
    ]
    dependencies = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    environment = {**os.environ, "PYTHONPATH": dependencies, "PYTHONDONTWRITEBYTECODE": "1"}
    given = json.dumps(programs, default=str)
    run(sys.executable, "-S", "-c", PROGRAMS, cwd=folder, env=environment, input=given)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.slow
def test_an_installed_wheel_imports_from_anywhere_has_a_command_prints_its_examples_and_they_start(installed, told):
    assert Path(told["wheel"].partition("\n")[0]) == installed / "sonicmoe_hf" / "kernels"
    assert "--model MODEL" in told["example"]  # it imports two others
    # the command imports the whole package after it has read its command line
    assert "SONICMOE_HF_BACKEND" in told["command"]


@pytest.mark.slow
def test_the_checkout_imports_without_an_install(told):
    assert Path(told["checkout"].strip()).samefile(ROOT / "kernels")


@pytest.mark.slow
def test_an_editable_install_imports_from_anywhere(sources, told):
    assert Path(told["editable"].strip()).samefile(sources / "kernels")


@pytest.mark.slow
def test_python_m_works_from_the_repository_root_beside_an_installed_wheel(told):
    """`sonicmoe_hf` is the checkout's there, which links to kernels/ beside it; the folder does not shadow `kernels`."""
    assert told["python -m"].startswith("sonicmoe-hf ")


def test_every_export_is_there_and_known_to_type_checkers():
    tree = ast.parse((ROOT / "sonicmoe_hf" / "__init__.py").read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.asname or alias.name for node in typed.body for alias in node.names}
    assert names == set(sonicmoe_hf.__all__)
    assert [name for name in names if not hasattr(sonicmoe_hf, name)] == []


def test_a_deprecated_name_warns_with_the_remedy_and_goes_when_it_said():
    @deprecated("0.3.0", "use patch_model")
    def patched():
        return 1

    with pytest.warns(FutureWarning, match=r"^it goes in sonicmoe_hf 0\.3\.0: use patch_model$"):
        assert patched() == 1
    for name in sonicmoe_hf.__all__:
        text = getattr(getattr(sonicmoe_hf, name), "__deprecated__", None)
        if text is not None:
            until = re.search(r"it goes in sonicmoe_hf ([\d.]+):", text)[1]
            assert Version(until) > Version(sonicmoe_hf.__version__), f"{name}: take it out"


@pytest.mark.slow
def test_transformers_knows_our_names_where_we_are_imported_first(told):
    """tests/project/test_registration.py has the other orders."""
    assert told["before Transformers"] == ""


@pytest.mark.slow
def test_the_folder_kernels_does_not_shadow_the_package_kernels(told):
    """Transformers imports Hugging Face's `kernels` where it is installed; the root's folder comes first on sys.path."""
    assert f"{COLLECTED}::" in told["pytest"] and "Traceback" not in told["pytest"] and told["a model's import"] == ""


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
    assert of("all") >= of("hopper") | of("trl") | {"bitsandbytes", "liger-kernel"}
    needed = {"AdamW8bit": "torchao", "BitsAndBytesConfig": "bitsandbytes", "use_liger_kernel": "liger-kernel"}
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    programs = {path.name: "".join(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)) for path in pages}
    programs |= {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for name, text in programs.items():
        imported = set(
            re.findall(r"^ *(?:from|import) (accelerate|datasets|matplotlib|peft|trl)\b", text, re.MULTILINE)
        )
        used = imported | {package for word, package in needed.items() if word in text}
        extras = of("all") | (of("full") if name == "full_finetune_one_gpu.py" else set())
        assert used <= extras, f"{name} needs what README's line does not install"
    assert "nvidia-ml-py" in of("train"), (
        "without which torch.cuda.utilization, and the advice on small steps, is silent"
    )


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
    notebooks = [f"examples/{path.name}" for path in (ROOT / "examples").glob("*.ipynb")]
    for name in ("README.md", "CITATION.cff", "mkdocs.yml", "pyproject.toml", *notebooks):
        found = re.findall(r"https://github\.com/[\w-]+/sonicmoe-hf", (ROOT / name).read_text(encoding="utf-8"))
        assert found and set(found) == {address}, f"{name}: make owner NAME=... writes it"


@pytest.mark.pinned
def test_make_owner_leaves_no_placeholder(tmp_path):
    owned = re.search(r"^OWNED := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    for name in (*owned, "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    run("make", "owner", "NAME=acme", cwd=tmp_path)
    texts = [(tmp_path / name).read_text(encoding="utf-8") for name in owned]
    assert all("OWNER" not in text and "/acme/sonicmoe-hf" in text for text in texts)
    assert not list(tmp_path.rglob("*.bak"))


def test_no_import_contract_has_exemptions():
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[[tool.importlinter.contracts]]")[2]
    assert contracts
    assert not re.findall(r"^ignore_imports", contracts, re.MULTILINE), "AGENTS.md says that none has any"
