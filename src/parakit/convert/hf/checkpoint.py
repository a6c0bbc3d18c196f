"""Write weights as a checkpoint in Megatron's distributed format (torch_dist), as one rank would save them.

Besides tensors, a checkpoint of Megatron has `common.pt` and an extra state per linear layer. Both are
written in the form that every version from 0.13 to 0.19 reads; the extra states are empty.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from parakit.artifacts.torch_dist import TRACKER_FILE, StoredMetadata, StoredPart, StoredTensor
from parakit.artifacts.torch_dist_writer import add_piece, write_metadata
from parakit.convert.hf.families import TensorPair

ITERATION = 1
"""Iteration of the checkpoint: the smallest that every Megatron loads. With `--finetune` training begins
at 0 all the same."""
FOLDER = f"iter_{ITERATION:07d}"

_LINEAR_WEIGHT = re.compile(r"(.*\.linear_\w+)\.weight")
"""Name of a weight whose module has an extra state. Megatron loads that state, which is None unless 8-bit
floats are used."""

_FILE = "__0_0.distcp"


def write_checkpoint(
    folder: Path, layers: int, tensors: Iterable[tuple[TensorPair, Tensor]]
) -> None:
    """Write tensors as a checkpoint in Megatron's distributed format, which Megatron loads with `--load`.

    Args:
        folder: The folder to write into; `iter_0000001` in it is made and must not exist.
        layers: Number of layers of the model.
        tensors: Megatron's tensors with their values. Each tensor is written before the next is taken from the
            iterable, so only one tensor has to be in memory.
    """
    target = folder / FOLDER
    target.mkdir(parents=True)
    args = Namespace(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        world_size=1,
        data_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
    common = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    torch.save({**common, "num_floating_point_operations_so_far": 0}, target / "common.pt")
    stored_by_key: dict[str, StoredTensor] = {}
    with (target / _FILE).open("wb") as file:
        states: dict[str, StoredPart] = {}
        for pair, values in tensors:
            if pair.layer is None:
                piece = values
                full_shape = tuple(values.shape)
                offset = (0,) * values.dim()
            else:
                # Megatron stacks the layers in the first dimension, and this piece is one layer of them.
                piece = values.unsqueeze(0)
                full_shape = (layers, *values.shape)
                offset = (pair.layer,) + (0,) * values.dim()
            dtype = str(values.dtype).removeprefix("torch.")
            for key in pair.keys:
                stored = stored_by_key.setdefault(key, StoredTensor(full_shape, dtype, {}, {}))
                stored.sizes[offset] = tuple(piece.shape)
                stored.parts[offset] = add_piece(file, _FILE, piece.contiguous())
            for name in _list_extra_states(pair, layers):
                states[name] = add_piece(file, _FILE, [None])
    write_metadata(target, StoredMetadata(stored_by_key, (), states))
    (folder / TRACKER_FILE).write_text(str(ITERATION))


def _list_extra_states(pair: TensorPair, layers: int) -> Iterator[str]:
    """Yield the names of the extra states that the linear layer of a weight has; one per expert for experts.

    A weight outside of the layers, or of another module than a linear layer, has no extra state.
    """
    module = _LINEAR_WEIGHT.fullmatch(pair.key)
    if pair.layer is None or module is None:
        return
    if ".experts." not in pair.key:
        yield f"{module[1]}._extra_state/shard_{pair.layer}_{layers}"
        return
    experts = pair.shape[0]
    for expert in range(experts):
        yield f"{module[1]}._extra_state/shard_{pair.layer}.{expert}_{layers}.{experts}"
