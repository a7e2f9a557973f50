"""Hooks of `make docs` into MkDocs: README.md is the first page, and files that pages link to come along.

A file outside docs/ lies under repository/ in the site. A folder or another document becomes a link to the repository.
What does not exist stays as it is, and MkDocs ends the build for it. Beside each page lies its Markdown, and llms.txt
lists all pages for programs that read them (llmstxt.org).
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # documents outside docs/: their names in the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")  # a relative one


def rewritten(text: str, folder: Path, repository: str, linked: set[str]) -> str:
    """Rewrite a page of `folder`, with its links as the site has them; adds the files outside docs/ to `linked`."""

    def link(match: re.Match) -> str:
        target, anchor = (folder / match[1]).resolve(), match[2] or ""
        if not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        if target.is_relative_to(ROOT / "docs"):
            return f"]({target.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        path = target.relative_to(ROOT).as_posix()
        if path in PAGES:
            return f"]({PAGES[path]}{anchor})"
        if target.is_dir() or target.suffix == ".md" or path.startswith("."):
            return f"]({repository}/{'tree' if target.is_dir() else 'blob'}/main/{path}{anchor})"
        linked.add(path)
        return f"](repository/{path}{anchor})"

    return LINK.sub(link, text)


def on_files(files, config):
    """Add the pages from outside docs/, and the files that pages link to."""
    linked: set[str] = set()
    for name, page in PAGES.items():
        text = rewritten((ROOT / name).read_text(encoding="utf-8"), ROOT, config.repo_url.rstrip("/"), linked)
        files.append(File.generated(config, page, content=text))
    for path in (ROOT / "docs").glob("*.md"):
        rewritten(path.read_text(encoding="utf-8"), path.parent, "", linked)
    for path in sorted(linked):
        files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite the links of a page of docs/, and keep what a page says for `on_post_build`."""
    if page.file.src_uri not in PAGES.values():
        markdown = rewritten(markdown, ROOT / "docs", config.repo_url.rstrip("/"), set())
    page.meta["markdown"] = markdown
    return markdown


def on_nav(nav, config, files):
    """Keep the pages, in the menu's order."""
    config.extra["pages"] = nav.pages
    return nav


def on_post_build(config):
    """Write the Markdown of each page, and llms.txt."""
    site, lines = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for page in config.extra["pages"]:
        (site / page.file.src_uri).write_text(page.meta["markdown"], encoding="utf-8")
        lines.append(f"- [{page.title}]({page.file.src_uri})")
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
