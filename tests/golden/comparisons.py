"""The tables of `make compare-…` for run folders that are there: nothing is trained.

The only file of these tests that names inner modules, because the public command trains what it does not
find, and finds only what this machine made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.launch.experiment.measured import Measured, measure
from tools.launch.experiment.tables import backends, moe, zero


def render_zero(folders: Sequence[Path]) -> str:
    return zero.render("gpt2-tiny", _measured(folders))


def render_backends(folders: Sequence[Path]) -> str:
    return backends.render("gpt2-tiny", _measured(folders), ("DeepSpeed is left out.",))


def render_moe(folders: Sequence[Path]) -> str:
    return moe.render("moe-tiny", _measured(folders), ["a note"])


def _measured(folders: Sequence[Path]) -> list[Measured]:
    found = measure([[folder] for folder in folders])
    return [one for one in found if one is not None]
