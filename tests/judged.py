"""Files with a line per judged case, so that a bench that was interrupted can go on."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def read_judged(file: Path) -> list[dict[str, str]]:
    """Return the lines of judged cases; none if the file does not exist."""
    if not file.is_file():
        return []
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def write_judged(file: Path, columns: Sequence[str], lines: Iterable[Mapping[str, str]]) -> None:
    """Write the lines of judged cases under the names of their columns."""
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
