"""`make export-hf`: the weights of a run's checkpoint as a folder that `transformers` loads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parakit.artifacts.io import made_whole
from parakit.artifacts.torch_dist import (
    EMBEDDING,
    VOCABULARY,
    DamagedCheckpointError,
    StoredTensor,
    read_metadata,
    read_tensor,
)
from parakit.config.flags import flag_words, merge_flags
from parakit.config.huggingface import config_of_flags, read_config
from parakit.config.model import ModelShape
from parakit.convert.hf.families import TensorPair, list_tensor_pairs
from parakit.convert.hf.into_megatron import CONFIG_FILE, IMPORT_FILE, copy_companions, read_import
from parakit.convert.hf.progress import ConversionError, ConversionProgress, check_disk_space
from parakit.convert.hf.tensor_files import SHARD_BYTES, TensorHeader, write_tensors

_WEIGHTS = ("embedding.", "decoder.", "output_layer.")
"""What names of the model's tensors begin with; the others are the optimizer's."""


def export_model(
    checkpoint: Path,
    words: Sequence[str],
    shape: ModelShape,
    imported: Path | None,
    target: Path,
    work: ConversionProgress,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a folder of Hugging Face's, whole or not at all; returns the closing line.

    Args:
        checkpoint: Megatron's (`iter_…`).
        words: Megatron's arguments of the run that saved it.
        shape: The model's.
        imported: The folder of the imported model that was trained, if one was.
        target: It is made.
        work: Shows progress.
        shard_bytes: Most of a file.

    Raises:
        ConversionError, ConfigError: The checkpoint is of another model, or of no family that is known,
            the folder is there, or there is no room; nothing was written.
    """
    tensors = _tensors(checkpoint)
    own = imported if imported and (imported / IMPORT_FILE).is_file() else None
    config = _config(own, words, shape, tensors[EMBEDDING].dtype)
    prefix = read_import(own).prefix if own else None
    pairs = list_tensor_pairs(str(config["model_type"]), shape, prefix)
    _check(checkpoint, tensors, pairs, shape)
    if target.exists():
        raise ConversionError(f"TO={target} exists already; remove it, or name another folder.")
    described = [
        TensorHeader(name, part, getattr(torch, tensors[pair.key].dtype))
        for pair in pairs
        for name, part in zip(pair.names, pair.shapes, strict=True)
    ]
    total = sum(one.size_bytes for one in described)
    check_disk_space(target, total)

    def values() -> Iterator[Tensor]:
        for pair in pairs:
            rows = pair.shape[0] if pair.key in VOCABULARY else None
            for part in pair.form.split(
                read_tensor(checkpoint, tensors[pair.key], pair.layer, rows)
            ):
                work.done(part.nbytes)
                yield part

    work.begin(f"export to {target.name}", total)
    with made_whole(target) as folder:
        write_tensors(folder, described, values(), shard_bytes)
        (folder / CONFIG_FILE).write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n")
        if own is not None:
            copy_companions(own, folder)
    return work.summary(sum(math.prod(one.shape) for one in described))


def _tensors(folder: Path) -> Mapping[str, StoredTensor]:
    try:
        tensors = read_metadata(folder).tensors
    except DamagedCheckpointError as error:
        raise ConversionError(
            f"{folder} is no whole checkpoint of Megatron's distributed format ({error})."
        ) from None
    if EMBEDDING not in tensors:
        raise ConversionError(
            f"{folder} holds no {EMBEDDING}; it is no checkpoint of a GPT in Megatron's distributed "
            "format."
        )
    return tensors


def _config(
    imported: Path | None, words: Sequence[str], shape: ModelShape, dtype: str
) -> dict[str, object]:
    """Of the flags, or the imported model's own with the stored type, where it is still that model."""
    explicit = {  # What Megatron derives where a flag is missing.
        "--vocab-size": shape.vocabulary,
        "--ffn-hidden-size": shape.ffn_hidden,
        "--num-query-groups": shape.query_groups,
        "--kv-channels": shape.head_width,
        "--max-position-embeddings": shape.positions or None,
    }
    config = config_of_flags(merge_flags(words, flag_words(explicit)), dtype)
    if imported is None:
        return config
    own = read_config(imported / CONFIG_FILE)
    if own["model_type"] != config["model_type"]:
        raise ConversionError(
            f"The run was trained from {imported.name}, a model of the type {own['model_type']}, with "
            f"flags that make it another; leave those out of EXTRA=."
        )
    names = [name for name in ("dtype", "torch_dtype") if name in own] or ["torch_dtype"]
    return {**own, **dict.fromkeys(names, config["dtype"])}


def _check(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    pairs: Sequence[TensorPair],
    shape: ModelShape,
) -> None:
    """Refuse missing, extra and wrong tensors."""
    for pair in pairs:
        if pair.key not in tensors:
            raise ConversionError(f"{folder} lacks {pair.key}, which the model has.")
        found = tensors[pair.key].shape
        wanted = pair.shape if pair.layer is None else (shape.layers, *pair.shape)
        fits = found == wanted
        if pair.key in VOCABULARY:  # Padded.
            fits = found[0] >= wanted[0] and found[1:] == wanted[1:]
        if not fits:
            raise ConversionError(
                f"{folder} holds {pair.key} with the shape {list(found)}, and the run's "
                f"model has {list(wanted)}; it is another model's checkpoint."
            )
    weights = {key for key in tensors if key.startswith(_WEIGHTS)}
    if extra := sorted(weights - {pair.key for pair in pairs}):
        raise ConversionError(f"{folder} holds {extra[0]}, which neither GPT-2 nor Llama has.")
