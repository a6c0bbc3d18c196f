"""Set hooks on a model's modules that pass every tensor, and its gradient, to a sink.

`parakit.capturing.sinks` defines sinks and probes.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from parakit.artifacts.capture import (
    CALLER_SEPARATOR,
    LOSS,
    MODEL,
    PER_TOKEN_LOSS,
    RECOMPUTED_PREFIX,
    CapturedModule,
    CaptureStage,
    TensorKey,
)
from parakit.capturing import Sink, tap


@dataclass(frozen=True)
class _Call:
    """One call of a module in a forward pass."""

    name: str
    micro_batch: int
    number: int
    """Number of the call from 0, among the calls of the module by one caller in the micro batch."""
    caller: str = ""
    """The module that makes the call, directly or through modules within, and that does not contain the
    called module; empty if there is none."""
    recomputed: bool = False
    """True if the call repeats a forward pass during backward."""


@dataclass(frozen=True)
class _ProbedModule:
    """A module with hooks, and which of its tensors are captured."""

    name: str
    """Global name of the module."""
    chunk: int
    """Number of the model chunk that the module is in."""
    parameter_names: tuple[str, ...]
    """Names of the parameters of its forward method to which positional arguments go."""
    takes: bool
    """True if the module's inputs are captured."""
    gives: bool
    """True if the module's outputs are captured."""


