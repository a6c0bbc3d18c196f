"""What is around every entry: imports that no collection looks through, and refusals that name it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def kept_imports() -> Iterator[None]:
    """What is made within stays to the process's end: no collection looks at it, now or later.

    A fifth of the processor time of importing Megatron 0.19 was the collector's (5.0 s, 4.1 s without).
    Pages that no collection writes to stay shared with forks.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def named_refusals(entry: str) -> Iterator[None]:
    """Name the entry's file before a sentence that ends it, as argparse does and the log's reader
    (`parakit.logs.failures`) finds it."""
    try:
        yield
    except SystemExit as refusal:
        if isinstance(refusal.code, str):
            refusal.code = f"{Path(entry).name}: error: {refusal.code}"
        raise
