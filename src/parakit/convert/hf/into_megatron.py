"""`make import-hf`: write a folder of Hugging Face as a model of this kit, `hub/NAME`.

`hub/NAME` gets `NAME.args` (Megatron's flags, which load the weights), `checkpoint/` (Megatron's
distributed format, which any strategy loads), `import.json`, and copies of the source's config and
tokenizer. Everything is checked before anything is written, and an error while writing leaves no folder
behind.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from parakit.artifacts.io import atomic_directory, write_record
from parakit.artifacts.torch_dist import EMBEDDING, VOCABULARY
from parakit.config.files import (
    format_args_file,
    is_plain_name,
    read_regular_file,
    relative_to_root,
)
from parakit.config.flags import merge_flags
from parakit.config.huggingface import read_config, read_source_config
from parakit.config.model import (
    HUB,
    IMPORTED_WEIGHTS,
    ModelShape,
    model_from_flags,
    model_names,
    round_up,
)
from parakit.convert.hf.checkpoint import write_checkpoint
from parakit.convert.hf.families import (
    HEAD,
    TensorPair,
    detect_prefix,
    is_buffer,
    list_tensor_pairs,
)
from parakit.convert.hf.progress import ConversionError, ConversionProgress, check_disk_space
from parakit.convert.hf.tensor_files import TensorFolder

IMPORT_FILE = "import.json"
CONFIG_FILE = "config.json"
_COMPANIONS = (
    *("tokenizer*", "vocab.json", "merges.txt", "vocab.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template*", "*.model", "generation_config.json", "LICENSE*"),
)
"""Patterns of the files that are copied together with the weights."""

_PADDING_MULTIPLE = 128
"""Rows of the vocabulary are stored up to a multiple of this number, so that every tensor-parallel
strategy finds the padding rows that it needs."""


class ImportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `import.json`: what was imported, and from where."""

    source: str
    """The source as the user named it: a folder, or the model's name on the hub."""
    folder: str
    """Absolute path of the folder with the source's files."""
    model_type: str
    prefix: str
    """Beginning of the names of the source's tensors."""
    parameters: int
    """Number of parameters, without padding; tied embeddings count once."""
    vocabulary: int
    padding_rows: int
    """Number of rows that are stored after the vocabulary's rows: copies of the last row."""
    ignored: tuple[str, ...] = ()
    """Names of buffers in older files, which no model needs."""


@dataclass(frozen=True)
class ImportSource:
    """A folder of Hugging Face that can be imported, because it has exactly the tensors that its config needs."""

    folder: Path
    model_type: str
    flags: tuple[str, ...]
    shape: ModelShape
    tensors: TensorFolder
    prefix: str
    pairs: tuple[TensorPair, ...]
    ignored: tuple[str, ...]

    def values(self, pair: TensorPair) -> Tensor:
        """Read Hugging Face's tensors of a pair and return Megatron's tensor."""
        return pair.form.join([self.tensors.read(name) for name in pair.names])


def read_source(folder: Path) -> ImportSource:
    """Read config, tensor headers and tokenizer of a folder, and check that they fit together.

    The values of weights are not read, with one exception: an output layer that must equal the embedding.

    Raises:
        ConversionError, ConfigError: The folder cannot be converted. The message is one sentence with the
            reason.
    """
    flags = read_source_config(folder)
    model_type = read_config(folder / CONFIG_FILE)["model_type"]
    shape = model_from_flags(folder.name, "gpt3", flags).shape
    tensors = TensorFolder(folder)
    prefix = detect_prefix(model_type, tensors.tensors)
    pairs = list_tensor_pairs(model_type, shape, prefix)
    ignored = _check_names(folder, tensors, pairs, shape)
    _check_tensors(folder, tensors, pairs)
    _check_tokenizer(folder, shape.vocabulary)
    return ImportSource(folder, model_type, flags, shape, tensors, prefix, pairs, ignored)


