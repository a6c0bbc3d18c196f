"""A small vocabulary for what tests train: GPT-2's would take most of the time."""

import hashlib
import json
from pathlib import Path

from tools.dataset.indexed import bin_path, manifest_path
from tools.launch.data import fold

VOCABULARY = 1100
"""Above the folded data's tokens; TP 2 pads it further than one rank does, as it does GPT-2's."""
PADDED = 1152
"""By one rank, to a multiple of 128."""
SMALL = ("--vocab-size", str(VOCABULARY))


def folded(prefix: Path, folder: Path) -> Path:
    """A data set in a small vocabulary, with a manifest that says so."""
    small = folder / prefix.name
    fold(prefix, small)
    manifest = json.loads(manifest_path(prefix).read_text())
    manifest["identity"]["vocabulary"] = VOCABULARY
    manifest["bin_sha256"] = hashlib.sha256(bin_path(small).read_bytes()).hexdigest()
    manifest_path(small).write_text(json.dumps(manifest))
    return small
