"""`make export-hf`: the weights of a run's checkpoint as a folder that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tools.convert.hf.checkpoint import StoredCheckpoint
from tools.convert.hf.errors import ConversionError
from tools.convert.hf.families import VOCABULARY, TensorPair, pairs_of
from tools.convert.hf.into_megatron import (
    CONFIG_FILE,
    IMPORT_FILE,
    copy_companions,
    read_import,
)
from tools.convert.hf.progress import Summary, Work, check_room
from tools.convert.hf.tensor_files import SHARD_BYTES, Described, write_tensors
from tools.records.io import made_whole
from tools.spec.flags import flag_words, merge_flags
from tools.spec.huggingface import config_of_flags, read_config
from tools.spec.model import ModelShape

_WEIGHTS = ("embedding.", "decoder.", "output_layer.")
"""What names of the model's tensors begin with; the others are the optimizer's."""


@dataclass(frozen=True)
class Export:
    """A checkpoint that can be exported: it holds every tensor of the model, and no other."""

    checkpoint: StoredCheckpoint
    config: dict[str, object]
    pairs: tuple[TensorPair, ...]
    imported: Path | None
    """The folder of the imported model that was trained; None for a model of the kit's own."""

    @property
    def described(self) -> list[Described]:
        """What is written, in order."""
        return [
            Described(name, shape, self.checkpoint.dtype(pair.key))
            for pair in self.pairs
            for name, shape in zip(pair.names, pair.shapes, strict=True)
        ]

    def values(self, work: Work) -> Iterator[Tensor]:
        """Hugging Face's tensors, in the order of `described`; one of Megatron's is read at a time."""
        for pair in self.pairs:
            rows = pair.shape[0] if pair.key in VOCABULARY else None
            whole = self.checkpoint.read(pair.key, pair.layer, rows)
            for part in pair.form.split(whole):
                work.done(part.nbytes)
                yield part


def read_export(
    folder: Path, words: Sequence[str], shape: ModelShape, imported: Path | None = None
) -> Export:
    """Look at a checkpoint (`iter_…`) without reading weights.

    Args:
        folder: The checkpoint's.
        words: Megatron's arguments of the run that saved it.
        shape: The model's.
        imported: The folder of the imported model that was trained, if one was.

    Raises:
        ConversionError, ConfigError: It is of another model, or of no family that is known.
    """
    checkpoint = StoredCheckpoint(folder)
    if VOCABULARY[0] not in checkpoint.tensors:
        raise ConversionError(
            f"{folder} holds no {VOCABULARY[0]}; it is no checkpoint of a GPT in Megatron's "
            "distributed format."
        )
    stored = checkpoint.tensors[VOCABULARY[0]].dtype
    config = config_of_flags(merge_flags(words, _explicit(shape)), stored)
    own = imported if imported and (imported / IMPORT_FILE).is_file() else None
    prefix = read_import(own).prefix if own else None
    if own is not None:
        config = _as_imported(own, config)
    pairs = pairs_of(str(config["model_type"]), shape, prefix)
    _check(checkpoint, pairs, shape)
    return Export(checkpoint, config, pairs, own)


def export_model(
    export: Export, target: Path, work: Work, shard_bytes: int = SHARD_BYTES
) -> Summary:
    """Write the folder, whole or not at all.

    Raises:
        ConversionError: The folder is there, or there is no room; nothing was written.
    """
    if target.exists():
        raise ConversionError(f"TO={target} exists already; remove it, or name another folder.")
    described = export.described
    total = sum(one.size_bytes for one in described)
    check_room(target, total)
    work.begin(f"export to {target.name}", total)
    with made_whole(target) as folder:
        write_tensors(folder, described, export.values(work), shard_bytes)
        text = json.dumps(export.config, indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(f"{text}\n")
        if export.imported is not None:
            copy_companions(export.imported, folder)
    return work.summary(sum(torch.Size(one.shape).numel() for one in described))


def _explicit(shape: ModelShape) -> tuple[str, ...]:
    """What Megatron derives where a flag is missing."""
    return flag_words(
        {
            "--vocab-size": shape.vocabulary,
            "--ffn-hidden-size": shape.ffn_hidden,
            "--num-query-groups": shape.query_groups,
            "--kv-channels": shape.head_width,
            "--max-position-embeddings": shape.positions or None,
        }
    )


def _as_imported(folder: Path, config: dict[str, object]) -> dict[str, object]:
    """The imported model's own config, with the stored weights' type, where it is still that model."""
    own = read_config(folder / CONFIG_FILE)
    if own["model_type"] != config["model_type"]:
        raise ConversionError(
            f"The run was trained from {folder.name}, a model of the type {own['model_type']}, with "
            f"flags that make it another; leave those out of EXTRA=."
        )
    names = [name for name in ("dtype", "torch_dtype") if name in own] or ["torch_dtype"]
    return {**own, **dict.fromkeys(names, config["dtype"])}


def _check(checkpoint: StoredCheckpoint, pairs: Sequence[TensorPair], shape: ModelShape) -> None:
    """Refuse missing, extra and wrong tensors."""
    for pair in pairs:
        if pair.key not in checkpoint.tensors:
            raise ConversionError(f"{checkpoint.folder} lacks {pair.key}, which the model has.")
        found = checkpoint.tensors[pair.key].shape
        wanted = pair.shape if pair.layer is None else (shape.layers, *pair.shape)
        fits = found == wanted
        if pair.key in VOCABULARY:  # Padded.
            fits = found[0] >= wanted[0] and found[1:] == wanted[1:]
        if not fits:
            raise ConversionError(
                f"{checkpoint.folder} holds {pair.key} with the shape {list(found)}, and the run's "
                f"model has {list(wanted)}; it is another model's checkpoint."
            )
    weights = {key for key in checkpoint.tensors if key.startswith(_WEIGHTS)}
    extra = sorted(weights - {pair.key for pair in pairs})
    if extra:
        raise ConversionError(
            f"{checkpoint.folder} holds {extra[0]}, which neither GPT-2 nor Llama has."
        )
