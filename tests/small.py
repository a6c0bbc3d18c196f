"""A small vocabulary for training in tests, because GPT-2's would take most of the time."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from parakit.data.indexed import DocumentIndex, bin_path, idx_path, manifest_path, write_index
from parakit.launch.data import write_small_vocabulary_dataset

VOCABULARY = 1100
"""Vocabulary above the folded data's tokens. As for GPT-2's, TP 2 pads it further than a single rank does."""
PADDED = 1152
"""Vocabulary padded by a single rank to a multiple of 128."""
SMALL = ("--vocab-size", str(VOCABULARY))


def folded(prefix: Path, folder: Path) -> Path:
    """Write a data set in a small vocabulary, with a manifest that states the vocabulary."""
    small = folder / prefix.name
    write_small_vocabulary_dataset(prefix, small)
    manifest = json.loads(manifest_path(prefix).read_text())
    manifest["identity"]["vocabulary"] = VOCABULARY
    manifest["bin_sha256"] = hashlib.sha256(bin_path(small).read_bytes()).hexdigest()
    manifest_path(small).write_text(json.dumps(manifest))
    return small


def write_documents(prefix: Path, lengths: Sequence[int], first_token: int = 0) -> str:
    """Write a data set without a manifest and return its path. Its documents have so many, increasing tokens."""
    tokens = (first_token + np.arange(sum(lengths))) % VOCABULARY
    bin_path(prefix).write_bytes(tokens.astype(np.uint16).tobytes())
    index = DocumentIndex(np.array(lengths, np.int32), np.arange(len(lengths) + 1))
    write_index(idx_path(prefix), "uint16", lambda: [index])
    return str(prefix)