def import_model(
    source: ImportSource,
    name: str,
    progress: ConversionProgress,
    hub: Path = HUB,
    known_as: str = "",
) -> str:
    """Write the model as the folder `name` in `hub`, and return a line with size, time and peak memory.

    The vocabulary is padded with copies of its last row.

    Args:
        source: The folder to import.
        name: The model's name in make targets.
        progress: Prints how many bytes are written.
        hub: The folder of imported models.
        known_as: The source's name in `import.json`; empty takes the path of its folder.

    Raises:
        ConversionError: The name is taken or not allowed, or the disk has no space; nothing is written.
    """
    target = hub / name
    _check_name(name, target, hub)
    vocabulary = source.shape.vocabulary
    padding_rows = round_up(vocabulary, _PADDING_MULTIPLE) - vocabulary
    total_bytes = _count_bytes(source, padding_rows)
    check_disk_space(target, total_bytes)

    def read_values() -> Iterator[tuple[TensorPair, Tensor]]:
        for pair in source.pairs:
            values = source.values(pair)
            if padding_rows and pair.key in VOCABULARY:
                # The padding rows are copies of the last row, as in Megatron's own converter: rows of 0
                # would have the largest logits in a softmax of negative logits, which GPT-2 has.
                values = torch.cat((values, values[-1:].expand(padding_rows, -1)))
            progress.done(values.nbytes)
            yield pair, values

    record = ImportRecord(
        source=known_as or str(source.folder),
        folder=str(source.folder.resolve()),
        model_type=source.model_type,
        prefix=source.prefix,
        parameters=sum(math.prod(pair.shape) for pair in source.pairs),
        vocabulary=vocabulary,
        padding_rows=padding_rows,
        ignored=source.ignored,
    )
    progress.begin(f"import {name}", total_bytes)
    with atomic_directory(target) as folder:
        write_checkpoint(folder / IMPORTED_WEIGHTS, source.shape.layers, read_values())
        (folder / f"{name}.args").write_text(_compose_args_file(source, record, target))
        write_record(folder / IMPORT_FILE, record)
        copy_companions(source.folder, folder, also=(CONFIG_FILE,))
    return progress.summary(record.parameters)


def copy_companions(source: Path, target: Path, also: Sequence[str] = ()) -> None:
    """Copy tokenizer, generation config, chat template and licence from `source` to `target`.

    `also` has patterns of further files to copy. Files that the source lacks are skipped.
    """
    for pattern in (*_COMPANIONS, *also):
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, target / path.name)


