"""`sonicmoe-hf run` gives way to the program: command line, exit code, signals, standard input, tracebacks and children
are as if the program had been run by itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import sonicmoe_hf
from sonicmoe_hf.tools.autopatch.program import NOTHING_PATCHED, SITE, _environment, _own_python
from sonicmoe_hf.tools.autopatch.settings import RUN_VARIABLE, RunSettings, from_environment
from sonicmoe_hf.tools.cli.main import main
from sonicmoe_hf.tools.cli.run import split_program

pytestmark = pytest.mark.pinned
ROOT = Path(sonicmoe_hf.__file__).resolve().parent.parent
STARTED = "any(type(finder).__name__ == 'FirstImport' for finder in sys.meta_path)"
TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "stdin": sys.stdin.read(),
                  "pid": os.getpid(), "spec": getattr(__spec__, "name", None)}))
"""
START = """import sys
from sonicmoe_hf_command import main
sys.argv.insert(1, "run")
sys.exit(main())
"""
MODEL = """class PreTrainedModel:
    def post_init(self): pass
    @classmethod
    def from_pretrained(cls): pass
"""
ARE_PATCHED = """from transformers.modeling_utils import PreTrainedModel as model
print([hasattr(method, '__wrapped__') for method in (model.post_init, model.from_pretrained)])"""


