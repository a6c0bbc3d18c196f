"""Format numbers, tables, charts and HTML pages, and print to a terminal.

This package decides units, digits, column widths and the look of all pages. It contains nothing about training.
Its modules are public.
"""

__all__ = [
    "caller",
    "console",
    "html",
    "svg",
    "table",
    "terminal",
    "units",
]
