"""Write Megatron's distributed checkpoints (torch_dist) piece by piece, without a process group.

A checkpoint has files of pieces, each an archive of `torch.save`; `.metadata` with the position of each piece; and
`metadata.json`, by which Megatron recognises the format. `parakit.artifacts.torch_dist` reads such checkpoints.
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
    """Append a tensor or object to an open file with `torch.save`, and return its position in the file `name`."""
    begin = file.tell()
    torch.save(value, file)
    return StoredPart(name, begin, file.tell() - begin)


def write_metadata(folder: Path, stored: StoredMetadata) -> None:
    """Write `.metadata` and `metadata.json` into a checkpoint (`iter_…`) whose pieces are written."""
    state_dict_metadata: dict[str, Any] = dict.fromkeys(stored.objects, BytesStorageMetadata())
    parts = {MetadataIndex(name): part for name, part in stored.objects.items()}
    for name, tensor in stored.tensors.items():
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        chunks = []
        for offset, size in tensor.sizes.items():
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
        state_dict_metadata[name] = TensorStorageMetadata(
            properties, torch.Size(tensor.shape), chunks
        )
        for offset, part in tensor.parts.items():
            parts[MetadataIndex(name, torch.Size(offset))] = part
    storage_data = {
        index: _StorageInfo(part.file, part.offset_bytes, part.length_bytes)
        for index, part in parts.items()
    }
    metadata = Metadata(state_dict_metadata, planner_data={}, storage_data=storage_data)
    with (folder / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
    description = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / FORMAT).write_text(json.dumps(description))
