"""`sonicmoe-hf run` becomes the program: command line, exit code, signals, standard input, tracebacks and children are as
if the program had been run by itself."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import sonicmoe_hf
from sonicmoe_hf.autopatch import program
from sonicmoe_hf.autopatch.program import SITE, ProgramError, _command, _environment
from sonicmoe_hf.autopatch.settings import VARIABLE, RunSettings, from_environment
from sonicmoe_hf.cli.main import main
from sonicmoe_hf.cli.run import split_program

pytestmark = pytest.mark.pinned
ROOT = Path(sonicmoe_hf.__file__).resolve().parent.parent
RUN = [sys.executable, "-m", "sonicmoe_hf", "run"]
STARTED = "any('sonicmoe' in type(finder).__module__ for finder in sys.meta_path)"
TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "stdin": sys.stdin.read(),
                  "pid": os.getpid(), "spec": getattr(__spec__, "name", None)}))
"""


def launch(*command, cwd, **options):
    """Run a command with this checkout on PYTHONPATH, first or after what the options have there."""
    environment = {**os.environ, **options.pop("env", {})}
    path = [*environment.get("PYTHONPATH", "").split(os.pathsep), str(ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, **options)


@pytest.fixture
def launch_run(tmp_path, monkeypatch):
    """Start what `sonicmoe-hf run` becomes, without that command's own start, which imports Transformers."""
    monkeypatch.chdir(tmp_path)

    def run(*words, env=None, **options):
        environment = _environment(RunSettings(), {**os.environ, **(env or {})})
        return launch(*_command(list(words)), cwd=tmp_path, env=environment, **options)

    return run


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "words",
    [["tell.py", "--json", "a b", "--", "-x"], ["-m", "package.tell", "run", "--routing"], ["-u", "tell.py"]],
    ids=["script", "module", "option of Python"],
)
def test_a_program_sees_what_it_sees_by_itself(words, tmp_path, launch_run):
    write(tmp_path, "tell.py", TELL)
    write(tmp_path, "package/tell.py", TELL)
    by_itself = launch(sys.executable, *words, cwd=tmp_path, input="from stdin\n")
    run = launch_run(*words, input="from stdin\n")
    assert run.returncode == by_itself.returncode == 0, run.stderr
    told, expected = json.loads(run.stdout), json.loads(by_itself.stdout)
    assert told.pop("pid") and expected.pop("pid")
    assert told == expected and told["stdin"] == "from stdin\n"
    assert run.stderr == by_itself.stderr == ""


