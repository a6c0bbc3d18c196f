"""What the matrix came to, kept beside the pages: `parity/<version>.jsonl` and two files a kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tools.records.io import write_record, write_whole
from tools.study.matrix.curves import Curve
from tools.study.matrix.fuzz import Drawn
from tools.study.matrix.outcome import CellRecord, CellStatus
from tools.study.matrix.table import BF16

STORED = "parity"


def store(folder: Path, name: str, records: Iterable[CellRecord]) -> None:
    """Keep the cells of a version, in place of those with the same id; not those of smaller models."""
    path = _file(folder, f"{name}.jsonl")
    whole = (one for one in records if not one.more)
    kept = {one.id: one for one in read_stored(path)} | {one.id: one for one in whole}
    lines = (msgspec.json.encode(_as_stored(kept[key])) + b"\n" for key in sorted(kept))
    write_whole(path, b"".join(lines))


def _as_stored(record: CellRecord) -> dict[str, object]:
    """What is not as it is by default; numbers with as many digits as are read."""
    blank, bf16 = CellRecord("", "", "", (), "", CellStatus.HELD), BF16 in record.levels
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    needed = ("id", "family", "layout", "levels", "command", "status")
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in fields.items()
        if name in needed or (value != getattr(blank, name) and (name != "stages" or bf16))
    }


def read_stored(path: Path) -> list[CellRecord]:
    """Cells of a file; none where it is not there."""
    if not path.is_file():
        return []
    decoder = msgspec.json.Decoder(CellRecord)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def store_curves(folder: Path, name: str, curves: Sequence[Curve]) -> None:
    """Keep the losses' differences of a version."""
    write_record(_file(folder, f"{name}.bf16.json"), curves)


def read_curves(cells: Path) -> tuple[Curve, ...]:
    """Those beside a file of cells."""
    path = cells.with_name(f"{cells.stem}.bf16.json")
    return msgspec.json.decode(path.read_bytes(), type=tuple[Curve, ...]) if path.is_file() else ()


def store_drawn(folder: Path, name: str, drawn: Drawn) -> None:
    """Keep what a seed's draws came to, in place of what they did before."""
    write_record(_file(folder, f"{name}.fuzz-{drawn.seed}.json"), drawn)


def read_drawn(cells: Path) -> tuple[Drawn, ...]:
    """Those beside a file of cells."""
    found = sorted(cells.parent.glob(f"{cells.stem}.fuzz-*.json"))
    return tuple(msgspec.json.decode(path.read_bytes(), type=Drawn) for path in found)


def _file(folder: Path, name: str) -> Path:
    stored = folder / STORED
    stored.mkdir(parents=True, exist_ok=True)
    return stored / name
