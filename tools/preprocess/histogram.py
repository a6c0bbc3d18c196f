"""Document lengths as a picture: in the terminal and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.preprocess.errors import OutputError

_BAR_CHARACTERS = 40


def label(bin_: int) -> str:
    """Lengths of a bin, such as `512–1023`."""
    if bin_ == 0:
        return "0"
    low, high = 2 ** (bin_ - 1), 2**bin_ - 1
    return str(low) if low == high else f"{low:,}–{high:,}"


def text_histogram(counts: Sequence[int]) -> list[str]:
    """One line a bin, from the first to the last that is not empty."""
    used = _used(counts)
    most = max((counts[i] for i in used), default=1)
    width = max((len(label(i)) for i in used), default=0)
    return [
        f"{label(i):>{width}} {'█' * -(-counts[i] * _BAR_CHARACTERS // most):{_BAR_CHARACTERS}} "
        f"{counts[i]:,}"
        for i in used
    ]


def draw_histogram(counts: Sequence[int], title: str, path: Path) -> None:
    """Draw the bins as a bar chart; the suffix (`.svg`, `.png`) says as what.

    Raises:
        OutputError: matplotlib does not know the suffix.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    used = _used(counts)
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.bar([label(i) for i in used], [counts[i] for i in used], color="#4269d0")
    axes.set(xlabel="tokens in a document", ylabel="documents", title=title)
    axes.tick_params(axis="x", rotation=45)
    axes.spines[["top", "right"]].set_visible(False)
    # Without a date and with fixed ids the same data set gives the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with mpl.rc_context({"svg.hashsalt": "tools.preprocess"}):
            figure.savefig(path, metadata=metadata)
    except ValueError:
        raise OutputError(f"--plot {path} has an unknown suffix; use .svg or .png.") from None
    finally:
        plt.close(figure)


def _used(counts: Sequence[int]) -> list[int]:
    filled = [i for i, count in enumerate(counts) if count]
    return list(range(filled[0], filled[-1] + 1)) if filled else []
