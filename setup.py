"""Setup beside pyproject.toml, which cannot say how an editable install finds the folders beside sonicmoe_hf/."""

from contextlib import suppress
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

LINKS = ("sonicmoe_hf/examples", "sonicmoe_hf/kernels", "sonicmoe_hf/model_patches")


class EditableWheel(editable_wheel):
    """An editable install is the checkout's path, which IDEs and type checkers read too. So it needs the links."""

    def finalize_options(self):
        self.distribution.package_dir = {"": "."}
        super().finalize_options()

    def run(self):
        if missing := [link for link in LINKS if not (Path(__file__).parent / link).is_dir()]:
            raise SystemExit(
                f"an editable install needs {', '.join(missing)} as links to folders, which a zip archive or a clone "
                "with core.symlinks=false does not have: git clone -c core.symlinks=true has them; or install without -e"
            )
        super().run()


with open(__file__) as script:
    with suppress(ImportError):  # on Windows
        import fcntl

        fcntl.flock(script, fcntl.LOCK_EX)  # installs of several environments write to the same folder
    setup(cmdclass={"editable_wheel": EditableWheel})