def read_import(folder: Path) -> ImportRecord:
    """Return the record of an imported model.

    Raises:
        ConversionError: The folder has no `import.json`, or the file cannot be read.
    """
    try:
        return msgspec.json.decode(read_regular_file(folder / IMPORT_FILE), type=ImportRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise ConversionError(
            f"{folder} is no imported model: its {IMPORT_FILE} cannot be read ({error})."
        ) from None


def _count_bytes(source: ImportSource, padding_rows: int) -> int:
    """Return the bytes of all tensors of a source after padding of the vocabulary."""
    headers = source.tensors.tensors
    total_bytes = 0
    for pair in source.pairs:
        total_bytes += sum(headers[name].size_bytes for name in pair.names)
        if pair.key in VOCABULARY:
            bytes_per_row = headers[pair.names[0]].size_bytes // source.shape.vocabulary
            total_bytes += bytes_per_row * padding_rows
    return total_bytes


def _check_name(name: str, target: Path, hub: Path) -> None:
    """Raise a ConversionError if make targets cannot have the name, or if it is taken."""
    if not is_plain_name(name):
        raise ConversionError(f"NAME={name} is no model's name; use letters, digits, '.' and '-'.")
    if target.exists():
        raise ConversionError(
            f"{relative_to_root(target)} exists already; remove it, or choose another NAME=."
        )
    if hub == HUB and name in model_names():
        raise ConversionError(f"NAME={name} is a model of 'make list'; choose another.")


def _check_names(
    folder: Path, tensors: TensorFolder, pairs: Sequence[TensorPair], shape: ModelShape
) -> tuple[str, ...]:
    """Check that the folder has exactly the tensors of the model, and return the names of the buffers to ignore.

    If the embeddings are tied, the folder may also hold an output layer, provided that it equals the embedding.

    Raises:
        ConversionError: A tensor is missing, belongs to no tensor of Megatron, or is an output layer that
            differs from the tied embedding.
    """
    expected_names: list[str] = []
    for pair in pairs:
        expected_names += pair.names
    missing_names = [name for name in expected_names if name not in tensors.tensors]
    if missing_names:
        raise ConversionError(
            f"{folder} lacks {missing_names[0]}{_count_others(missing_names)}, which its {CONFIG_FILE} "
            "asks for."
        )
    extra_names = set(tensors.tensors) - set(expected_names)
    if shape.tied_embeddings and HEAD in extra_names:
        _check_tied_output(folder, tensors, pairs)
        extra_names.remove(HEAD)
    ignored_names = tuple(sorted(name for name in extra_names if is_buffer(name)))
    unknown_names = sorted(extra_names.difference(ignored_names))
    if unknown_names:
        raise ConversionError(
            f"{folder} holds {unknown_names[0]}{_count_others(unknown_names)}, which no tensor of "
            "Megatron's takes; it is another architecture than its config.json says."
        )
    return ignored_names


def _check_tied_output(folder: Path, tensors: TensorFolder, pairs: Sequence[TensorPair]) -> None:
    """Raise an error if the folder's output layer differs from the embedding to which it is tied.

    Raises:
        ConversionError: The two tensors differ.
    """
    embedding = next(pair.names[0] for pair in pairs if pair.key == EMBEDDING)
    if not torch.equal(tensors.read(HEAD), tensors.read(embedding)):
        raise ConversionError(
            f"{folder} holds a {HEAD} of its own, and its {CONFIG_FILE} ties it to {embedding}; "
            "set tie_word_embeddings to false."
        )


def _count_others(names: Sequence[str]) -> str:
    """Return ' and 3 more' for four names; nothing for one."""
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_tensors(folder: Path, tensors: TensorFolder, pairs: Sequence[TensorPair]) -> None:
    """Raise a ConversionError if a tensor has another shape than the model's, or if parts of one tensor of
    Megatron differ in dtype.
    """
    for pair in pairs:
        headers = [tensors.tensors[name] for name in pair.names]
        for header, shape in zip(headers, pair.shapes, strict=True):
            if header.shape != shape:
                raise ConversionError(
                    f"{folder} holds {header.name} with the shape {list(header.shape)}, and its "
                    f"{CONFIG_FILE} asks for {list(shape)}."
                )
        if len({header.dtype for header in headers}) > 1:
            raise ConversionError(
                f"{folder} holds {' and '.join(pair.names)}, which are one tensor in Megatron, in "
                "different types; save them in one."
            )


def _check_tokenizer(folder: Path, vocabulary: int) -> None:
    """Raise a ConversionError if the tokenizer has a token id that lies outside of the vocabulary.

    A folder without a tokenizer is allowed. A tokenizer with fewer entries than the vocabulary is allowed as
    well, because a model may pad its vocabulary itself.
    """
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        if not (folder / name).is_file():
            continue
        try:
            largest_id = _find_largest_id(folder / name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(f"{folder / name} is no tokenizer's file ({error}).") from None
        if largest_id >= vocabulary:
            raise ConversionError(
                f"{folder / name} has the token id {largest_id}, and the model a vocabulary of "
                f"{vocabulary}; the tokenizer is another model's."
            )


def _find_largest_id(path: Path) -> int:
    """Return the largest token id in a tokenizer's JSON file, 0 if it has none.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: The file has another structure.
    """
    content = json.loads(path.read_bytes())
    added_ids = []
    if path.name == "tokenizer.json":
        added_ids = [int(token["id"]) for token in content.get("added_tokens") or []]
        content = content["model"]["vocab"]
    ids = range(len(content)) if isinstance(content, list) else content.values()
    return max((*ids, *added_ids), default=0)


def _compose_args_file(source: ImportSource, record: ImportRecord, target: Path) -> str:
    """Return the text of `NAME.args`: the flags with which Megatron builds the model and loads its weights."""
    divisor = math.gcd(source.shape.vocabulary, _PADDING_MULTIPLE)
    weights = relative_to_root(target / IMPORTED_WEIGHTS)
    flags = merge_flags(
        source.flags,
        ("--make-vocab-size-divisible-by", str(divisor)),
        ("--load", weights, "--finetune", "--no-load-optim", "--no-load-rng"),
        ("--ckpt-format", "torch_dist"),
    )
    comments = (
        f"{record.source}, imported by 'make import-hf': {record.parameters:,} parameters.",
        "The vocabulary is padded no further than tensor parallelism needs: Megatron counts padding",
        "in its softmax, transformers has none.",
    )
    return format_args_file(comments, flags)
