"""Pages that open offline: the templates' environment and `house.css`, the look that they share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(templates: Path, *, escaped: bool = True) -> Environment:
    """Templates of a folder, which may include `house.css`; every text is escaped, but in code."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader([templates, Path(__file__).parent]),
        autoescape=escaped,  # noqa: S701  code is no HTML
        keep_trailing_newline=not escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
