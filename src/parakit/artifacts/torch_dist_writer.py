"""Megatron's distributed checkpoints (torch_dist) written a piece at a time, without a process group.

What `parakit.artifacts.torch_dist` reads: files of pieces, each an archive of `torch.save`, `.metadata` that
says where each lies, and `metadata.json`, with which Megatron takes the folder for its own.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from parakit.artifacts.torch_dist import FORMAT, METADATA, StoredMetadata, StoredPart


def add_piece(file: BinaryIO, name: str, value: object) -> StoredPart:
    """Write a tensor, or what `torch.save` takes, at the end of a file of that name."""
    begin = file.tell()
    torch.save(value, file)
    return StoredPart(name, begin, file.tell() - begin)


def write_metadata(folder: Path, held: StoredMetadata) -> None:
    """Finish a checkpoint (`iter_…`) whose pieces are written."""
    described: dict[str, Any] = dict.fromkeys(held.objects, BytesStorageMetadata())
    places = {MetadataIndex(name): part for name, part in held.objects.items()}
    for name, tensor in held.tensors.items():
        described[name] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
            [
                ChunkStorageMetadata(torch.Size(at), torch.Size(size))
                for at, size in tensor.sizes.items()
            ],
        )
        places |= {MetadataIndex(name, torch.Size(at)): part for at, part in tensor.parts.items()}
    where = {
        index: _StorageInfo(part.file, part.offset_bytes, part.length_bytes)
        for index, part in places.items()
    }
    with (folder / METADATA).open("wb") as file:
        pickle.dump(Metadata(described, planner_data={}, storage_data=where), file)
    description = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / FORMAT).write_text(json.dumps(description))
