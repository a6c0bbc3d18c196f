"""The tables of compare-zero, compare-backends and compare-moe for fixed run folders."""

from pathlib import Path

import pytest

from tests.golden.commands_of_the_kit import HERE, check_golden
from tests.golden.comparisons import render_backends, render_moe, render_zero

RUNS = HERE / "runs"
ZERO = ("010831Z-dp2", "011032Z-pp2", "010642Z-zero1", "010731Z-zero3", "011710Z-tp2")
BACKENDS = ("010831Z-dp2", "011659Z-dp2", "010731Z-zero3")


def folders(starts: tuple[str, ...]) -> list[Path]:
    return [next(RUNS.glob(f"20261122T{start}-*")) for start in starts]


@pytest.mark.parametrize("comparison", ["zero", "backends", "moe"])
def test_comparison_equals_its_golden_file(comparison: str) -> None:
    if comparison == "zero":
        text = render_zero(folders(ZERO))
    elif comparison == "backends":
        text = render_backends(folders(BACKENDS))
    else:
        text = render_moe(sorted((HERE / "runs-moe").glob("2*")))
    check_golden(HERE / "reports" / f"compare-{comparison}.md", text)
