"""A sentence that an entry ends with, as the log's reader finds it (`tools.report.read.failures`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def named_refusals(entry: str) -> Iterator[None]:
    """Name the entry's file before a sentence that ends it, as argparse does."""
    try:
        yield
    except SystemExit as refusal:
        if isinstance(refusal.code, str):
            refusal.code = f"{Path(entry).name}: error: {refusal.code}"
        raise
