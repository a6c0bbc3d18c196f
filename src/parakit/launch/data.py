"""Name the kit's data sets, make its sample data sets, and choose the folder of Megatron's sample indices."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from rich.console import Console

from parakit.artifacts.io import lock_file, write_atomically
from parakit.config.blend import format_blend, pair_weights, parse_blend
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.flags import Flags, drop_flags, values_by_flag
from parakit.config.model import GPT2_VOCABULARY
from parakit.config.run import DeviceKind
from parakit.data import (
    EVAL_ITERATIONS_FLAG,
    SPLIT_FLAG,
    Dataset,
    DatasetError,
    bin_path,
    idx_path,
    open_dataset,
    unusable_parts,
    usable_split_flags,
)
from parakit.launch.options import Options

SAMPLE = "owt-ds/sample_text_document"
UNIQUE_SAMPLE = "owt-ds/sample-unique_text_document"
"""The sample with every paragraph once."""

SMALL_SAMPLE = "owt-ds/sample-1k_text_document"
"""The sample in a vocabulary of 1,024, so that a verification computes mostly transformer layers."""
SMALL_VOCABULARY = 1024

PUBLISHED = "owt-ds/openwebtext-10k_text_document"
DEFAULT_DATA = {DeviceKind.CPU: SAMPLE, DeviceKind.GPU: PUBLISHED}
GPT2_DATA = (SAMPLE, PUBLISHED, UNIQUE_SAMPLE)
"""The kit's own data sets hold GPT-2 tokens: a model trained on them gets GPT-2's vocabulary."""

_SAMPLE_RECIPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    SAMPLE: ("the sample data set from this Python's own documentation", ()),
    UNIQUE_SAMPLE: ("the sample data set, each paragraph once", ("--unique",)),
}
"""Description and `tools.preprocess` flags of each sample, by prefix."""

OWN_SAMPLES = (*_SAMPLE_RECIPES, SMALL_SAMPLE)
"""Data sets that the kit makes when a run needs them."""

WAIT_SECONDS = 0.2
"""Time between two tries to lock the file of a sample that another launcher is making."""

SAMPLE_INDICES = ".data"
"""Folder beside the runs that holds Megatron's sample indices: which tokens make up which sample."""

DATA_FLAG, DATA_FILE_FLAG = "--data-path", "--data-args-path"
_FLAGS_PER_SPLIT = (
    *("--train-data-path", "--valid-data-path", "--test-data-path"),
    "--per-split-data-args-path",
)
"""Flags of Megatron that exclude `--data-path` and `--split`."""

HASH_PLACEHOLDER = "<its hash>"
_HASH_LENGTH = 12
_DESCRIPTIONS = "*/*-description.txt"
"""Megatron writes one JSON file of this name per sample index, which names the data set."""


def sample_index_folder(runs: Path, paths: Sequence[str]) -> Path:
    """Return the folder of Megatron's sample indices for data sets with their present content.

    Megatron looks up an index by the path of the data set and not by its content. Two data sets that had one name
    after each other would share an index. An index follows from the `.idx` alone, so the folder's name has the hash
    of the `.idx`. A blend has one hash of all its `.idx` files. If a data set cannot be opened, HASH_PLACEHOLDER
    stands for the hash; only a dry run prints it.
    """
    try:
        hashes = [open_dataset(ROOT / path).index_sha256 for path in paths]
    except DatasetError:
        hashes = [HASH_PLACEHOLDER]
    if len(paths) == 1:
        return runs / SAMPLE_INDICES / f"{Path(paths[0]).name}-{hashes[0][:_HASH_LENGTH]}"
    digest = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return runs / SAMPLE_INDICES / f"blend-{digest[:_HASH_LENGTH]}"


def remove_stale_sample_indices(runs: Path) -> None:
    """Remove each folder of sample indices if its data set is gone or has other content now.

    A rank that has opened an index can read it until the rank ends, because the operating system keeps open files.
    Folders of blends are not removed.
    """
    for description in (runs / SAMPLE_INDICES).glob(_DESCRIPTIONS):
        folder = description.parent
        # Another launcher may remove the file, and a rank may be about to write it.
        with suppress(OSError, ValueError, KeyError):
            path = str(json.loads(description.read_text())["dataset_path"])
            # The folder of a blend has the descriptions of several data sets, and the name of none.
            is_folder_of_data_set = folder.name.startswith(f"{Path(path).name}-")
            if not is_folder_of_data_set:
                continue
            folder_of_present_content = sample_index_folder(runs, [path])
            if folder != folder_of_present_content:
                shutil.rmtree(folder, ignore_errors=True)


def choose_data(options: Options, device: DeviceKind) -> tuple[str, tuple[str, ...]]:
    """Return the data sets of a run in the form of DATA=, and EXTRA= without the flags that name data sets.

    `--data-path` in EXTRA= replaces DATA=. The data sets in the file of `--data-args-path` do so too, so that the
    run records the content of the file.

    Raises:
        LaunchError: The file cannot be read, weights do not fit, or a flag names data sets per split.
    """
    values = values_by_flag(options.extra)
    for flag in _FLAGS_PER_SPLIT:
        if flag in values:
            raise LaunchError(
                f"EXTRA= has {flag}, and the kit trains on data sets that {SPLIT_FLAG} divides; name them with "
                "DATA='0.3 a 0.7 b'."
            )
    data_arguments = values.get(DATA_FLAG, [])
    if DATA_FILE_FLAG in values:
        data_arguments = _read_data_file(" ".join(values[DATA_FILE_FLAG]))
    extra = drop_flags(options.extra, (DATA_FLAG, DATA_FILE_FLAG))
    if not data_arguments:
        return options.data or DEFAULT_DATA[device], extra
    try:
        return format_blend(pair_weights(data_arguments)), extra
    except ValueError as error:
        raise LaunchError(f"EXTRA= names data sets, and {error}") from None


