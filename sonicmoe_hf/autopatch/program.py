"""The program that `sonicmoe-hf run` becomes: how it is started, and with what environment.

The process is replaced by the program's (execve). So arguments, exit code, signals, standard input and tracebacks are
the program's own; sitecustomize.py beside this module patches the models there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from .settings import VARIABLE, RunSettings

SITE = Path(__file__).parent / "site"
PYTHON_FILES = (".py", ".pyw", ".pyc", ".pyz")
PYTHON = re.compile(r"python[\d.]*")
INTERPRETER = re.compile(rb"(?:#!\s*|'''exec' )\"?(?:\S+/env\s+(?:-S\s+)?)?([^\s\"]*python[\d.]*)\"?(?=\s)")
OPTIONS = re.compile(r"-([^cmWX]*)([cmWX]?)(.*)", re.DOTALL)  # a word of Python's: switches, an option, its value
AGAINST_PATCHING = {"I": "isolated", "E": "ignore_environment", "S": "no_site"}  # switches, and names of sys.flags
IGNORED_BY_PYTHON = ("SIGPIPE", "SIGXFSZ")  # what it becomes would inherit that


class ProgramError(Exception):
    """The program cannot be started, or not so that its models are patched; the message says why and what to do."""


def _own_flags() -> list[str]:
    """The flags that this Python was started with, such as -u."""
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    if flags and (last := OPTIONS.fullmatch(flags[-1])) and last[2] in ("m", "c") and not last[3]:
        return [*flags[:-1], *([f"-{last[1]}"] if last[1] else [])]  # -um is -u and -m
    return flags


def _own_switches() -> str:
    """Those of AGAINST_PATCHING that this Python was started with."""
    return "".join(switch for switch, name in AGAINST_PATCHING.items() if getattr(sys.flags, name))


def _switches(words: list[str]) -> str:
    """Python's switches in what follows `python` on a command line: "uB" of -u -X dev -Bm package."""
    switches, rest = "", iter(words)
    for word in rest:
        options = OPTIONS.fullmatch(word)
        if options is None:
            break
        switches += options[1]
        if options[2] in ("c", "m"):
            break
        if options[2] and not options[3]:
            next(rest, None)
    return switches


def _check_switches(switches: str) -> None:
    """Raise for those that keep Python from reading PYTHONPATH or importing sitecustomize."""
    for switch in AGAINST_PATCHING:
        if switch in switches:
            raise ProgramError(f"under Python's option -{switch} models cannot be patched; leave -{switch} out")


def _is_python(file: str) -> bool:
    """Whether a command is Python itself. A script of that name, such as pyenv's, looks for one when it runs."""
    if PYTHON.fullmatch(Path(file).name) is None:
        return False
    with open(file, "rb") as start:
        return start.read(2) != b"#!"


def _interpreter(script: str) -> str | None:
    """The Python that a script names in its first lines; None for any other program."""
    with open(script, "rb") as file:
        match = INTERPRETER.search(file.read(1024))
    if match is None:
        return None
    named = match[1].decode(errors="surrogateescape")
    if os.sep in named:
        return named
    found = shutil.which(named)  # as /usr/bin/env does
    return found if found is not None and _is_python(found) else None


def _check_environment(script: str, interpreter: str) -> None:
    """Raise where a script belongs to another environment, whose Python leaves models alone."""
    if Path(interpreter).parent.resolve() != Path(sys.executable).parent.resolve():
        raise ProgramError(
            f"{script} runs in another Python environment ({interpreter}) than sonicmoe-hf ({sys.executable}); install "
            "sonicmoe-hf there, and run that one"
        )


def _command(program: list[str]) -> list[str]:
    """The command line of the program: what it begins with is an option of Python (-m, -c), a command, or a Python file
    or folder.

    Raises:
        ProgramError: see `become`.
    """
    python = [sys.executable, *_own_flags()]
    name = program[0]
    if name.startswith("-"):
        _check_switches(_switches(program))
        return [*python, *program]
    path = Path(name)
    if path.suffix in PYTHON_FILES:
        return [*python, *program]
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=places)
    if found is None and (path.is_file() or (path / "__main__.py").is_file()):
        return [*python, *program]
    if found is None:
        raise ProgramError(
            f"there is no command {name!r} in this environment or on PATH, and no file of that name; a module is run by "
            f"sonicmoe-hf run -- -m {name}"
        )
    if _is_python(found):
        _check_environment(name, found)
        _check_switches(_switches(program[1:]))
        return [found, *program[1:]]
    interpreter = _interpreter(found)
    if interpreter is None:
        return [found, *program[1:]]
    _check_environment(found, interpreter)
    return [*python, found, *program[1:]]


def _environment(settings: RunSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """The program's environment: sitecustomize.py's folder first on PYTHONPATH, and the settings."""
    folders = [folder for folder in inherited.get("PYTHONPATH", "").split(os.pathsep) if folder != str(SITE)]
    path = os.pathsep.join([str(SITE), *folders]) if any(folders) else str(SITE)
    return {**inherited, "PYTHONPATH": path, VARIABLE: settings.as_variable()}


def become(program: list[str], settings: RunSettings) -> NoReturn:
    """Become the program. Its models, and those of its children, are patched as `settings` say.

    Raises:
        ProgramError: there is no such program, it belongs to another environment, or an option of Python forbids it.
    """
    _check_switches(_own_switches())
    command, environment = _command(program), _environment(settings, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform == "win32":  # which has no execve that keeps the process
        raise SystemExit(subprocess.run(command, env=environment).returncode)
    for name in IGNORED_BY_PYTHON:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execve(command[0], command, environment)
