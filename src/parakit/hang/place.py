"""Where in Megatron's training step a call or a stack is: part, layer, module, Megatron's line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parakit.config.groups import Group, group_name
from parakit.hang.evidence import Frame, RecordedCall, StepStage

PIPELINE_EXCHANGE = "pipeline exchange"
START_UP = "start-up"
_OUTPUT = "output_layer"
_PARTS = (
    (
        "data loading",
        (
            "get_batch",
            "read_batch",
            "build_train_valid_test_data",
            "_next_data",
            "get_batch_on_this_tp_rank",
        ),
    ),
    ("saving a checkpoint", ("save_checkpoint", "save_checkpoint_and_time")),
    ("evaluation", ("evaluate", "evaluate_and_print_results")),
    ("backward", ("backward_step", "backward")),
    ("forward", ("forward_step",)),
    ("the gradients' reduction", ("finalize_model_grads", "start_grad_sync", "finish_grad_sync")),
    ("the optimizer's step", ("step", "clip_grad_norm", "prepare_grads")),
    ("the training step", ("train_step",)),
    ("logging", ("training_log",)),
    (START_UP, ("initialize_megatron", "setup_model_and_optimizer", "pretrain")),
)
"""Megatron's functions by the part of the step that they are; the first that is on the stack counts."""

_MODULES = (
    ("/moe_logging", ""),
    ("/moe/experts", "mlp.experts"),
    ("/moe/router", "mlp.router"),
    ("/moe/", "mlp"),
    ("/mlp.py", "mlp"),
    ("/attention.py", "self_attention"),
    ("dot_product_attention", "self_attention.core_attention"),
    ("language_model_embedding", "embedding"),
    ("cross_entropy", "loss"),
    ("/rotary_pos_embedding", "rotary_pos_emb"),
    ("/optimizer/", "optimizer"),
    ("param_and_grad_buffer", "gradient buffer"),
    ("finalize_model_grads", "gradient buffer"),
    ("p2p_communication", PIPELINE_EXCHANGE),
    ("gpt_model.py", _OUTPUT),
)
_METHODS = {
    "_forward_mlp": "mlp",
    "_forward_attention": "self_attention",
    **dict.fromkeys(_PARTS[0][1], _PARTS[0][0]),
}


_FORWARD, _BACKWARD, _LAST_PART = "forward", "backward", "the optimizer's step"
_STEPS = ("forward_step", "backward_step")
_IN_LAYERS = ("mlp", "self_attention")


@dataclass(frozen=True)
class StepPlace:
    """A place in the training step; what is not known is empty."""

    part: str = ""
    module: str = ""
    layer: int | None = None
    """Of the stage, from 1."""
    micro_batch: int | None = None
    """Of the iteration, from 1."""
    line: str = ""
    """Megatron's, or the user's: `transformer_layer.py:512 in forward`."""

    @property
    def is_known(self) -> bool:
        """Whether it says in which module it is, or that it is in none: autograd's frames do not."""
        return bool(self.module or self.part not in ("", _BACKWARD))

    def __str__(self) -> str:
        layer = f" of layer {self.layer}" if self.layer is not None else ""
        named = f" ({self.module})" if self.module not in ("", self.part) else ""
        named += f", micro batch {self.micro_batch}" if self.micro_batch is not None else ""
        at = f", {self.line}" if self.line else ""
        return f"{self.part}{layer}{named}{at}" if self.part else self.line


def locate_frames(frames: Sequence[Frame]) -> StepPlace:
    """By the frames alone, innermost first."""
    functions = {frame.function.rpartition(".")[2] for frame in frames}
    part = next((name for name, known in _PARTS if functions & set(known)), "")
    users = [frame for frame in frames if "/torch/" not in frame.file]
    ours = [frame for frame in users if "/megatron/" in frame.file]
    # Samples are read by code of the user's or of the kit's.
    inner = next(iter(users if part == _PARTS[0][0] else ours or users), None)
    line = f"{inner.file.rpartition('/')[2]}:{inner.line} in {inner.function}" if inner else ""
    return StepPlace(part, next(filter(None, map(_module, frames)), ""), line=line)


def locate_call_in_step(
    calls: Sequence[RecordedCall], at: int, stage: StepStage | None
) -> StepPlace:
    """As `place_of`, with layer and micro batch where it is known what a stage holds.

    Of the calls from one place in the code, each layer makes as many in each micro batch, as the
    iteration before shows; backward begins with the last layer.
    """
    call = calls[at]
    found = locate_frames(call.frames)
    if stage is None or found.part not in (_FORWARD, _BACKWARD):
        return found
    counts, site = [0], _site(call)
    for earlier in reversed(calls[: at + 1]):
        if _site(earlier) == site:
            counts[-1] += 1
        elif counts[-1] and locate_frames(earlier.frames).part == _LAST_PART:
            counts.append(0)
    before = max(counts[1:], default=0) // stage.micro_batches
    order = []
    if found.module.startswith(_IN_LAYERS):
        order = [found.module] * (before or stage.layers)
    elif not found.module:
        order = _modules_of_backward(group_name(call.description), before, stage.layers)
    if not order:
        return found
    micro_batch, number = divmod(counts[0] - 1, len(order))
    module = order[number]
    found = replace(found, module=module, micro_batch=micro_batch + 1)
    if module == _OUTPUT:
        return found
    inside = [index for index, name in enumerate(order) if name != _OUTPUT]
    layer = inside.index(number) * stage.layers // len(inside) + 1
    return replace(found, layer=layer if found.part == _FORWARD else stage.layers - layer + 1)


def _site(call: RecordedCall) -> tuple[object, ...]:
    """Where in forward or backward it was made; the last micro batch's comes from another line."""
    functions = [frame.function for frame in call.frames]
    ends = [functions.index(name) for name in _STEPS if name in functions]
    return call.description, call.operation, call.frames[: min(ends, default=0) + 1]


def _modules_of_backward(group: str, calls: int, layers: int) -> list[str]:
    """Whose calls those from one place in backward are, in order: their frames name no module.

    A tensor-parallel layer's are its MLP's and its attention's; the output layer's come before.
    """
    if group == Group.CONTEXT:
        return ["self_attention"] * (calls or 2 * layers)
    if group in (Group.EXPERT, Group.TENSOR_EXPERT, Group.EXPERT_TENSOR):
        return ["mlp"] * (calls or 2 * layers)
    if group != Group.TENSOR or calls < layers:
        return []
    of_layer = ["mlp", "self_attention"] if calls >= 2 * layers else ["self_attention"]
    each = max(1, calls // (len(of_layer) * layers))
    inside = [name for _ in range(layers) for name in of_layer for _ in range(each)]
    return [_OUTPUT] * (calls - len(inside)) + inside


def _module(frame: Frame) -> str:
    if frame.function in _METHODS:
        return _METHODS[frame.function]
    return next((name for file, name in _MODULES if file in frame.file), "")
