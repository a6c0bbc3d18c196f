"""Where in Megatron's training step a call or a stack is: part, layer, module, Megatron's line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tools.hang.evidence import Frame, RecordedCall

_PARTS = (
    (
        "data loading",
        ("get_batch", "build_train_valid_test_data", "_next_data", "get_batch_on_this_tp_rank"),
    ),
    ("saving a checkpoint", ("save_checkpoint", "save_checkpoint_and_time")),
    ("evaluation", ("evaluate", "evaluate_and_print_results")),
    ("backward", ("backward_step", "backward")),
    ("forward", ("forward_step",)),
    ("the gradients' reduction", ("finalize_model_grads", "start_grad_sync", "finish_grad_sync")),
    ("the optimizer's step", ("step", "clip_grad_norm", "prepare_grads")),
    ("the training step", ("train_step",)),
    ("logging", ("training_log",)),
    ("start-up", ("initialize_megatron", "setup_model_and_optimizer", "pretrain")),
)
"""Megatron's functions by the part of the step that they are; the first that is on the stack counts."""

_MODULES = (
    ("/moe/", "mlp.experts"),
    ("/mlp.py", "mlp"),
    ("/attention.py", "self_attention"),
    ("dot_product_attention", "self_attention.core_attention"),
    ("language_model_embedding", "embedding"),
    ("cross_entropy", "loss"),
    ("/rotary_pos_embedding", "rotary_pos_emb"),
    ("/optimizer/", "optimizer"),
    ("param_and_grad_buffer", "gradient buffer"),
    ("gpt_model.py", "output_layer"),
)
_METHODS = {"_forward_mlp": "mlp", "_forward_attention": "self_attention"}


@dataclass(frozen=True)
class Place:
    """A place in the training step; what is not known is empty."""

    part: str = ""
    module: str = ""
    layer: int | None = None
    """Of the stage, from 1."""
    line: str = ""
    """Megatron's, or the user's: `transformer_layer.py:512 in forward`."""

    def __str__(self) -> str:
        layer = f" of layer {self.layer}" if self.layer is not None else ""
        named = f" ({self.module})" if self.module else ""
        at = f", {self.line}" if self.line else ""
        return f"{self.part}{layer}{named}{at}" if self.part else self.line


def place_of(frames: Sequence[Frame]) -> Place:
    """By the frames alone, innermost first."""
    functions = {frame.function.rpartition(".")[2] for frame in frames}
    part = next((name for name, known in _PARTS if functions & set(known)), "")
    ours = next((f for f in frames if "/megatron/" in f.file), None)
    inner = ours or next((f for f in frames if "/torch/" not in f.file), None)
    line = f"{inner.file.rpartition('/')[2]}:{inner.line} in {inner.function}" if inner else ""
    return Place(part, next(filter(None, map(_module, frames)), ""), None, line)


def place_of_call(calls: Sequence[RecordedCall], at: int, layers: int | None) -> Place:
    """As `place_of`, with the layer where a stage's number of layers is known.

    In a forward pass the n-th call from one place in the code is that of layer n; backward counts from
    the last layer.
    """
    call = calls[at]
    found = place_of(call.frames)
    is_of_layer = found.module.startswith(("mlp", "self_attention"))
    if not layers or not is_of_layer or found.part not in ("forward", "backward"):
        return found
    count = 0
    for earlier in reversed(calls[: at + 1]):
        if place_of(earlier.frames).part != found.part:
            break
        count += earlier.signature == call.signature
    layer = (count - 1) % layers + 1
    return replace(found, layer=layer if found.part == "forward" else layers - layer + 1)


def _module(frame: Frame) -> str:
    if frame.function in _METHODS:
        return _METHODS[frame.function]
    return next((name for file, name in _MODULES if file in frame.file), "")
