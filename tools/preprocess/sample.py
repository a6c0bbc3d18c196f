"""The sample data set: prose that every Python carries, so that no download is needed."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import msgspec


def sample_documents() -> list[str]:
    """One document a topic of Python's own help, in alphabetical order."""
    return [topics[name] for name in sorted(topics)]


def write_sample(path: Path) -> None:
    """Write the sample as JSON lines; a file that holds just that already is left untouched."""
    content = b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in sample_documents())
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)
