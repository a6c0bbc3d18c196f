"""The sample data set: prose that every Python carries, so that no download is needed."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import msgspec

from tools.records.io import write_whole


def sample_documents() -> list[str]:
    """The paragraphs of Python's own help, topic by topic in alphabetical order.

    Paragraphs, because the published split gives one document in a thousand to the test set, and
    Megatron searches endlessly for the tokens of a set without documents.
    """
    paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n"))
    return [paragraph for paragraph in paragraphs if paragraph.strip()]


def write_sample(path: Path, unique: bool = False) -> None:
    """Write the sample as JSON lines, each paragraph once if `unique`: topics quote one another.

    A file that holds just that already is left untouched.
    """
    documents = sample_documents()
    chosen = dict.fromkeys(documents) if unique else documents
    content = b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in chosen)
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
