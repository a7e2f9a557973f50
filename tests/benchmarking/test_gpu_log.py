"""benchmarks/gpu_tests.py: the log of the GPU tests names the later commits that change kernels/."""

import subprocess

import pytest

from benchmarks import gpu_tests

pytestmark = pytest.mark.pinned
LOG = "commit {}\nan H200\n\na test\n1 passed\n"


@pytest.fixture
def repository(tmp_path):
    """Make (root, a function that commits a change of a file and returns the commit)."""

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def commit(name, subject):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(subject)
        git("add", name)
        git("commit", "-q", "-m", subject)
        return git("rev-parse", "HEAD")[:12]

    git("init", "-q")
    return tmp_path, commit


def write_log(root, commit):
    path = root / "benchmarks" / "results" / "gpu_tests.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LOG.format(commit))
    return path


def test_the_log_lists_later_commits_of_kernels_and_no_others(repository):
    root, commit = repository
    tested = commit("kernels/up.py", "A kernel")
    path = write_log(root, tested)
    commit("docs/a.md", "A document")
    gpu_tests.main(["--root", str(root)])
    commit("kernels/up.py", "A faster kernel")
    with pytest.raises(SystemExit, match=f"does not list what came after {tested}"):
        gpu_tests.main(["--root", str(root)])
    gpu_tests.main(["--root", str(root), "--write"])
    commit("kernels/down.py", "Another kernel")
    gpu_tests.main(["--root", str(root), "--write"])
    gpu_tests.main(["--root", str(root)])
    listed = f"commit {tested}\nan H200\n\n{gpu_tests.HEAD}\n- A faster kernel\n- Another kernel\n\na test\n1 passed\n"
    assert path.read_text() == listed


def test_a_new_log_needs_no_list(repository):
    root, commit = repository
    path = write_log(root, commit("kernels/up.py", "A kernel"))
    gpu_tests.main(["--root", str(root)])
    assert gpu_tests.with_commits(gpu_tests.with_commits(path.read_text(), ["Another"]), []) == path.read_text()


def test_without_the_history_nothing_is_compared(tmp_path, capsys):
    write_log(tmp_path, "0123456789ab")
    gpu_tests.main(["--root", str(tmp_path)])
    assert "git does not know 0123456789ab here" in capsys.readouterr().err
