"""Straightforward use of Hugging Face `tokenizers`, the constant baseline of the benchmark.

`python -m tests.bench.tokenizers_baseline IN.jsonl OUT.bin`
"""

from __future__ import annotations

import json
import sys
from itertools import batched
from pathlib import Path

import numpy as np
import tokenizers

from tools.preprocess.tokenizer import load_tokenizer

_BATCH = 1000


def main(source: Path, target: Path) -> None:
    """Read JSON lines, encode in batches on all cores, write uint16 ids."""
    spec = load_tokenizer("gpt2")
    tokenizer = tokenizers.Tokenizer.from_str(spec.definition)
    eod = spec.require_eod()
    with source.open(encoding="utf-8") as lines, target.open("wb") as stream:
        for batch in batched(lines, _BATCH):
            for encoding in tokenizer.encode_batch([json.loads(line)["text"] for line in batch]):
                stream.write(np.array([*encoding.ids, eod], np.uint16).tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
