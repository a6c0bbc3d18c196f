"""Find where in Megatron's training step a stack or a call is.

The result is a `StepPlace`: part of the step (forward, backward, …), module, layer, micro batch and line of code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parakit.config.groups import Group, group_name
from parakit.hang.evidence import Frame, RecordedCall, StepStage

PIPELINE_EXCHANGE = "pipeline exchange"
"""Module name for point-to-point communication between pipeline stages."""
START_UP = "start-up"
TRAINING_LOOP = "the training loop"
"""Code of the training loop outside of its steps."""
DATA_LOADING = "data loading"
SAVING = "saving a checkpoint"
_OUTPUT = "output_layer"
_PARTS = (
    (
        DATA_LOADING,
        (
            "get_batch",
            "read_batch",
            "build_train_valid_test_datasets",
            "build_train_valid_test_data_loaders",
            "build_train_valid_test_data_iterators",
            "_next_data",
            "get_batch_on_this_tp_rank",
        ),
    ),
    (SAVING, ("save_checkpoint", "save_checkpoint_and_time")),
    ("loading a checkpoint", ("load_checkpoint",)),
    ("evaluation", ("evaluate", "evaluate_and_print_results")),
    ("backward", ("backward_step", "backward")),
    ("forward", ("forward_step",)),
    ("the gradients' reduction", ("finalize_model_grads", "start_grad_sync", "finish_grad_sync")),
    ("the optimizer's step", ("step", "clip_grad_norm", "prepare_grads")),
    ("the training step", ("train_step",)),
    ("logging", ("training_log",)),
    (TRAINING_LOOP, ("train",)),
    (START_UP, ("initialize_megatron", "setup_model_and_optimizer", "pretrain")),
)
"""Parts of the step with Megatron's functions that compute them.

