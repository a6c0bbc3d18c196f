"""`make export-hf`: write a checkpoint of Megatron as a folder that `transformers` loads.

The checkpoint is in Megatron's distributed format. The folder has safetensors, `config.json`, and the
tokenizer's files if the model was imported from Hugging Face.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parakit.artifacts.io import atomic_directory
from parakit.artifacts.torch_dist import (
    EMBEDDING,
    VOCABULARY,
    DamagedCheckpointError,
    PieceReader,
    StoredTensor,
    read_metadata,
)
from parakit.config.flags import format_flags, merge_flags
from parakit.config.huggingface import build_config, flags_model_type, read_config
from parakit.config.model import ModelShape
from parakit.convert.hf.families import TensorPair, list_tensor_pairs
from parakit.convert.hf.into_megatron import CONFIG_FILE, IMPORT_FILE, copy_companions, read_import
from parakit.convert.hf.progress import ConversionError, ConversionProgress, check_disk_space
from parakit.convert.hf.tensor_files import SHARD_BYTES, TensorHeader, write_tensors

_WEIGHT_PREFIXES = ("embedding.", "decoder.", "output_layer.")
"""Beginnings of the names of the model's tensors; all other tensors are the optimizer's."""


def export_model(
    checkpoint: Path,
    arguments: Sequence[str],
    shape: ModelShape,
    imported: Path | None,
    target: Path,
    progress: ConversionProgress,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a checkpoint as a folder of Hugging Face, and return a line with size, time and peak memory.

    If an error occurs, no folder is left behind.

    Args:
        checkpoint: A folder `iter_…` of Megatron's.
        arguments: Megatron's arguments of the run that saved the checkpoint.
        shape: The model's dimensions.
        imported: The folder of the imported model that the run began from, whose tokenizer is copied. With
            None, or if the folder has no `import.json`, `config.json` is made from the arguments.
        target: The folder to write; it must not exist.
        progress: Prints how many bytes are written.
        shard_bytes: The largest size of a safetensors file in bytes.

    Raises:
        ConversionError, ConfigError: The checkpoint is damaged or of another model, the family is
            not converted, the target exists, or the disk has no space; nothing is written.
    """
    tensors = _read_tensors(checkpoint)
    source = imported if imported and (imported / IMPORT_FILE).is_file() else None
    config = _make_config(source, arguments, shape, tensors[EMBEDDING].dtype)
    prefix = read_import(source).prefix if source else None
    model_type = str(config["model_type"])
    pairs = list_tensor_pairs(model_type, shape, prefix)
    _check_tensors(checkpoint, tensors, pairs, shape, model_type)
    if target.exists():
        raise ConversionError(f"TO={target} exists already; remove it, or name another folder.")
    headers = _list_headers(pairs, tensors)
    total_bytes = sum(header.size_bytes for header in headers)
    check_disk_space(target, total_bytes)

    progress.begin(f"export to {target.name}", total_bytes)
    with atomic_directory(target) as folder:
        values = _read_values(checkpoint, tensors, pairs, progress)
        write_tensors(folder, headers, values, shard_bytes)
        (folder / CONFIG_FILE).write_text(f"{json.dumps(config, indent=2, sort_keys=True)}\n")
        if source is not None:
            copy_companions(source, folder)
    num_parameters = sum(math.prod(header.shape) for header in headers)
    return progress.summary(num_parameters)


def _list_headers(
    pairs: Sequence[TensorPair], tensors: Mapping[str, StoredTensor]
) -> list[TensorHeader]:
    """Return name, shape and type of each tensor of Hugging Face, in the order in which they are written.

    Args:
        pairs: Megatron's tensors, each with its tensors of Hugging Face.
        tensors: Tensors of the checkpoint by key.
    """
    headers = []
    for pair in pairs:
        dtype = getattr(torch, tensors[_stored_key(pair, tensors)].dtype)
        for name, shape in zip(pair.names, pair.shapes, strict=True):
            headers.append(TensorHeader(name, shape, dtype))
    return headers


