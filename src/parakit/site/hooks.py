"""Hooks that mkdocs calls to build the site from the repository's Markdown files.

The files become pages at their own paths, so their links work. A link to a file that is no page, such as a script,
becomes plain text. `docs/settings.md` is generated from the table of settings.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from parakit.cli import HEADINGS, list_variables
from parakit.config.files import ROOT

SETTINGS_PAGE = "docs/settings.md"
MADE_LATER = (
    "planner/planner.html",
    "planner/drawings.html",
    "docs/parity-cells.html",
    "docs/parity-differences.html",
    "docs/residuals.html",
)
"""Pages that are empty until `planner_page.py` and `generated_pages.py` overwrite them."""
STYLE = "site.css"
SHOWN = (".md", ".svg", ".png", ".html")
HIDDEN = (
    "tests/",
    ".github/",
    "src/parakit/reporting/render/",
    "src/parakit/verify/templates/",
    "src/parakit/site/",
)

_FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)
_NESTED = re.compile(r"^ {2,3}(?=(?:[-*]|\d+\.) )", re.M)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Return the files of the site: the repository's Markdown files and pictures, and generated pages.

    The files of `docs/` that mkdocs found are dropped, because they are added with their paths in the repository.
    """
    from mkdocs.structure.files import File, Files

    site_files = []
    for file in files:
        is_in_docs = file.src_uri.startswith("docs/") or Path(ROOT, "docs", file.src_uri).exists()
        if not is_in_docs:
            site_files.append(file)
    for name in list_pages():
        site_files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    style = (ROOT / "src/parakit/site/templates" / STYLE).read_text()
    texts = {SETTINGS_PAGE: render_settings_page(), **dict.fromkeys(MADE_LATER, ""), STYLE: style}
    for name, text in texts.items():
        site_files.append(File.generated(config, name, content=text))
    return Files(site_files)


def on_page_markdown(markdown: str, page: Any, files: Any, **_: object) -> str:
    """Return a page's Markdown with its links and nested lists adapted to the site.

    A link to a folder becomes a link to the folder's README. A link to a file that is no page becomes plain text.
    """
    here = posixpath.dirname(page.file.src_uri)

    def rewrite_link(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if ":" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(here, target))
        if files.get_file_from_path(path) is not None:
            return link[0]
        if files.get_file_from_path(f"{path}/README.md") is not None:
            return f"[{text}]({target.rstrip('/')}/README.md{anchor})"
        return text if (ROOT / path).exists() else link[0]

    return indent_nested_lists(_LINK.sub(rewrite_link, markdown))


def indent_nested_lists(markdown: str) -> str:
    """Return Markdown with nested list items indented by four spaces, outside of code blocks.

    mkdocs' renderer flattens nested lists with fewer spaces.
    """
    parts = _FENCE.split(markdown)
    # Every second part is a code block, from the second part on.
    for index in range(0, len(parts), 2):
        parts[index] = _NESTED.sub("    ", parts[index])
    return "".join(parts)


def list_pages() -> list[str]:
    """Return the paths of the pages and pictures in the repository that exist and are part of the site."""
    command = ("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        name
        for name in output.splitlines()
        if name.endswith(SHOWN) and not name.startswith(HIDDEN) and (ROOT / name).is_file()
    ]


def render_settings_page() -> str:
    """Return the page of all make variables, by heading, as `make help-all` prints them."""
    lines = [
        "# Reference of settings",
        "",
        "These are the variables of make: `make TARGET NAME=value`. A target refuses a variable that it "
        "does not use.",
    ]
    for names, meaning in list_variables():
        for name in names:
            if name in HEADINGS:  # A section begins with this variable.
                title = HEADINGS[name]
                lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
                lines += ["| variable | meaning |", "|---|---|"]
        shown_names = " ".join(f"`{name}`" for name in names)
        cell = meaning.replace("<", "&lt;").replace("*", r"\*").replace("|", r"\|")
        lines.append(f"| {shown_names} | {cell} |")
    return "\n".join(lines) + "\n"
