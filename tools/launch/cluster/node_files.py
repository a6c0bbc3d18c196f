"""What the other nodes write into the run folder, brought together by node 0.

Megatron's last rank prints the iterations, and it lives on the last node: each node's ranks write
`nodes/<n>/log.txt`, and node 0 adds what is new there to its own `log.txt` as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.records.run import LOG_FILE, SAMPLES_FILE

FOLDER = "nodes"


def node_folder(run_folder: Path, node: int) -> Path:
    """Where a node other than 0 writes."""
    return run_folder / FOLDER / str(node)


class NodeFiles:
    """The other nodes' logs and samples, on their way into node 0's."""

    def __init__(self, folder: Path, nodes: Sequence[int]) -> None:
        self._folder = folder
        # Made before the others start, so what is there is from an attempt before this one.
        self._read = {place: _size(place / LOG_FILE) for place in map(self._of, nodes)}

    def bring(self) -> None:
        """Add the whole lines that came since the last call."""
        for folder in self._read:
            self._add(folder, whole_lines=True)

    def complete(self) -> None:
        """Add the rest, and the samples, once all nodes have ended."""
        for folder in self._read:
            self._add(folder, whole_lines=False)
            samples = _lines_of(folder / SAMPLES_FILE)[1:]
            with (self._folder / SAMPLES_FILE).open("ab") as file:
                file.writelines(samples)

    def _of(self, node: int) -> Path:
        return node_folder(self._folder, node)

    def _add(self, folder: Path, whole_lines: bool) -> None:
        try:
            # Opened anew each time: a network file system shows what others wrote when it is opened.
            with (folder / LOG_FILE).open("rb") as file:
                file.seek(self._read[folder])
                text = file.read()
        except OSError:
            return
        if whole_lines:
            text = text[: text.rfind(b"\n") + 1]
        if text:
            self._read[folder] += len(text)
            with (self._folder / LOG_FILE).open("ab") as log:
                log.write(text if text.endswith(b"\n") else text + b"\n")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