class Probes:
    """The hooks on all modules of all model chunks, for one iteration.

    A module goes on with the values that the hooks return, which may replace the captured ones.
    """

    def __init__(self, chunks: list[torch.nn.Module], names: list[dict[str, str]], sink: Sink):
        """Set the hooks.

        Args:
            chunks: Chunks of the model.
            names: One dictionary per chunk: each module's global name by its name in the chunk.
            sink: Takes the tensors and their gradients.
        """
        self._sink = sink
        self._num_micro_batches: Counter[int] = Counter()
        """Number of micro batches that have begun, by chunk."""
        self._micro_batch: dict[int, int] = {}
        """Number of the current micro batch, by chunk."""
        self._num_calls: Counter[tuple[int, str, int, str]] = Counter()
        """Number of calls by chunk, module, micro batch and caller. The chunk is part of the key because
        several chunks have a `decoder`."""
        self._running: list[_Call] = []
        """Calls that have not returned, the innermost last."""
        self._to_recompute: dict[str, list[_Call]] = {}
        """Calls that backward may repeat, in the order of the forward passes, by module."""
        self._handles: list[Any] = []
        for number, (chunk, names_of_chunk) in enumerate(zip(chunks, names, strict=True)):
            # Tensors between pipeline stages are no inputs or outputs of the full model or decoder.
            is_first = getattr(chunk, "pre_process", True)
            is_last = getattr(chunk, "post_process", True)
            for name, module in chunk.named_modules():
                if getattr(module, "local_experts", None):
                    # Its tensors have rows of several experts. Each expert is a module with hooks.
                    continue
                is_model, is_within = name == "", name not in ("", "decoder")
                self._hook(
                    module,
                    _ProbedModule(
                        name=names_of_chunk[name],
                        chunk=number,
                        parameter_names=_list_positional_parameters(module.forward),
                        # The last stage takes the labels, which are inputs of the model.
                        takes=is_within or is_first or (is_model and is_last),
                        gives=is_within or is_last,
                    ),
                )

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()

    def begin_micro_batch(self, chunk: int) -> int:
        """Begin the next micro batch of a chunk and return its number from 0."""
        number = self._num_micro_batches[chunk]
        self._num_micro_batches[chunk] += 1
        self._micro_batch[chunk] = number
        return number

    def _hook(self, module: torch.nn.Module, probed: _ProbedModule) -> None:
        """Add hooks to a module that capture its inputs before, and its outputs after, each forward pass."""
        before, after = partial(self._before_forward, probed), partial(self._after_forward, probed)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def _before_forward(
        self,
        probed: _ProbedModule,
        _: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a call of a module and capture its inputs; return the arguments with which the module goes on."""
        call = self._begin_call(probed.name, probed.chunk)
        self._running.append(call)
        if not probed.takes:
            return args, kwargs
        # Only the model's inputs are inputs of the run. Other modules take what modules before them computed.
        stage = CaptureStage.INPUTS if probed.name == MODEL else CaptureStage.OUTPUTS
        # Arguments beyond the named parameters are numbered.
        slots = chain(probed.parameter_names, count())
        probed_args = tuple(
            self._probe(value, stage, probed.name, f"input.{slot}", call)
            for slot, value in zip(slots, args, strict=False)
        )
        probed_kwargs = {
            key: self._probe(value, stage, probed.name, f"input.{key}", call)
            for key, value in kwargs.items()
        }
        return probed_args, probed_kwargs

    def _after_forward(
        self, probed: _ProbedModule, _: torch.nn.Module, __: tuple[Any, ...], output: Any
    ) -> Any:
        """End a call of a module and capture its outputs; return the output with which the caller goes on."""
        call = self._running.pop()
        if not probed.gives:
            return output
        if isinstance(output, torch.Tensor):
            if probed.name == MODEL and output.ndim == 2:
                # The model returned losses [b, s] and not logits [b, s, vocabulary].
                return self._probe(output, CaptureStage.LOSS, LOSS, PER_TOKEN_LOSS, call)
            return self._probe(output, CaptureStage.OUTPUTS, probed.name, "output", call)
        if isinstance(output, (tuple, list)):
            probed_values = (
                self._probe(value, CaptureStage.OUTPUTS, probed.name, f"output.{index}", call)
                for index, value in enumerate(output)
            )
            return type(output)(probed_values)
        return output

    def _begin_call(self, name: str, chunk: int) -> _Call:
        """Return the description of the call of module `name` that begins now.

        A call within a backward pass recomputes an earlier call. It gets that call's micro batch and number.
        """
        if is_in_backward():
            # A chunk's micro batches run backward in the order of their forward passes, and if a module is
            # recomputed, then every call of it is.
            return replace(self._to_recompute[name].pop(0), recomputed=True)
        micro_batch, caller = self._micro_batch[chunk], ""
        if self._running:
            outer = self._running[-1]
            is_within = outer.name == MODEL or name.startswith(f"{outer.name}.")
            caller = outer.caller if is_within else outer.name
        # A rank may lack some callers of a module. Calls are counted per caller, so that their numbers are
        # the same on every rank.
        key = (chunk, name, micro_batch, caller)
        call = _Call(name, micro_batch, self._num_calls[key], caller)
        self._num_calls[key] += 1
        # Whether gradients are on does not tell whether the call will be recomputed: Megatron switches them
        # on inside of a checkpoint.
        self._to_recompute.setdefault(name, []).append(call)
        return call

    def _probe(self, value: Any, stage: CaptureStage, name: str, slot: str, call: _Call) -> Any:
        """Capture an input or output of a module, and return the value that the module must use in its place.

        An activation is returned with a tap. The tap captures the value in the forward pass and its gradient in the
        backward pass, and may replace both. A parameter that a module returns, such as the bias of a row-parallel
        linear, is captured without a gradient. Parameters that a module takes and values that are no tensors are
        not captured.

        Args:
            value: The input or output.
            stage: Stage under which the value is captured.
            name: Global name of the module.
            slot: Name of the input or output, such as `input.hidden_states`.
            call: Call of the module in progress.
        """
        if not isinstance(value, torch.Tensor):
            return value
        is_parameter = isinstance(value, torch.nn.Parameter)
        if is_parameter and not slot.startswith("output"):
            return value
        if call.caller:
            slot = f"{slot}{CALLER_SEPARATOR}{call.caller}"
        backward, position = CaptureStage.ACTIVATION_GRADIENTS, (call.micro_batch, call.number)
        if call.recomputed:
            # A recomputed value belongs to the backward pass.
            value_key = TensorKey(backward, name, f"{RECOMPUTED_PREFIX}{slot}", *position)
        else:
            value_key = TensorKey(stage, name, slot, *position)
        if is_parameter:
            self._sink.forward(value_key, value.detach())
            return value
        gradient_key = TensorKey(backward, name, slot, *position)
        return tap(self._sink, value, [(value_key, gradient_key)])


def is_in_backward() -> bool:
    """Return True inside of a backward pass, where forward passes are recomputed."""
    # Outside of a backward pass the id of autograd's task is -1.
    return torch._C._current_graph_task_id() != -1


def _list_positional_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters to which positional arguments go, without `*args`."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in positional)


def global_names(
    chunks: list[torch.nn.Module], layers_before: list[int], experts_before: int
) -> list[dict[str, str]]:
    """Return each module's name with the global numbers of layers and experts.

    Args:
        chunks: Chunks of the model on this rank.
        layers_before: Number of layers before each chunk, in other chunks and on other ranks.
        experts_before: Number of experts on the ranks before this one.

    Returns:
        One dictionary per chunk, with the global names by the names in the chunk.
    """
    names_by_chunk = []
    for chunk, layers_before_chunk in zip(chunks, layers_before, strict=True):
        names_by_chunk.append(
            {
                name: _number_globally(name, layers_before_chunk, experts_before)
                for name, _ in chunk.named_modules()
            }
        )
    return names_by_chunk


def _number_globally(name: str, layers_before: int, experts_before: int) -> str:
    """Return a module's name in its chunk with global numbers; MODEL for the empty name of the chunk itself.

    Only the decoder's layers are split over chunks. Layers of MTP keep their numbers.
    """
    if not name:
        return MODEL
    parts = name.split(".")
    global_parts = list(parts)
    for index in range(1, len(parts)):
        # A number follows the name of the list that the module is in.
        if parts[max(0, index - 2) : index] == ["decoder", "layers"]:
            global_parts[index] = str(int(parts[index]) + layers_before)
        elif parts[index - 1] == "local_experts":
            global_parts[index] = str(int(parts[index]) + experts_before)
    return ".".join(global_parts)


def list_modules(
    chunks: list[torch.nn.Module], names: list[dict[str, str]]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module of a rank with its global name; `names` are those of `global_names`."""
    for chunk, names_of_chunk in zip(chunks, names, strict=True):
        for name, module in chunk.named_modules():
            yield names_of_chunk[name], module


def describe_module(module: torch.nn.Module) -> CapturedModule:
    """Return the module's class, and file and line of its forward method."""
    return CapturedModule(type(module).__name__, locate_function(type(module).forward))


def locate_function(function: Callable[..., Any]) -> str:
    """Return file and line of a function; empty for a function without Python code.

    The path begins at the folder `megatron`, `megatron_patches` or `torch`; other paths are absolute.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename)
    for index, part in enumerate(path.parts):
        if part in ("megatron", "megatron_patches", "torch"):
            path = Path(*path.parts[index:])
            break
    return f"{path}:{code.co_firstlineno}"