def _read_values(
    checkpoint: Path,
    tensors: Mapping[str, StoredTensor],
    pairs: Sequence[TensorPair],
    progress: ConversionProgress,
) -> Iterator[Tensor]:
    """Yield the values of each tensor of Hugging Face, in the order of `_list_headers`, and count their bytes.

    Only the tensor that is written is in memory.
    """
    with PieceReader(checkpoint) as reader:
        for pair in pairs:
            # Rows beyond the vocabulary are padding, which `transformers` has not.
            rows = pair.shape[0] if pair.key in VOCABULARY else None
            stored = tensors[_stored_key(pair, tensors)]
            values = reader.read_tensor(stored, pair.layer, rows)
            for part in pair.form.split(values):
                progress.done(part.nbytes)
                yield part


def _read_tensors(folder: Path) -> Mapping[str, StoredTensor]:
    """Return the stored tensors of a checkpoint by key.

    Raises:
        ConversionError: The checkpoint is damaged, or holds no word embedding.
    """
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


def _make_config(
    imported: Path | None, arguments: Sequence[str], shape: ModelShape, dtype: str
) -> dict[str, object]:
    """Return the content of `config.json`.

    For an imported model, this is the config of the source with the dtype of the stored tensors. For any other
    model, the config is made from Megatron's arguments.

    Raises:
        ConversionError: The arguments describe a model of another type than the imported model.
    """
    # Megatron derives these where the flag is missing, so the config needs them written out.
    derived_flags = {
        "--vocab-size": shape.vocabulary,
        "--ffn-hidden-size": shape.ffn_hidden,
        "--num-query-groups": shape.query_groups,
        "--kv-channels": shape.head_width,
        "--max-position-embeddings": shape.positions or None,
    }
    config = build_config(merge_flags(arguments, format_flags(derived_flags)), dtype)
    if imported is None:
        return config
    source_config = read_config(imported / CONFIG_FILE)
    if flags_model_type(source_config["model_type"]) != config["model_type"]:
        raise ConversionError(
            f"The run was trained from {imported.name}, a model of the type "
            f"{source_config['model_type']}, with flags that make it another; leave those out of EXTRA=."
        )
    dtype_fields = [name for name in ("dtype", "torch_dtype") if name in source_config]
    return {**source_config, **dict.fromkeys(dtype_fields or ["torch_dtype"], config["dtype"])}


def _stored_key(pair: TensorPair, tensors: Mapping[str, StoredTensor]) -> str:
    """Return the key under which a checkpoint stores a tensor; the first one if it stores none."""
    return next((key for key in pair.keys if key in tensors), pair.key)


def _check_tensors(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    pairs: Sequence[TensorPair],
    shape: ModelShape,
    model_type: str,
) -> None:
    """Raise an error if the checkpoint's tensors do not fit the model. A padded vocabulary may have more rows.

    Raises:
        ConversionError: A tensor is missing, has another shape, or belongs to no tensor of Hugging Face.
    """
    model_keys: set[str] = set()
    for pair in pairs:
        model_keys.update(pair.keys)
        key = _stored_key(pair, tensors)
        if key not in tensors:
            raise ConversionError(f"{folder} lacks {key}, which the model has.")
        stored_shape = tensors[key].shape
        model_shape = pair.shape if pair.layer is None else (shape.layers, *pair.shape)
        fits = stored_shape == model_shape
        if pair.key in VOCABULARY:
            # Megatron pads the vocabulary, so more rows than the model's are right.
            has_rows = stored_shape[0] >= model_shape[0]
            fits = has_rows and stored_shape[1:] == model_shape[1:]
        if not fits:
            raise ConversionError(
                f"{folder} holds {key} with the shape {list(stored_shape)}, and the run's "
                f"model has {list(model_shape)}; it is another model's checkpoint."
            )
    stored_weights = [key for key in tensors if key.startswith(_WEIGHT_PREFIXES)]
    unknown_keys = sorted(key for key in stored_weights if key not in model_keys)
    if unknown_keys:
        raise ConversionError(
            f"{folder} holds {unknown_keys[0]}, which a model of the type {model_type} does not have."
        )
