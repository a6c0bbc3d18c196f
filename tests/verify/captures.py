"""Captures made of arrays, as ranks would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from parakit.artifacts.capture import (
    RESPONSES_FILE,
    CapturedModule,
    CapturedRank,
    CaptureStage,
    CaptureWriter,
    Placement,
    TensorKey,
)
from parakit.verify.captured import Array, Capture, read_capture

Tensors = list[tuple[TensorKey, Array] | tuple[TensorKey, Array, Placement]]
SEQUENCE, BATCH, HIDDEN = 8, 2, 6
MODULE = "decoder.layers.0.mlp.linear_fc2"
KEY = "decoder.layers.mlp.linear_fc2.weight"
WEIGHT = f"{MODULE}.weight"


def rank(number: int = 0, **changed: Any) -> CapturedRank:
    """A rank's description: one rank alone unless degrees are given."""
    fields: dict[str, Any] = {
        "iteration": 2,
        "gated": False,
        "sequence_length": SEQUENCE,
        "micro_batch_size": BATCH,
        "micro_batches": 1,
        "clip_gradient": 1.0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocabulary": 10,
        "dtype": "float32",
        "modules": {MODULE: CapturedModule("Linear", "megatron/core/layers.py:7")},
    }
    return CapturedRank(rank=number, **{**fields, **changed})


def output(
    name: str = MODULE,
    micro_batch: int = 0,
    stage: CaptureStage = CaptureStage.OUTPUTS,
    slot: str = "output",
) -> TensorKey:
    """Where a module's output is."""
    return TensorKey(stage, name, slot, micro_batch)


def place(offset: tuple[int, ...], shape: tuple[int, ...] = (1, 4, 3)) -> Placement:
    """A part of the weight of layer 0."""
    return Placement(KEY, shape, offset)


def write(
    folder: Path, ranks: list[tuple[CapturedRank, Tensors]], response: float = 1e-6
) -> Capture:
    """Write a capture in which every tensor has one response, and read it back."""
    for described, tensors in ranks:
        writer = CaptureWriter(folder / f"rank-{described.rank}")
        for tensor_key, values, *placed in tensors:
            held = np.ascontiguousarray(values)
            bytes_of = memoryview(held.ravel().view(np.uint8))
            writer.add(tensor_key, str(held.dtype), held.shape, bytes_of, *placed)
        writer.close(described)
        responses = {
            f"{tensor_key.stage}|{tensor_key.name}|{tensor_key.slot}": response
            for tensor_key, *_ in tensors
        }
        (folder / f"rank-{described.rank}" / RESPONSES_FILE).write_text(json.dumps(responses))
    return read_capture(folder)


def pair(
    tmp_path: Path,
    ours: list[tuple[CapturedRank, Tensors]],
    reference_tensors: Tensors,
    **changed: Any,
) -> tuple[Capture, Capture]:
    """A reference of one rank, and a strategy."""
    reference = write(tmp_path / "reference", [(rank(**changed), reference_tensors)])
    return reference, write(tmp_path / "layout", ours)


def random(*shape: int, seed: int = 0) -> Array:
    """Numbers around 0, float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