def launch(*command, cwd, env=None, **options):
    """Run a command with this checkout on PYTHONPATH, after what `env` has there."""
    environment = {**os.environ, **(env or {})}
    path = [*(env or {}).get("PYTHONPATH", "").split(os.pathsep), str(ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def run(tmp_path):
    """Run a program by `sonicmoe-hf run`, which imports neither torch nor Transformers itself."""
    return lambda *words, **options: launch(sys.executable, "-c", START, "--", *words, cwd=tmp_path, **options)


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def fake_transformers(tmp_path):
    """Write a package of that name, whose import is quick."""
    write(tmp_path, "theirs/transformers/__init__.py", "")
    write(tmp_path, "theirs/transformers/modeling_utils.py", MODEL)
    return {"PYTHONPATH": str(tmp_path / "theirs")}


@pytest.mark.parametrize(
    "words",
    [["tell.py", "--json", "a b", "--", "-x"], ["-m", "package.tell", "run", "--routing"]],
    ids=["script", "module"],
)
def test_a_program_sees_what_it_sees_by_itself(words, tmp_path, run):
    write(tmp_path, "tell.py", TELL)
    write(tmp_path, "package/tell.py", TELL)
    by_itself = launch(sys.executable, *words, cwd=tmp_path, input="from stdin\n")
    done = run(*words, input="from stdin\n")
    assert done.returncode == by_itself.returncode == 0, done.stderr
    told, expected = json.loads(done.stdout), json.loads(by_itself.stdout)
    assert told.pop("pid") and expected.pop("pid")
    assert told == expected and told["stdin"] == "from stdin\n"
    assert done.stderr == by_itself.stderr == ""


def test_exit_code_and_traceback_are_the_programs_own(tmp_path, run):
    write(tmp_path, "fails.py", "def fail():\n    raise LookupError('of its own')\n\nfail()\n")
    by_itself = launch(sys.executable, "fails.py", cwd=tmp_path)
    done = run("fails.py")
    assert done.returncode == by_itself.returncode == 1
    assert done.stderr == by_itself.stderr and "LookupError: of its own" in done.stderr


def test_a_program_of_another_kind_keeps_its_exit_code_and_is_told_that_nothing_was_patched(
    tmp_path, run, fake_transformers
):
    isolated = write(tmp_path, "isolated.sh", f"#!/bin/sh\n{sys.executable} -I -c 'raise SystemExit(7)'\n")
    done = run(str(isolated))
    assert done.returncode == 7 and done.stderr.endswith(f"{NOTHING_PATCHED}\n")
    assert "leave out Python's options -I, -E and -S, or install" in NOTHING_PATCHED
    write(tmp_path, "ask.py", f"import sys\nsys.path.insert(0, 'theirs')\n{ARE_PATCHED}")
    patched = write(tmp_path, "patched.sh", f"#!/bin/sh\n{sys.executable} ask.py\n")
    for words in ([str(patched)], ["-u", "ask.py"]):
        done = run(*words)
        assert done.returncode == 0 and done.stdout == "[True, True]\n" and NOTHING_PATCHED not in done.stderr


@pytest.mark.parametrize("kind", ["script", "child"])
def test_a_signal_reaches_the_program(kind, tmp_path):
    script = write(tmp_path, "waits.py", "import time\nprint('ready', flush=True)\ntime.sleep(100)\n")
    words = [str(script)] if kind == "script" else ["-u", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", START, "--", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == (-signal.SIGTERM if kind == "script" else 128 + signal.SIGTERM)


def test_settings_reach_children_of_this_environment_and_nobody_else(tmp_path, run):
    ask = f"import sys; print({STARTED})"
    parent = write(
        tmp_path, "parent.py", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    )
    assert run(str(parent)).stdout == "True\n"
    assert launch(sys.executable, str(parent), cwd=tmp_path).stdout == "False\n"
    settings = RunSettings(routing="balanced", tile=4, adapt_experts=8)
    environment = _environment(settings, {"PYTHONPATH": "/there"})
    assert environment["PYTHONPATH"] == os.pathsep.join([str(SITE), "/there"])
    assert _environment(settings, environment)["PYTHONPATH"] == environment["PYTHONPATH"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE", "unless the user has set it"
    assert _environment(settings, {"OMP_WAIT_POLICY": "ACTIVE"})["OMP_WAIT_POLICY"] == "ACTIVE"
    assert from_environment(environment) == settings
    other = {**json.loads(environment[RUN_VARIABLE]), "prefix": str(tmp_path)}
    done = launch(
        sys.executable, "-c", ask, cwd=tmp_path, env={"PYTHONPATH": str(SITE), RUN_VARIABLE: json.dumps(other)}
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "theirs", ["print('theirs')", "import transformers.modeling_utils", "raise LookupError('of theirs')"]
)
def test_models_are_patched_whatever_the_other_sitecustomize_does(theirs, tmp_path, run, fake_transformers):
    """Python prints an error that the other one raises, and goes on."""
    write(tmp_path, "theirs/sitecustomize.py", theirs)
    by_itself = launch(sys.executable, "-c", "", cwd=tmp_path, env=fake_transformers)
    done = run("-c", ARE_PATCHED, env=fake_transformers)
    assert done.stdout == f"{by_itself.stdout * 2}[True, True]\n", done.stderr  # once as the command starts
    assert done.stderr.splitlines()[-1:] == by_itself.stderr.splitlines()[-1:]


def test_children_import_the_package_that_the_command_is_of_and_not_before_a_model_is_built(tmp_path):
    """A checkout may be installed, or not, or another one in its place."""
    environment = _environment(RunSettings(), {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    ask = "import sys, sitecustomize; print(sitecustomize.ROOT, 'sonicmoe_hf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == f"{SITE.parents[3]} False", done.stderr


def test_commands_of_this_environment_take_over_and_all_others_are_children(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trl = Path(sys.executable).parent / "trl"
    write(tmp_path, "trl/__main__.py", "")  # as in a clone of the tool
    assert _own_python(["trl", "sft"]) == [sys.executable, str(trl), "sft"]
    assert _own_python([str(trl), "sft"]) == [sys.executable, str(trl), "sft"]
    write(tmp_path, "package/__main__.py", "")
    assert _own_python(["package", "-x"]) == [sys.executable, "package", "-x"]
    for foreign in ("python", "sh", "-u", str(write(tmp_path, "train.sh", "#!/bin/bash\ntrl sft\n"))):
        assert _own_python([foreign]) is None


def test_the_commands_options_are_the_programs_settings(monkeypatch):
    monkeypatch.setattr(os, "execve", execve := mock.Mock())
    words = "run --routing nearest --tile 8 --save input --experts-quantization nf4 --adapt-experts 4"
    words += " --compile -- -m x"
    main(words.split())
    command, environment = execve.call_args.args[1:]
    assert command == [sys.executable, "-m", "x"]
    found = from_environment(environment)
    assert (found.routing, found.tile, found.save) == ("nearest", 8, "input")
    assert (found.experts_quantization, found.adapt_experts, found.compile) == ("nf4", 4, True)


def test_what_cannot_be_run_is_refused_with_the_remedy(capsys):
    for words, message in {
        "run -- no-such-command": "no command 'no-such-command'",
        "run": "no program to run",
        "run --tile 8 -- x": "--tile is of token rounding",
    }.items():
        assert main(words.split()) == 2
        assert message in capsys.readouterr().err
    for words in ("run --routing sideways -- x", "run --rooting -- x"):
        with pytest.raises(SystemExit) as exit:
            main(words.split())
        assert exit.value.code == 2


@pytest.mark.parametrize(
    ("words", "own", "rest"),
    [
        ("run -- x --json -- y", "run", "x --json -- y"),
        ("run --routing nearest --tile=8 -- -m p --save", "run --routing nearest --tile=8", "-m p --save"),
        ("run --adapt-experts 8 -m p", "run --adapt-experts 8", "-m p"),
        ("run --compile script.py --tile 3", "run --compile", "script.py --tile 3"),
        ("run --help", "run --help", ""),
        ("doctor -- x", "doctor -- x", ""),
    ],
)
def test_the_program_begins_after_two_dashes_or_at_the_first_word_that_is_not_ours(words, own, rest):
    """Launchers may take the dashes out."""
    assert split_program(words.split()) == (own.split(), rest.split())


def test_options_of_run_after_the_programs_name_are_told_and_not_those_after_two_dashes(capsys):
    for words, said in (
        ("run sft.py --adapt-experts 8", 1),
        ("run -- sft.py --adapt-experts 8", 0),
        ("run sft.py -x", 0),
    ):
        split_program(words.split())
        assert capsys.readouterr().err.count("--adapt-experts after sft.py is passed on to it") == said


def test_abbreviated_options_are_refused_with_what_was_meant(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--adapt-expert", "8", "--", "sft.py"])
    assert "did you mean --adapt-experts?" in capsys.readouterr().err
