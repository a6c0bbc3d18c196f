"""`make import-hf`: a folder of Hugging Face's as a model of this kit, `hub/NAME`.

The folder gets `NAME.args` (Megatron's flags, which load the weights), `checkpoint/` (Megatron's own
distributed format, for any strategy), `import.json` and the source's config and tokenizer as they are.
Everything is checked before anything is written, and the folder is there whole or not at all.
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

from parakit.artifacts.io import made_whole, write_record
from parakit.artifacts.torch_dist import EMBEDDING, VOCABULARY
from parakit.config.files import args_text, from_root, is_plain_name, read_regular_file
from parakit.config.flags import merge_flags
from parakit.config.huggingface import exact_flags, read_config
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
"""Files that go with the weights, as they are."""

_PADDED_TO = 128
"""Padding rows are stored up to a multiple of this, so that any tensor-parallel strategy finds its
own."""


class ImportRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`import.json`: what was imported."""

    source: str
    """The folder, or the hub's name of the model."""
    folder: str
    """Where its files are."""
    model_type: str
    prefix: str
    """What the names of its tensors begin with."""
    parameters: int
    """Without padding, tied ones once."""
    vocabulary: int
    padding_rows: int
    """Stored after the vocabulary's rows: copies of the last one."""
    ignored: tuple[str, ...] = ()
    """Buffers of older files, which no model needs."""


@dataclass(frozen=True)
class ImportSource:
    """A folder that can be imported: every tensor is there, in its shape, and none is left over."""

    folder: Path
    model_type: str
    flags: tuple[str, ...]
    shape: ModelShape
    tensors: TensorFolder
    prefix: str
    pairs: tuple[TensorPair, ...]
    ignored: tuple[str, ...]

    def values(self, pair: TensorPair) -> Tensor:
        """Megatron's tensor."""
        return pair.form.join([self.tensors.read(name) for name in pair.names])


def read_source(folder: Path) -> ImportSource:
    """Look at a folder without reading weights.

    Raises:
        ConversionError, ConfigError: It cannot be converted; one sentence that says why.
    """
    if not folder.is_dir():
        raise ConversionError(f"There is no folder {folder}; name one that holds a {CONFIG_FILE}.")
    flags = exact_flags(folder / CONFIG_FILE)
    model_type = read_config(folder / CONFIG_FILE)["model_type"]
    shape = model_from_flags(folder.name, "gpt3", flags).shape
    tensors = TensorFolder(folder)
    prefix = detect_prefix(model_type, tensors.tensors)
    pairs = list_tensor_pairs(model_type, shape, prefix)
    left = _check_names(folder, tensors, pairs, shape)
    _check_tensors(folder, tensors, pairs)
    _check_tokenizer(folder, shape.vocabulary)
    return ImportSource(folder, model_type, flags, shape, tensors, prefix, pairs, left)


def import_model(
    source: ImportSource, name: str, work: ConversionProgress, hub: Path = HUB, known_as: str = ""
) -> str:
    """Write `hub/NAME`, where the source is named as it is `known_as`, or else by its folder; returns
    the closing line.

    Raises:
        ConversionError: The name is taken, or there is no room; nothing was written.
    """
    target = hub / name
    _check_name(name, target, hub)
    vocabulary = source.shape.vocabulary
    padding = round_up(vocabulary, _PADDED_TO) - vocabulary
    held = source.tensors.tensors
    total = sum(held[name].size_bytes for pair in source.pairs for name in pair.names)
    rows = [held[pair.names[0]] for pair in source.pairs if pair.key in VOCABULARY]
    total += sum(one.size_bytes // vocabulary * padding for one in rows)
    check_disk_space(target, total)

    def made() -> Iterator[tuple[TensorPair, Tensor]]:
        for pair in source.pairs:
            values = source.values(pair)
            if padding and pair.key in VOCABULARY:
                # Copies of the last row, as Megatron's own converter pads: rows of 0 would win a
                # softmax whose other logits are negative, as GPT-2's are.
                values = torch.cat((values, values[-1:].expand(padding, -1)))
            work.done(values.nbytes)
            yield pair, values

    record = ImportRecord(
        source=known_as or str(source.folder),
        folder=str(source.folder.resolve()),
        model_type=source.model_type,
        prefix=source.prefix,
        parameters=sum(math.prod(pair.shape) for pair in source.pairs),
        vocabulary=vocabulary,
        padding_rows=padding,
        ignored=source.ignored,
    )
    work.begin(f"import {name}", total)
    with made_whole(target) as folder:
        write_checkpoint(folder / IMPORTED_WEIGHTS, source.shape.layers, made())
        (folder / f"{name}.args").write_text(_args_file(source, record, target))
        write_record(folder / IMPORT_FILE, record)
        copy_companions(source.folder, folder, also=(CONFIG_FILE,))
    return work.summary(record.parameters)


def copy_companions(source: Path, target: Path, also: Sequence[str] = ()) -> None:
    """Copy tokenizer, generation config and the like."""
    for pattern in (*_COMPANIONS, *also):
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, target / path.name)


