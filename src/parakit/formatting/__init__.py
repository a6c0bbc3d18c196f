"""How numbers, tables, charts and HTML pages are written, and what a terminal shows.

This package decides units, digits, column widths and the look of all pages. It knows nothing of training. Its
modules are public.
"""

__all__ = [
    "html",
    "svg",
    "table",
    "terminal",
    "units",
]