def _read_data_file(name: str) -> list[str]:
    """Return the words in the file of `--data-args-path`: weights and prefixes, in the file's order.

    Raises:
        LaunchError: The file cannot be read, or it is empty.
    """
    try:
        data_arguments = (ROOT / Path(name).expanduser()).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"{DATA_FILE_FLAG} {name} cannot be read ({error}); name a text file."
        ) from None
    if not data_arguments:
        raise LaunchError(f"{DATA_FILE_FLAG} {name} is empty; write weights and prefixes into it.")
    return data_arguments


def choose_split_flags(data: str, flags: Sequence[str], seq_length: int) -> tuple[str, ...]:
    """Return `--split`, and what must go with it, where the model's own split does not fit a data set.

    Megatron divides each data set of a blend by the same split, so the result fits all of them. The result is
    empty if the split of `flags` works, if no split works, or if a data set cannot be opened. The checks before
    a run report the last case.
    """
    model_flags = Flags(flags)
    model_split = (SPLIT_FLAG, model_flags.text(SPLIT_FLAG))
    evaluates = model_flags.integer(EVAL_ITERATIONS_FLAG, 1) > 0
    try:
        datasets = [open_dataset(ROOT / part.prefix) for part in parse_blend(data)]
        if _split_fits(model_split, datasets, seq_length, evaluates=evaluates):
            return ()
        for dataset in datasets:
            split = usable_split_flags(dataset, seq_length, evaluates)
            if split and _split_fits(split, datasets, seq_length, evaluates=evaluates):
                return split
    except DatasetError:
        pass
    return ()


def _split_fits(
    split_flags: tuple[str, ...], datasets: Sequence[Dataset], seq_length: int, *, evaluates: bool
) -> bool:
    """Return True if each part of each data set has samples with a split, as far as the run reads the part.

    Args:
        split_flags: `--split` and its value, perhaps followed by the flag that switches evaluation off.
        datasets: The data sets.
        seq_length: Tokens per sample.
        evaluates: Whether the run evaluates unless `split_flags` switch that off.
    """
    _, split, *other_flags = split_flags
    still_evaluates = evaluates and EVAL_ITERATIONS_FLAG not in other_flags
    return not any(
        unusable_parts(dataset, split, seq_length, still_evaluates) for dataset in datasets
    )


def make_sample(prefix: str, console: Console) -> bool:
    """Make a data set if it is one of the kit's samples and is missing; return True if it was missing.

    For a blend, every missing sample in it is made. If another launcher is making the same data set, this call
    waits.

    Raises:
        LaunchError: The data set could not be made.
    """
    parts = parse_blend(prefix)
    if len(parts) > 1:
        made = [make_sample(part.prefix, console) for part in parts]
        return any(made)
    if prefix not in OWN_SAMPLES or _is_complete(prefix):
        return False
    if prefix == SMALL_SAMPLE:
        make_sample(SAMPLE, console)
    output = prefix.removesuffix("_text_document")
    with _lock_exclusively(ROOT / f"{output}.lock"):
        if _is_complete(prefix):
            return True
        if prefix == SMALL_SAMPLE:
            write_small_vocabulary_dataset(ROOT / SAMPLE, ROOT / prefix)
            return True
        description, flags = _SAMPLE_RECIPES[prefix]
        console.print(f"Making {description} …", highlight=False)
        if call_module("tools.preprocess", "sample", *flags, "--output-prefix", output):
            raise LaunchError(
                f"{prefix} could not be made, for the reason above; try 'make prepare-ds-sample', or "
                "name another data set with DATA=."
            )
    return True


def write_small_vocabulary_dataset(prefix: Path, small: Path) -> None:
    """Write the data set `prefix` to `small` in a vocabulary of SMALL_VOCABULARY tokens.

    Each token becomes its remainder modulo SMALL_VOCABULARY - 1. The end of a document becomes the last token,
    which it is in Megatron's tokenizer without files too.
    """
    dataset, end_of_document = open_dataset(prefix), SMALL_VOCABULARY - 1
    tokens = np.concatenate(list(dataset.token_chunks()))
    small_tokens = np.where(
        tokens == GPT2_VOCABULARY - 1, end_of_document, tokens % end_of_document
    ).astype(dataset.dtype)
    write_atomically(bin_path(small), small_tokens.tobytes())
    write_atomically(idx_path(small), dataset.idx_path.read_bytes())


def call_module(*arguments: str) -> int:
    """Run `python -m` with the arguments from the repository root and return its exit code."""
    return subprocess.run((sys.executable, "-m", *arguments), cwd=ROOT, check=False).returncode


def _is_complete(prefix: str) -> bool:
    """Return True if the data set can be opened."""
    try:
        open_dataset(ROOT / prefix)
    except DatasetError:
        return False
    return True


@contextmanager
def _lock_exclusively(path: Path) -> Iterator[None]:
    """Hold the lock file `path` during the `with` block, and remove it afterwards.

    The block starts once no other launcher, on this or another node, holds the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        while True:
            try:
                lock_file(file)
                break
            except BlockingIOError:
                time.sleep(WAIT_SECONDS)
        yield
        path.unlink(missing_ok=True)