@pytest.mark.slow
def test_the_command_becomes_the_program(tmp_path):
    script = write(tmp_path, "tell.py", TELL)
    with subprocess.Popen(
        [*RUN, "--", str(script), "-x"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        told = json.loads(process.communicate("from stdin", timeout=300)[0])
    assert told["pid"] == process.pid and told["argv"] == [str(script), "-x"] and told["stdin"] == "from stdin"


def test_exit_code_and_traceback_are_the_programs_own(tmp_path, launch_run):
    write(tmp_path, "fails.py", "def fail():\n    raise LookupError('of its own')\n\nfail()\n")
    by_itself = launch(sys.executable, "fails.py", cwd=tmp_path)
    run = launch_run("fails.py")
    assert run.returncode == by_itself.returncode == 1
    assert run.stderr == by_itself.stderr and "LookupError: of its own" in run.stderr
    write(tmp_path, "exits.py", "raise SystemExit(7)")
    assert launch_run("exits.py").returncode == 7


def test_a_signal_reaches_the_program_and_ends_it_as_it_would_by_itself(tmp_path):
    heed = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background ignores it
    script = write(tmp_path, "waits.py", f"{heed}\nprint('ready', flush=True)\ntime.sleep(100)\n")
    for sent in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            _command([str(script)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(RunSettings(), os.environ),
        ) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(sent)
            assert process.wait(timeout=100) == -sent


def test_settings_reach_children_of_this_environment_and_nobody_else(tmp_path, launch_run):
    ask = f"import sys; print({STARTED})"
    parent = write(
        tmp_path, "parent.py", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    )
    assert launch_run(str(parent)).stdout == "True\n"
    assert launch(sys.executable, str(parent), cwd=tmp_path).stdout == "False\n"
    settings = RunSettings(routing="balanced", tile=4, adapt_experts=8)
    environment = _environment(settings, {"PYTHONPATH": "/there"})
    assert environment["PYTHONPATH"] == os.pathsep.join([str(SITE), "/there"])
    assert _environment(settings, environment)["PYTHONPATH"] == environment["PYTHONPATH"]
    assert from_environment(environment) == settings
    other = {**json.loads(environment[VARIABLE]), "prefix": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ask],
        env={**os.environ, "PYTHONPATH": str(SITE), VARIABLE: json.dumps(other)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_the_sitecustomize_that_was_there_is_imported_first(tmp_path, launch_run):
    write(tmp_path, "theirs/sitecustomize.py", "print('theirs')\nMINE = 1\n")
    ask = f"import sitecustomize, sys; print(sitecustomize.MINE, {STARTED})"
    done = launch_run("-c", ask, env={"PYTHONPATH": str(tmp_path / "theirs")})
    assert done.stdout.splitlines()[-2:] == ["theirs", "1 True"], done.stderr


@pytest.mark.parametrize("theirs", ["import transformers.modeling_utils", "raise LookupError('of theirs')"])
def test_models_are_patched_whatever_the_other_sitecustomize_does(theirs, tmp_path, launch_run):
    """Where it raises an error, Python prints that and goes on."""
    write(tmp_path, "theirs/sitecustomize.py", theirs)
    write(tmp_path, "theirs/transformers/__init__.py", "")
    model = "class PreTrainedModel:\n    def post_init(self): pass\n"
    model += "    @classmethod\n    def from_pretrained(cls): pass\n"
    write(tmp_path, "theirs/transformers/modeling_utils.py", model)
    ask = "from transformers.modeling_utils import PreTrainedModel as model\n"
    ask += "print([hasattr(method, '__wrapped__') for method in (model.post_init, model.from_pretrained)])"
    path = {"PYTHONPATH": str(tmp_path / "theirs")}
    done = launch_run("-c", ask, env=path)
    assert done.stdout == "[True, True]\n", done.stderr
    assert done.stderr == launch(sys.executable, "-c", "", cwd=tmp_path, env=path).stderr


def test_children_import_the_package_that_the_command_is_of_and_not_before_a_model_is_built(tmp_path):
    """Also a checkout that is not installed, or where another one is."""
    environment = _environment(RunSettings(), {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    ask = "import sys; print(sys.modules['sonicmoe_hf_startup'].ROOT, 'sonicmoe_hf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == f"{SITE.parents[2]} False", done.stderr


def test_a_process_whose_models_cannot_be_patched_ends(tmp_path):
    environment = {**_environment(RunSettings(), os.environ), VARIABLE: "{"}
    done = subprocess.run(
        [sys.executable, "-c", "print(1)"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0 and done.stdout == ""
    assert "JSONDecodeError" in done.stderr and "models cannot be patched in this process" in done.stderr
    with pytest.raises(ValueError, match="--save is 'everything'"):
        RunSettings(save="everything")


def test_a_console_script_of_this_environment_runs_in_this_python(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    script = write(tmp_path, "tool", f"#!{sys.executable}\nprint(1)\n")
    script.chmod(0o755)
    assert _command(["tool", "-x"]) == [*_command(["-x"])[:-1], str(script), "-x"]
    long = write(tmp_path, "long", f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n")
    long.chmod(0o755)
    assert _command(["long"])[-1] == str(long)
    shell = write(tmp_path, "train.sh", "#!/bin/bash\ntrl sft\n")
    shell.chmod(0o755)
    assert _command([str(shell), "4"]) == [str(shell), "4"]


def test_what_cannot_be_run_is_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    other = write(tmp_path, "other", "#!/opt/other/bin/python3.11\n")
    other.chmod(0o755)
    with pytest.raises(ProgramError, match=r"another Python environment .*install sonicmoe-hf there"):
        _command([str(other)])
    assert main(["run", "--", "no-such-command"]) == 2
    assert "no command 'no-such-command'" in capsys.readouterr().err
    assert main(["run"]) == 2
    assert "no program to run" in capsys.readouterr().err
    assert main(["run", "--tile", "8", "--", "x"]) == 2
    assert "--tile is of token rounding" in capsys.readouterr().err
    for words in (["run", "--routing", "sideways", "--", "x"], ["run", "--rooting", "--", "x"]):
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert exit.value.code == 2
    monkeypatch.setattr(program.sys, "flags", SimpleNamespace(isolated=0, ignore_environment=1, no_site=0))
    assert main(["run", "--", "x.py"]) == 2
    assert "under Python's option -E models cannot be patched; leave -E out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "switch"),
    [
        ("-I x.py", "I"),
        ("-uE -m p", "E"),
        ("-X dev -S x.py", "S"),
        ("python -BI x.py", "I"),
        ("-X I x.py", None),
        ("-c -I", None),
        ("-um p -I", None),
        ("python x.py -I", None),
        ("x.py -E", None),
    ],
)
def test_options_of_the_programs_python_that_keep_models_from_being_patched_are_refused(words, switch):
    if switch is None:
        assert _command(words.split())[-1] == words.split()[-1]
    else:
        with pytest.raises(ProgramError, match=f"under Python's option -{switch} .*leave -{switch} out"):
            _command(words.split())


def test_a_python_of_another_environment_is_refused_also_where_env_finds_it(tmp_path, monkeypatch):
    other = write(tmp_path, "bin/python3", "\x7fELF")
    script = write(tmp_path, "script", "#!/usr/bin/env python3\n")
    for path in (other, script):
        path.chmod(0o755)
    with pytest.raises(ProgramError, match=r"bin/python3 runs in another Python environment"):
        _command([str(other), "x.py"])
    monkeypatch.setenv("PATH", str(other.parent))
    with pytest.raises(ProgramError, match=r"script runs in another Python environment .*bin/python3"):
        _command([str(script)])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert _command([str(script)]) == [*_command(["-x"])[:-1], str(script)]
    other.write_text("#!/bin/sh\n")  # as pyenv's, which looks for the environment's
    monkeypatch.setenv("PATH", str(other.parent))
    assert _command([str(other), "x.py"]) == [str(other), "x.py"]
    assert _command([str(script)]) == [str(script)]


def test_a_command_comes_before_a_folder_of_its_name(tmp_path, monkeypatch):
    """As in a clone of the tool."""
    scripts = tmp_path / "bin"
    write(scripts, "tool", f"#!{sys.executable}\n").chmod(0o755)
    write(tmp_path, "tool/__main__.py", "")
    monkeypatch.chdir(tmp_path)
    assert _command(["tool"])[-1] == "tool"
    monkeypatch.setenv("PATH", str(scripts))
    assert _command(["tool"])[-1] == str(scripts / "tool")


def test_switches_beside_m_reach_the_program(monkeypatch):
    monkeypatch.setattr(program.sys, "argv", ["sonicmoe_hf/__main__.py", "run", "x.py"])
    for own, expected in ((["-um"], ["-u"]), (["-X", "dev", "-m"], ["-X", "dev"]), (["-umsonicmoe_hf"], [])):
        words = own if "sonicmoe_hf" in own[-1] else [*own, "sonicmoe_hf"]
        monkeypatch.setattr(program.sys, "orig_argv", ["python", *words, "run", "x.py"])
        assert _command(["x.py"]) == [sys.executable, *expected, "x.py"]


def test_the_program_inherits_no_signal_that_python_ignores(monkeypatch):
    """A shell script whose reader has gone would see errors of writing in place of its end."""
    names, handlers = program.IGNORED_BY_PYTHON, []
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    assert signal.SIG_IGN in before.values()
    monkeypatch.setattr(
        "os.execve", lambda *args: handlers.extend(signal.getsignal(getattr(signal, name)) for name in names)
    )
    program.become(["x.py"], RunSettings())
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
    assert handlers == [signal.SIG_DFL] * len(names)


@pytest.mark.parametrize(
    ("words", "own", "rest"),
    [
        ("run -- x --json -- y", "run", "x --json -- y"),
        ("run --routing nearest --tile=8 -- -m p --save", "run --routing nearest --tile=8", "-m p --save"),
        ("run --adapt-experts 8 -m p", "run --adapt-experts 8", "-m p"),
        ("run script.py --tile 3", "run", "script.py --tile 3"),
        ("run --help", "run --help", ""),
        ("doctor -- x", "doctor -- x", ""),
    ],
)
def test_the_program_begins_after_two_dashes_or_at_the_first_word_that_is_not_ours(words, own, rest):
    """Launchers may take the dashes out."""
    assert split_program(words.split()) == (own.split(), rest.split())
