"""What mkdocs calls: the repository's Markdown files become pages where they stand.

So their links hold, and nothing is said twice. A link to a file that is no page (code, a script) becomes
its name. `docs/settings.md` is written from the table of settings.
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
    "docs/residuals.html",
)
"""Pages that `planner_page.py` and `generated_pages.py` write over these empty ones."""
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
    """Every Markdown file and picture of the repository, under its own path."""
    from mkdocs.structure.files import File, Files

    # What mkdocs' theme brings, none of `docs/`.
    of_theme = (file for file in files if not file.src_uri.startswith("docs/"))
    found = [file for file in of_theme if not Path(ROOT, "docs", file.src_uri).exists()]
    for name in list_pages():
        found.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    style = (ROOT / "src/parakit/site/templates" / STYLE).read_text()
    made = {SETTINGS_PAGE: render_settings_page(), **dict.fromkeys(MADE_LATER, ""), STYLE: style}
    found += [File.generated(config, name, content=text) for name, text in made.items()]
    return Files(found)


def on_page_markdown(markdown: str, page: Any, files: Any, **_: object) -> str:
    """Links to what is no page become plain text; a folder's link is its README's; lists keep levels."""
    here = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if ":" in target:
            return link[0]
        place = posixpath.normpath(posixpath.join(here, target))
        if files.get_file_from_path(place) is not None:
            return link[0]
        if files.get_file_from_path(f"{place}/README.md") is not None:
            return f"[{text}]({target.rstrip('/')}/README.md{anchor})"
        return text if (ROOT / place).exists() else link[0]

    return indent_nested_lists(_LINK.sub(shown, markdown))


def indent_nested_lists(markdown: str) -> str:
    """With items inside items indented by four spaces, without which mkdocs' renderer flattens them."""
    parts = _FENCE.split(markdown)
    return "".join(
        _NESTED.sub("    ", part) if place % 2 == 0 else part for place, part in enumerate(parts)
    )


def list_pages() -> list[str]:
    """Markdown files and pictures under version control, seen from the repository's root."""
    command = ("git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        name
        for name in listed
        if name.endswith(SHOWN) and not name.startswith(HIDDEN) and (ROOT / name).is_file()
    ]


def render_settings_page() -> str:
    """Every variable of make, by what it is for, as `make help-all` prints them."""
    lines = [
        "# Reference of settings",
        "",
        "Variables of make, as `make TARGET NAME=value`. One that the target does not use is refused.",
    ]
    for names, what in list_variables():
        for title in (HEADINGS[name] for name in names if name in HEADINGS):
            lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
            lines += ["| variable | what |", "|---|---|"]
        shown = what.replace("<", "&lt;").replace("*", r"\*").replace("|", r"\|")
        lines.append(f"| {' '.join(f'`{name}`' for name in names)} | {shown} |")
    return "\n".join(lines) + "\n"
