"""The tables of `make compare-…` for run folders that are there: nothing is trained.

The only file of these tests that names inner modules, because the public command trains first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def render_zero(folders: Sequence[Path]) -> str:
    from tools.launch.compare import measured, zero

    return zero.render("gpt2-tiny", measured.measure(folders))


def render_backends(folders: Sequence[Path]) -> str:
    from tools.launch.compare import backends, measured

    return backends.render("gpt2-tiny", measured.measure(folders), ("DeepSpeed is left out.",))


def render_moe(folders: Sequence[Path]) -> str:
    from tools.launch.compare import moe_measured, moe_table

    runs = [moe_measured.measure_run(folder) for folder in folders]
    return moe_table.render("moe-tiny", runs, ["a note"])