def read_import(folder: Path) -> ImportRecord:
    """The record of an imported model.

    Raises:
        ConversionError: It is not there, or cannot be read.
    """
    try:
        return msgspec.json.decode(read_regular_file(folder / IMPORT_FILE), type=ImportRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise ConversionError(
            f"{folder} is no imported model: its {IMPORT_FILE} cannot be read ({error})."
        ) from None


def _check_name(name: str, target: Path, hub: Path) -> None:
    if not is_plain_name(name):
        raise ConversionError(f"NAME={name} is no model's name; use letters, digits, '.' and '-'.")
    if target.exists():
        raise ConversionError(
            f"{from_root(target)} exists already; remove it, or choose another NAME=."
        )
    if hub == HUB and name in model_names():
        raise ConversionError(f"NAME={name} is a model of 'make list'; choose another.")


def _check_names(
    folder: Path, tensors: TensorFolder, pairs: Sequence[TensorPair], shape: ModelShape
) -> tuple[str, ...]:
    """Refuse missing and extra tensors; return the buffers that are ignored."""
    wanted = {name for pair in pairs for name in pair.names}
    missing = [name for pair in pairs for name in pair.names if name not in tensors.tensors]
    if missing:
        raise ConversionError(
            f"{folder} lacks {missing[0]}{_and_others(missing)}, which its {CONFIG_FILE} asks for."
        )
    extra = sorted(set(tensors.tensors) - wanted)
    if shape.tied_embeddings and HEAD in extra:
        embedding = next(pair.names[0] for pair in pairs if pair.key == EMBEDDING)
        if not torch.equal(tensors.read(HEAD), tensors.read(embedding)):
            raise ConversionError(
                f"{folder} holds a {HEAD} of its own, and its {CONFIG_FILE} ties it to {embedding}; "
                "set tie_word_embeddings to false."
            )
        extra.remove(HEAD)
    ignored = tuple(name for name in extra if is_buffer(name))
    unknown = [name for name in extra if name not in ignored]
    if unknown:
        raise ConversionError(
            f"{folder} holds {unknown[0]}{_and_others(unknown)}, which no tensor of Megatron's takes; "
            "it is another architecture than its config.json says."
        )
    return ignored


def _and_others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_tensors(folder: Path, tensors: TensorFolder, pairs: Sequence[TensorPair]) -> None:
    for pair in pairs:
        found = [tensors.tensors[name] for name in pair.names]
        for one, shape in zip(found, pair.shapes, strict=True):
            if one.shape != shape:
                raise ConversionError(
                    f"{folder} holds {one.name} with the shape {list(one.shape)}, and its "
                    f"{CONFIG_FILE} asks for {list(shape)}."
                )
        if len({one.dtype for one in found}) > 1:
            raise ConversionError(
                f"{folder} holds {' and '.join(pair.names)}, which are one tensor in Megatron, in "
                "different types; save them in one."
            )


def _check_tokenizer(folder: Path, vocabulary: int) -> None:
    """Refuse a tokenizer with ids beyond the vocabulary; fewer entries are the model's own padding."""
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads((folder / name).read_bytes())
            added = []
            if name == "tokenizer.json":
                added = [int(token["id"]) for token in content.get("added_tokens") or []]
                content = content["model"]["vocab"]
            ids = range(len(content)) if isinstance(content, list) else content.values()
            largest = max((*ids, *added), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(f"{folder / name} is no tokenizer's file ({error}).") from None
        if largest >= vocabulary:
            raise ConversionError(
                f"{folder / name} has the token id {largest}, and the model a vocabulary of "
                f"{vocabulary}; the tokenizer is another model's."
            )


def _args_file(source: ImportSource, record: ImportRecord, target: Path) -> str:
    divisor = math.gcd(source.shape.vocabulary, _PADDED_TO)
    weights = from_root(target / IMPORTED_WEIGHTS)
    words = merge_flags(
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
    return args_text(comments, words)
