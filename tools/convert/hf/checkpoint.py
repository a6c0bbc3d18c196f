"""Megatron's distributed checkpoints (torch_dist), read and written a tensor at a time.

Weights alone, as one rank would save them. PyTorch's own writer lays the file out; each tensor is made
when the writer asks for it. What Megatron keeps beside tensors is written in the form that every version
reads (0.13 to 0.19): `common.pt`, and an empty extra state of each linear layer.
"""

from __future__ import annotations

import io
import json
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from tools.convert.hf.errors import ConversionError
from tools.records.torch_dist import (
    FORMAT,
    TRACKER_FILE,
    DamagedCheckpointError,
    StoredTensor,
    fill,
    read_metadata,
)

ITERATION = 1
"""The least that every Megatron takes; `--finetune` begins at 0 all the same."""

_WITH_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules whose extra state Megatron asks for; it is None without 8-bit floats."""


@dataclass(frozen=True)
class StackedTensor:
    """A tensor of a checkpoint, or one layer of it."""

    key: str
    layer: int | None
    shape: tuple[int, ...]
    """Without the dimension of layers."""
    dtype: torch.dtype


def write_checkpoint(
    folder: Path,
    tensors: Sequence[StackedTensor],
    layers: int,
    values: Callable[[StackedTensor], Tensor],
) -> None:
    """Write a folder that `--load` takes.

    Args:
        folder: It is made.
        tensors: All of the model's.
        layers: Of the model.
        values: Makes a tensor's values; it is called once for each, and not before they are written.
    """
    target = folder / f"iter_{ITERATION:07d}"
    target.mkdir(parents=True)
    torch.save(_common(), target / "common.pt")
    writer, planner = FileSystemWriter(target), _Planner(tensors, layers, values)
    try:
        with warnings.catch_warnings():
            # It warns that no_dist writes in this process alone, which is what is wanted of it.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None
    description = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (target / FORMAT).write_text(json.dumps(description))
    (folder / TRACKER_FILE).write_text(str(ITERATION))


def _common() -> dict[str, object]:
    """What Megatron reads of any checkpoint before it looks at the tensors."""
    args = Namespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        world_size=1,
        data_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "num_floating_point_operations_so_far": 0,
    }


class _Planner(DefaultSavePlanner):
    """Says what is to be written, and gives the values one by one."""

    def __init__(
        self,
        tensors: Sequence[StackedTensor],
        layers: int,
        values: Callable[[StackedTensor], Tensor],
    ) -> None:
        super().__init__()
        self._tensors = {_index(one): one for one in tensors}
        self._layers, self._values = layers, values

    def create_local_plan(self) -> SavePlan:
        """Every tensor of every layer, and the extra states."""
        items = [_item(index, one, self._layers) for index, one in self._tensors.items()]
        states = [
            WriteItem(
                MetadataIndex(f"decoder.layers.{module}._extra_state/shard_{layer}_{self._layers}"),
                WriteItemType.BYTE_IO,
            )
            for layer in range(self._layers)
            for module in _WITH_STATE
        ]
        self.plan = SavePlan([*items, *states], planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a tensor, made now."""
        one = self._tensors.get(write_item.index)
        if one is None:
            state = io.BytesIO()
            torch.save([None], state)
            return state
        made = self._values(one).contiguous()
        return made if one.layer is None else made.unsqueeze(0)


def _index(one: StackedTensor) -> MetadataIndex:
    first = () if one.layer is None else (one.layer,)
    return MetadataIndex(one.key, torch.Size((*first, *(0 for _ in one.shape))))


def _item(index: MetadataIndex, one: StackedTensor, layers: int) -> WriteItem:
    stacked = one.layer is not None
    assert index.offset is not None
    chunk = ChunkStorageMetadata(index.offset, torch.Size((*(1,) * stacked, *one.shape)))
    whole = torch.Size((*(layers,) * stacked, *one.shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=one.dtype), whole)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


@dataclass(frozen=True)
class StoredCheckpoint:
    """The tensors of a checkpoint (`iter_…`), whatever strategy saved it."""

    folder: Path

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Whole ones, all layers stacked, by Megatron's names.

        Raises:
            ConversionError: The folder is no checkpoint.
        """
        try:
            return read_metadata(self.folder).tensors
        except DamagedCheckpointError as error:
            raise ConversionError(
                f"{self.folder} is no whole checkpoint of Megatron's distributed format ({error})."
            ) from None

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor that is there."""
        found: torch.dtype = getattr(torch, self.tensors[key].dtype)
        return found

    def read(self, key: str, layer: int | None = None, rows: int | None = None) -> Tensor:
        """A whole tensor, or one layer of a stacked one.

        Args:
            key: Megatron's.
            layer: From 0; None for a tensor that is not stacked.
            rows: How many of its rows are wanted; all by default.
        """
        stored = self.tensors[key]
        height, *width = stored.shape if layer is None else stored.shape[1:]
        whole = torch.empty((height if rows is None else rows, *width), dtype=self.dtype(key))
        fill(self.folder, stored, whole, partial(torch.load, weights_only=True), layer)
        return whole
