"""Tables of `make compare-…` for existing run folders. Nothing is trained.

This is the only file of these tests that imports inner modules, because the public command trains missing runs and
accepts only runs of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parakit.experiments.tables import backends, moe, zero
from parakit.reporting.analyse.entry import Entry, build_entries_from_folders


def render_zero(folders: Sequence[Path]) -> str:
    return zero.render("gpt2-tiny", _rows(folders))


def render_backends(folders: Sequence[Path]) -> str:
    return backends.render("gpt2-tiny", _rows(folders), ("DeepSpeed is left out.",))


def render_moe(folders: Sequence[Path]) -> str:
    return moe.render("moe-tiny", _rows(folders), ["a note"])


def _rows(folders: Sequence[Path]) -> list[Entry]:
    return [
        row
        for row in build_entries_from_folders([[folder] for folder in folders])
        if row is not None
    ]
