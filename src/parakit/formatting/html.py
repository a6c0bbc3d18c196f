"""Load the Jinja templates of HTML pages, which include the common style `house.css` and open offline."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


@functools.cache
def environment(templates: Path, *, escaped: bool = True) -> Environment:
    """Return a Jinja environment that loads the templates of a folder, and `house.css`.

    An undefined variable in a template raises an error. The environment of a folder is made once per process,
    because it keeps the compiled templates.

    Args:
        templates: Folder of the templates.
        escaped: True escapes all inserted texts for HTML. False is for templates that make code: nothing is
            escaped, and the newline at the end of a template is kept.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader([templates, Path(__file__).parent]),
        autoescape=escaped,  # noqa: S701  Code is not HTML.
        keep_trailing_newline=not escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
