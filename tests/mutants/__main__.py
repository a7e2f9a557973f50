"""Checks that the tests see small wrong changes: `make mutants`, or of some modules `make mutants ARGS="routing triton"`.

Applies each mutation to a copy of the repository and runs its tests until one fails. Exit code 1 if a mutation
survives, or tests fail without one.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from . import REPOSITORY, by_module, mutated

LIMIT = 600  # seconds for a mutation's tests; one that hangs is seen too
PASSED, FAILED = 0, 1  # pytest's exit codes; others say that it could not run the tests, but for those of crashes
CRASHES = {-signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL, -signal.SIGSEGV}


def exit_code(folder, tests):
    """Get pytest's exit code for these tests of the copy; FAILED also for tests that hang, or that end the process."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    # no bytecode: a change within a second and of the same length would not be noticed
    variables = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        code = subprocess.run(command, cwd=folder, env=variables, capture_output=True, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        return FAILED
    return FAILED if code in CRASHES else code


def main(names):
    mutations = [mutation for of_module in by_module(*names).values() for mutation in of_module]
    survivors, broken = [], []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "repository")
        shutil.copytree(REPOSITORY, folder, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        unchanged = functools.cache(functools.partial(exit_code, folder))
        for mutation in mutations:
            file = folder / mutation.path
            source = file.read_text()
            changed = mutated(mutation, source)
            passes = unchanged(mutation.tests) == PASSED
            file.write_text(changed)
            code = exit_code(folder, mutation.tests) if passes else None
            file.write_text(source)
            verdict = {PASSED: "survived", FAILED: "killed", None: "fails without it"}.get(
                code, f"pytest exited with {code}"
            )
            print(f"{verdict:9} {mutation.path}: {mutation.why}", flush=True)
            (survivors if code == PASSED else broken if code != FAILED else []).append(mutation)
    print(f"{len(mutations)} mutations: {len(survivors)} survived, {len(broken)} could not be tried")
    return 1 if survivors or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
