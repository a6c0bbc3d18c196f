"""The published data set: from the hub to JSON lines, from those to Megatron's `.bin/.idx`.

`python -m tools.launch.openwebtext [FOLDER]`, a module so that it also runs in a container. Every step
leaves its result under another name until it is whole, so repeating is safe and goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.preprocess.dataset import open_dataset
from tools.preprocess.errors import DatasetError
from tools.spec.files import ROOT

HUB_NAME = "vuiseng9/openwebtext-10k"
SPLIT = "train"
NAME = "openwebtext-10k"
FOLDER = ROOT / "owt-ds"
CACHE = ".hub"
"""Beside the data set, not in the home folder: a container's home does not outlive it."""

BATCH_ROWS = 1000
WAYS_OUT = (
    "run the same command again (files that arrived whole are kept), name a mirror with HF_ENDPOINT=, "
    f"or use other text: 'make prepare-ds-sample', or 'make prepare-ds INPUT=file.jsonl NAME={NAME}'"
)


class HubError(Exception):
    """One sentence on what the hub did not give, and the way out."""


def prepare(folder: Path) -> int:
    """Make the data set unless it is there and whole; the exit status.

    Raises:
        HubError: It could not be fetched.
    """
    try:
        dataset = open_dataset(folder / f"{NAME}_text_document")
    except DatasetError:
        lines = folder / f"{NAME}.jsonl"
        if not lines.is_file():
            fetch(lines)
        return _preprocess(lines, folder / NAME)
    print(
        f"{dataset.prefix}: {dataset.documents:,} documents, {dataset.tokens:,} tokens, made before"
    )
    return 0


def fetch(lines: Path) -> None:
    """Write the split as JSON lines, whole or not at all.

    Raises:
        HubError: The hub cannot be reached, dropped the connection, or has no such data set.
    """
    cache = lines.with_name(CACHE)
    # The client reads these when it is imported. What it has downloaded it keeps there, also half files.
    os.environ.setdefault("HF_HUB_CACHE", str(cache / "files"))
    os.environ.setdefault("HF_DATASETS_CACHE", str(cache / "tables"))
    # The plain download resumes within a file; the chunked one needs services that mirrors lack.
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
    partial = lines.with_name(lines.name + ".partial")
    try:
        table = _load()
        _write(table, partial)
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(lines.parent)):
            raise _unreachable(error) from None
        raise HubError(
            f"{error.filename} cannot be written ({error.strerror}); free some room in {lines.parent}."
        ) from None
    partial.rename(lines)
    shutil.rmtree(cache, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """Prepare; 0 if the data set is there, 130 if interrupted."""
    folder = Path(arguments[0]) if arguments else FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return prepare(folder)
    except HubError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; run the same command again to go on.", file=sys.stderr)
        return 130


def _load() -> Any:
    import datasets  # seconds, which a repeated call need not pay

    try:
        return datasets.load_dataset(HUB_NAME, split=SPLIT)
    except OSError:
        raise
    except Exception as error:  # the client has no common base for what a hub can do to it
        raise _unreachable(error) from None


def _write(table: Any, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for batch in table.iter(BATCH_ROWS):
            file.writelines(
                json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in batch["text"]
            )


def _unreachable(error: Exception) -> HubError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    hub = os.environ.get("HF_ENDPOINT", "the Hugging Face hub")
    return HubError(
        f"Data set {HUB_NAME} was not fetched from {hub} ({type(error).__name__}: {reason}); {WAYS_OUT}."
    )


def _preprocess(lines: Path, prefix: Path) -> int:
    files = ("--input", str(lines), "--output-prefix", str(prefix))
    command = (
        sys.executable,
        "-m",
        "tools.preprocess",
        *files,
        "--tokenizer",
        "gpt2",
        "--append-eod",
    )
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