If functions of several parts are on a stack, the first of these parts in this table counts.
"""

_FILES_OF_PARTS = (
    ("/utils/data/dataloader", DATA_LOADING),
    ("/data/iterators", DATA_LOADING),
    ("/core/datasets/", DATA_LOADING),
    ("/dist_checkpointing/", SAVING),
    ("/distributed/checkpoint/", SAVING),
)
"""Parts of the step by a piece of the path of a file, for stacks without any of the functions above."""
_LIBRARIES = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "megatron_patches/",
    "/parakit/",
)
_PACKAGES_OF_PYTHON = (
    "asyncio",
    "concurrent",
    "ctypes",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
)

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
"""Modules by a piece of the path of the file that computes them; the first that fits counts."""
_METHODS = {
    "_forward_mlp": "mlp",
    "_forward_attention": "self_attention",
    **dict.fromkeys(_PARTS[0][1], _PARTS[0][0]),
}
"""Modules by the function that computes them; these count before the files."""


_FORWARD, _BACKWARD, _LAST_PART = "forward", "backward", "the optimizer's step"
_STEP_FUNCTIONS = ("forward_step", "backward_step")
_MODULES_OF_LAYERS = ("mlp", "self_attention")


@dataclass(frozen=True)
class StepPlace:
    """A location in the training step. An unknown field is empty or None."""

    part: str = ""
    module: str = ""
    layer: int | None = None
    """Number of the layer within its pipeline stage, from 1."""
    micro_batch: int | None = None
    """Number of the micro batch within its iteration, from 1."""
    line: str = ""
    """Innermost line of Megatron or of the user's code, such as `transformer_layer.py:512 in forward`.

    Megatron's line that called the user's follows it."""

    @property
    def is_known(self) -> bool:
        """True if the module is known, or a part that has none. Frames of backward name no module."""
        return bool(self.module or self.part not in ("", _BACKWARD))

    def __str__(self) -> str:
        if not self.part:
            return self.line
        text = self.part
        if self.layer is not None:
            text += f" of layer {self.layer}"
        if self.module not in ("", self.part):
            text += f" ({self.module})"
        if self.micro_batch is not None:
            text += f", micro batch {self.micro_batch}"
        return f"{text}, {self.line}" if self.line else text


def locate_frames(frames: Sequence[Frame]) -> StepPlace:
    """Return where in the step a stack is: part, module and line. `frames` are innermost first."""
    module = next(filter(None, map(_find_module, frames)), "")
    return StepPlace(_find_part(frames), module, line=_describe_line(frames))


def is_outside_training(frames: Sequence[Frame]) -> bool:
    """Return True if a stack is in start-up, or in the training loop and not in a step of an iteration.

    Building data sets and loading a checkpoint belong to start-up.
    """
    functions = {frame.function for frame in frames}
    is_before_loop = "pretrain" in functions and "train" not in functions
    return is_before_loop or _find_part(frames) in (START_UP, TRAINING_LOOP)


def _find_part(frames: Sequence[Frame]) -> str:
    """Return the part of the training step that a stack is in; empty if unknown.

    Function names decide, unless they only show the training loop or the start of the job. Files decide then.
    """
    functions = set()
    for frame in frames:
        # torch's Module.train only sets a mode.
        sets_mode = frame.function == "train" and "/torch/" in frame.file
        if not sets_mode:
            functions.add(frame.function.rpartition(".")[2])
    parts = [part for part, members in _PARTS if functions & set(members)]
    if parts and parts[0] not in (TRAINING_LOOP, START_UP):
        return parts[0]
    for path, part in _FILES_OF_PARTS:
        if any(path in frame.file for frame in frames):
            return part
    return parts[0] if parts else ""


def _describe_line(frames: Sequence[Frame]) -> str:
    """Return the innermost source line outside of torch and other libraries, and Megatron's line that called it.

    If all lines are in libraries, the innermost line outside of torch is returned. The text is empty if there is
    none.
    """
    frames_outside_torch = [frame for frame in frames if "/torch/" not in frame.file]
    shown_frames = [frame for frame in frames_outside_torch if not _is_of_library(frame.file)]
    shown_frames = shown_frames or frames_outside_torch
    if not shown_frames:
        return ""
    line = _format_line(shown_frames[0])
    if _is_of_megatron(shown_frames[0].file):
        return line
    callers = [frame for frame in shown_frames if _is_of_megatron(frame.file)]
    return f"{line}, called by {_format_line(callers[0])}" if callers else line


def _format_line(frame: Frame) -> str:
    """Return `transformer_layer.py:512 in forward` for a frame."""
    file_name = frame.file.rpartition("/")[2]
    return f"{file_name}:{frame.line} in {frame.function}"


def _is_of_megatron(file: str) -> bool:
    """Return True if a file is of Megatron, installed or as a checkout."""
    return "/megatron/" in file


def _is_of_library(file: str) -> bool:
    """Return True if a file belongs to a library, to Python or to this kit; False for Megatron and the user's code.

    py-spy leaves out the folder of Python's own modules: `/threading.py`, `/multiprocessing/queues.py`.
    """
    if _is_of_megatron(file):
        return False
    first_part, _, other_parts = file.lstrip("/").partition("/")
    if other_parts:
        is_of_python = first_part in _PACKAGES_OF_PYTHON
    else:
        is_of_python = first_part.removesuffix(".py") in sys.stdlib_module_names
    is_built_in = file.startswith("<")
    return is_built_in or is_of_python or any(folder in file for folder in _LIBRARIES)


def locate_call_in_step(
    calls: Sequence[RecordedCall], index: int, stage: StepStage | None
) -> StepPlace:
    """Return the location in the training step of the call at `index` in a rank's calls.

    If `stage` is known, the layer and the micro batch are found by counting calls from the same place in the
    code. Every layer makes equally many such calls in every micro batch, and earlier iterations show how many.
    Layers of backward are counted from the last layer.
    """
    call = calls[index]
    location = locate_frames(call.frames)
    if stage is None or location.part not in (_FORWARD, _BACKWARD):
        return location
    num_calls, most_calls_before = _count_calls_by_iteration(calls, index)
    calls_per_micro_batch = most_calls_before // stage.micro_batches
    modules: list[str] = []
    if location.module.startswith(_MODULES_OF_LAYERS):
        modules = [location.module] * (calls_per_micro_batch or stage.layers)
    elif not location.module:
        group = group_name(call.description)
        modules = _list_modules_of_backward(group, calls_per_micro_batch, stage.layers)
    if not modules:
        return location
    micro_batch, position = divmod(num_calls - 1, len(modules))
    module = modules[position]
    location = replace(location, module=module, micro_batch=micro_batch + 1)
    if module == _OUTPUT:
        return location
    layer_positions = [number for number, name in enumerate(modules) if name != _OUTPUT]
    layer = layer_positions.index(position) * stage.layers // len(layer_positions) + 1
    if location.part == _BACKWARD:
        layer = stage.layers - layer + 1
    return replace(location, layer=layer)


def _count_calls_by_iteration(calls: Sequence[RecordedCall], index: int) -> tuple[int, int]:
    """Return how often the code place of the call at `index` made a call, in this and in earlier iterations.

    The first number counts the calls of the current iteration, up to and including the call at `index`. The
    second number is the largest count of an earlier iteration, or 0 without one. The optimizer's step ends an
    iteration.
    """
    code_place = _find_code_place(calls[index])
    counts = [0]
    for earlier_call in reversed(calls[: index + 1]):
        if _find_code_place(earlier_call) == code_place:
            counts[-1] += 1
        elif counts[-1] and locate_frames(earlier_call.frames).part == _LAST_PART:
            counts.append(0)
    return counts[0], max(counts[1:], default=0)


def _find_code_place(call: RecordedCall) -> tuple[object, ...]:
    """Return a key for the code place of a call: group, operation, and frames up to `forward_step` or `backward_step`.

    Frames further out are left out, because Megatron calls the last micro batch from another line.
    """
    functions = [frame.function for frame in call.frames]
    step_indices = [functions.index(name) for name in _STEP_FUNCTIONS if name in functions]
    return call.description, call.operation, call.frames[: min(step_indices, default=0) + 1]


def _list_modules_of_backward(group: str, num_calls: int, num_layers: int) -> list[str]:
    """Return the module of each call that one code place in backward makes per micro batch, in order.

    The frames of backward name no module. So the usual order in tensor parallelism is returned: first the output layer,
    then the MLP and the attention of each layer. The list is empty if `num_calls` does not fit this order.

    Args:
        group: Megatron's short name of the group, such as `tp`.
        num_calls: Calls per micro batch; 0 if unknown.
        num_layers: Layers of the pipeline stage.
    """
    if group == Group.CONTEXT:
        return ["self_attention"] * (num_calls or 2 * num_layers)
    if group in (Group.EXPERT, Group.TENSOR_EXPERT, Group.EXPERT_TENSOR):
        return ["mlp"] * (num_calls or 2 * num_layers)
    if group != Group.TENSOR or num_calls < num_layers:
        return []
    modules_of_layer = ["self_attention"]
    if num_calls >= 2 * num_layers:
        modules_of_layer = ["mlp", "self_attention"]
    calls_per_module = max(1, num_calls // (len(modules_of_layer) * num_layers))
    calls_of_layer = [module for module in modules_of_layer for _ in range(calls_per_module)]
    calls_of_layers = calls_of_layer * num_layers
    return [_OUTPUT] * (num_calls - len(calls_of_layers)) + calls_of_layers


def _find_module(frame: Frame) -> str:
    """Return the module that a frame computes, by its function, else by its file; empty if unknown."""
    if frame.function in _METHODS:
        return _METHODS[frame.function]
    return next((module for path, module in _MODULES if path in frame.file), "")
