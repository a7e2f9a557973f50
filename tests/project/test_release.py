"""Releases are published by .ci/release.py, and by workflows that end before the upload unless a tag is pushed."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import sonicmoe_hf

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
pytestmark = pytest.mark.pinned


@pytest.fixture
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path):
    """Make a folder with a version and a CHANGELOG of two."""
    (tmp_path / "sonicmoe_hf").mkdir()
    (tmp_path / "sonicmoe_hf" / "__init__.py").write_text('import os\n\n__version__ = "0.2.0"\n', encoding="utf-8")
    text = "# Changelog\n\n## [0.2.0] - 2026-12-01\n\n### New\n\n- A thing.\n\n## [0.1.0] - 2026-11-01\n\nThe first.\n"
    (tmp_path / "CHANGELOG.md").write_text(text, encoding="utf-8")
    return tmp_path


def test_the_version_stands_in_one_place_and_has_an_entry_in_the_changelog(release):
    assert release.version(ROOT) == sonicmoe_hf.__version__
    assert release.entry(ROOT)[1]
    release.check(ROOT, "refs/heads/main")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'version = { attr = "sonicmoe_hf.__version__" }' in project
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_notes_are_the_entry_of_the_version_alone(release, repository):
    assert release.entry(repository) == ("2026-12-01", "### New\n\n- A thing.\n")
    release.check(repository, "refs/tags/v0.2.0")


def test_a_tag_of_another_version_or_without_a_date_is_no_release(release, repository):
    with pytest.raises(SystemExit, match=r"the tag is 0\.3\.0, and sonicmoe_hf/__init__\.py has 0\.2\.0"):
        release.check(repository, "refs/tags/v0.3.0")
    path = repository / "CHANGELOG.md"
    path.write_text(path.read_text(encoding="utf-8").replace("2026-12-01", "not released yet"), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"dates 0\.2\.0 'not released yet': write YYYY-MM-DD"):
        release.check(repository, "refs/tags/v0.2.0")


def test_a_nightly_version_is_written_once(release, repository):
    release.nightly(repository, "20261201")
    assert release.version(repository) == "0.2.0.dev20261201"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_is_there(path):
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z][a-z-]*)", text)) <= targets
    assert all((ROOT / name).is_file() for name in re.findall(r"python (\.ci/\S+)", text))
    for uses in re.findall(r"uses: (\S+)(.*)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", uses[0]) and re.search(r"# v\d+\.\d+\.\d+", uses[1]), uses


def test_the_container_is_linted_and_built_and_its_files_are_there():
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8"))
    runs = [step["run"] for step in nightly["jobs"]["container"]["steps"] if "run" in step]
    assert "hadolint Dockerfile" in runs[0] and runs[1].startswith("docker build")
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM \S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE) and re.search(
        r"^USER \d+$", text, re.MULTILINE
    )
    let_in = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in let_in if not (ROOT / name).exists()] == [] and "constraints.txt" in let_in


def test_the_site_has_each_page_as_markdown_and_a_list_of_all_for_programs(tmp_path):
    pytest.importorskip("mkdocs")  # which `make docs` installs
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "docs" / "mkdocs_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    config = SimpleNamespace(repo_url="https://github.com/acme/sonicmoe-hf/", site_dir=str(tmp_path), extra={})
    config.site_name, config.site_description = "name", "what it is"
    pages = [
        SimpleNamespace(file=SimpleNamespace(src_uri=f"{name}.md"), title=name, meta={}) for name in ("lora", "plan")
    ]
    hooks.on_nav(SimpleNamespace(pages=pages), config, None)
    text = "[serving](serving.md#adapters) [code](../examples/qlora.py) [us](../CONTRIBUTING.md)"
    for page in pages:
        hooks.on_page_markdown(text, page, config, None)
    hooks.on_post_build(config)
    expected = "[serving](serving.md#adapters) [code](repository/examples/qlora.py) [us](contributing.md)"
    assert (tmp_path / "lora.md").read_text(encoding="utf-8") == expected
    listed = "# name\n\n> what it is\n\n- [lora](lora.md)\n- [plan](plan.md)\n"
    assert (tmp_path / "llms.txt").read_text(encoding="utf-8") == listed


def test_everything_up_to_the_upload_runs_without_a_tag_and_nothing_after_it():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))["jobs"]
    rehearsed = {name for name, job in jobs.items() if "if" not in job and job.get("needs") in (None, "build")}
    assert rehearsed == {"build", "check"}
    assert jobs["pypi"]["if"] == "startsWith(github.ref, 'refs/tags/v')" and jobs["page"]["needs"] == "pypi"
    assert all("id-token" not in jobs[name]["permissions"] for name in rehearsed)
