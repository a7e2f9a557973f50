"""The program that `sonicmoe-hf run` becomes: how it is started, and with what environment.

The process is replaced by the program's (execve). So arguments, exit code, signals, standard input and tracebacks are
the program's own; sitecustomize.py beside this module patches the models there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from .settings import VARIABLE, RunSettings

SITE = Path(__file__).parent / "site"
PYTHON_FILES = (".py", ".pyw", ".pyc", ".pyz")
INTERPRETER = re.compile(rb"(?:#!\s*|'''exec' )\"?([^\s\"]*python[\d.]*)\"?(?=\s)")


class ProgramError(Exception):
    """The program cannot be started, or not so that its models are patched; the message says why and what to do."""


def _own_flags() -> list[str]:
    """The flags that this Python was started with, such as -u."""
    flags = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    return flags[:-1] if flags[-1:] in (["-m"], ["-c"]) else flags


def _check_startup() -> None:
    """Raise where this Python's flags would keep the program's from reading PYTHONPATH or importing sitecustomize."""
    for flag, name in ((sys.flags.isolated, "-I"), (sys.flags.ignore_environment, "-E"), (sys.flags.no_site, "-S")):
        if flag:
            raise ProgramError(
                f"Python was started with {name}, under which models cannot be patched; leave {name} out"
            )


def _interpreter(script: str) -> str | None:
    """The Python that a script of an environment's bin/ names in its first lines; None for any other program."""
    with open(script, "rb") as file:
        match = INTERPRETER.search(file.read(1024))
    return None if match is None else match[1].decode(errors="surrogateescape")


def _check_environment(script: str, interpreter: str) -> None:
    """Raise where a script belongs to another environment, whose Python leaves models alone."""
    theirs = Path(interpreter).parent
    if interpreter.endswith("/env") or theirs == Path():
        return
    if theirs.resolve() != Path(sys.executable).parent.resolve():
        raise ProgramError(
            f"{script} runs in another Python environment ({interpreter}) than sonicmoe-hf ({sys.executable}); install "
            "sonicmoe-hf there, and run that one"
        )


def _command(program: list[str]) -> list[str]:
    """The command line of the program: what it begins with is an option of Python (-m, -c), a Python file or folder, or
    a command."""
    python = [sys.executable, *_own_flags()]
    name = program[0]
    if name.startswith("-"):
        return [*python, *program]
    path = Path(name)
    is_script = path.is_file() and not os.access(path, os.X_OK)
    if is_script or path.suffix in PYTHON_FILES or (path / "__main__.py").is_file():
        return [*python, *program]
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=places)
    if found is None:
        raise ProgramError(
            f"there is no command {name!r} in this environment or on PATH, and no file of that name; a module is run by "
            f"sonicmoe-hf run -- -m {name}"
        )
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
        ProgramError: there is no such program, it belongs to another environment, or this Python's flags forbid it.
    """
    _check_startup()
    command, environment = _command(program), _environment(settings, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform == "win32":  # which has no execve that keeps the process
        raise SystemExit(subprocess.run(command, env=environment).returncode)
    os.execve(command[0], command, environment)
