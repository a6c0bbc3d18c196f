"""Weights as Megatron's distributed checkpoint (torch_dist), as one rank would save them.

What Megatron keeps beside tensors is written in the form that every version reads (0.13 to 0.19):
`common.pt`, and an empty extra state of each linear layer.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from parakit.artifacts.torch_dist import TRACKER_FILE, StoredMetadata, StoredTensor
from parakit.artifacts.torch_dist_writer import add_piece, write_metadata
from parakit.convert.hf.families import TensorPair

ITERATION = 1
"""The least that every Megatron takes; `--finetune` begins at 0 all the same."""
FOLDER = f"iter_{ITERATION:07d}"

_WITH_STATE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules whose extra state Megatron asks for; it is None without 8-bit floats."""

_FILE = "__0_0.distcp"


def write_checkpoint(
    folder: Path, layers: int, tensors: Iterable[tuple[TensorPair, Tensor]]
) -> None:
    """Make a folder that `--load` takes; each tensor is written before the next one is asked for."""
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
    held: dict[str, StoredTensor] = {}
    with (target / _FILE).open("wb") as file:
        states = {
            f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}": add_piece(
                file, _FILE, [None]
            )
            for layer in range(layers)
            for module in _WITH_STATE
        }
        for pair, values in tensors:
            stacked = pair.layer is not None
            piece = values.unsqueeze(0) if stacked else values
            whole = (layers, *values.shape) if stacked else tuple(values.shape)
            dtype = str(values.dtype).removeprefix("torch.")
            stored = held.setdefault(pair.key, StoredTensor(whole, dtype, {}, {}))
            at = (pair.layer or 0, *(0 for _ in whole[1:]))
            stored.sizes[at] = tuple(piece.shape)
            stored.parts[at] = add_piece(file, _FILE, piece.contiguous())
    write_metadata(target, StoredMetadata(held, (), states))
    (folder / TRACKER_FILE).write_text(str(ITERATION))
