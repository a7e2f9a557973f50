"""Setup beside pyproject.toml, which cannot say how an editable install finds the folders beside sonicmoe_hf/, nor which
links README.md has on a package index."""

import re
from contextlib import suppress
from pathlib import Path

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent
LINKS = ("sonicmoe_hf/examples", "sonicmoe_hf/kernels", "sonicmoe_hf/model_patches")


class EditableWheel(editable_wheel):
    """An editable install is the checkout's path, which IDEs and type checkers read too. So it needs the links."""

    def finalize_options(self):
        self.distribution.package_dir = {"": "."}
        super().finalize_options()

    def run(self):
        if missing := [link for link in LINKS if not (ROOT / link).is_dir()]:
            raise SystemExit(
                f"an editable install needs {', '.join(missing)} as links to folders, which a zip archive or a clone "
                "with core.symlinks=false does not have: git clone -c core.symlinks=true has them; or install without -e"
            )
        super().run()


def readme():
    """Read README.md, with links to the repository, since an index has its text alone."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    repository = re.search(r'^Repository = "(.+)"', project, re.MULTILINE)[1]
    files = repository.replace("github.com", "raw.githubusercontent.com")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{files}/main/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/main/", text)


with open(__file__) as script:
    with suppress(ImportError):  # on Windows
        import fcntl

        fcntl.flock(script, fcntl.LOCK_EX)  # installs of several environments write to the same folder
    setup(
        cmdclass={"editable_wheel": EditableWheel},
        long_description=readme(),
        long_description_content_type="text/markdown",
    )
