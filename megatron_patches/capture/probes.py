"""Hooks on a model's modules that hand every tensor, and its gradient, to a sink.

What a probe is stands in `parakit.capturing.sinks`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import torch

from parakit.artifacts.capture import (
    CALLED_BY,
    LOSS,
    MODEL,
    OF_EACH_TOKEN,
    RECOMPUTED,
    CapturedModule,
    Site,
    Stage,
)
from parakit.capturing import Sink, tap


@dataclass(frozen=True)
class _Call:
    """A call of a module."""

    name: str
    micro_batch: int
    number: int
    """Of the calls in the micro batch by one caller, from 0."""
    caller: str = ""
    """The module that it, or what it is in, is called by and no part of; empty where there is none."""
    recomputed: bool = False


class Probes:
    """Hooks on all modules of all model chunks, for one iteration."""

    def __init__(self, chunks: list[torch.nn.Module], names: list[dict[str, str]], sink: Sink):
        """Hook into `chunks`; `names` gives each module's global name by its own, chunk by chunk."""
        self._sink = sink
        self._micro_batches: Counter[int] = Counter()
        self._micro_batch: dict[int, int] = {}
        self._calls: Counter[tuple[int, str, int, str]] = Counter()
        """Of a chunk's module in a micro batch by a caller; several chunks have a `decoder`."""
        self._running: list[_Call] = []
        """The innermost last."""
        self._to_recompute: dict[str, list[_Call]] = {}
        self._handles: list[Any] = []
        for number, (chunk, names_of_chunk) in enumerate(zip(chunks, names, strict=True)):
            # What is in the middle of a pipeline is no input or output of the whole.
            begins = getattr(chunk, "pre_process", True)
            ends = getattr(chunk, "post_process", True)
            for own, module in chunk.named_modules():
                if getattr(module, "local_experts", None):
                    continue  # Rows of several experts; each expert is a module of its own.
                whole = own in ("", "decoder")
                takes = begins or not whole or (ends and own == "")
                self._hook(module, names_of_chunk[own], number, takes, gives=ends or not whole)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def begin_micro_batch(self, chunk: int) -> int:
        """Note that a chunk's next forward pass begins; its number is returned."""
        number = self._micro_batches[chunk]
        self._micro_batches[chunk] += 1
        self._micro_batch[chunk] = number
        return number

    def _hook(
        self, module: torch.nn.Module, name: str, chunk: int, takes: bool, gives: bool
    ) -> None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        arguments = inspect.signature(module.forward).parameters.values()
        of_arguments = [argument.name for argument in arguments if argument.kind in kinds]

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = self._begin_call(name, chunk)
            self._running.append(call)
            if not takes:
                return args, kwargs
            stage = Stage.INPUTS if name == MODEL else Stage.OUTPUTS
            args = tuple(
                self._probe(value, stage, name, f"input.{key}", call)
                for key, value in zip(chain(of_arguments, count()), args, strict=False)
            )
            kwargs = {
                key: self._probe(value, stage, name, f"input.{key}", call)
                for key, value in kwargs.items()
            }
            return args, kwargs

        def after(_: Any, __: tuple[Any, ...], output: Any) -> Any:
            call = self._running.pop()
            if not gives:
                return output
            if isinstance(output, torch.Tensor):
                if name == MODEL and output.ndim == 2:  # [b, s], not logits [b, s, vocabulary].
                    return self._probe(output, Stage.LOSS, LOSS, OF_EACH_TOKEN, call)
                return self._probe(output, Stage.OUTPUTS, name, "output", call)
            if isinstance(output, (tuple, list)):
                probed = (
                    self._probe(value, Stage.OUTPUTS, name, f"output.{index}", call)
                    for index, value in enumerate(output)
                )
                return type(output)(probed)
            return output

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def _begin_call(self, name: str, chunk: int) -> _Call:
        # -1 outside of a backward pass, where forward passes are recomputed.
        if torch._C._current_graph_task_id() == -1:
            micro_batch, caller = self._micro_batch[chunk], ""
            if self._running:
                around = self._running[-1]
                within = around.name == MODEL or name.startswith(f"{around.name}.")
                caller = around.caller if within else around.name
            # A rank need not have all callers of a module, so each one's calls are counted alone.
            key = (chunk, name, micro_batch, caller)
            call = _Call(name, micro_batch, self._calls[key], caller)
            self._calls[key] += 1
            # Not only where gradients are off: inside of a checkpoint Megatron switches them on.
            self._to_recompute.setdefault(name, []).append(call)
            return call
        # Micro batches of a chunk go backward in the order in which they went forward, and of a
        # module that is recomputed every call is.
        return replace(self._to_recompute[name].pop(0), recomputed=True)

    def _probe(self, value: Any, stage: Stage, name: str, slot: str, call: _Call) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            return value
        slot += CALLED_BY + call.caller if call.caller else ""
        backward, of_call = Stage.ACTIVATION_GRADIENTS, (call.micro_batch, call.number)
        gradient, seen = Site(backward, name, slot, *of_call), Site(stage, name, slot, *of_call)
        if call.recomputed:  # That is a part of the backward pass.
            seen = Site(backward, name, f"{RECOMPUTED}{slot}", *of_call)
        return tap(self._sink, value, [(seen, gradient)])


def global_names(
    chunks: list[torch.nn.Module], layers_before: list[int], experts_before: int
) -> list[dict[str, str]]:
    """Each module's name with the global numbers of layers and experts, by its own, chunk by chunk."""

    def whole(own: str, before: int) -> str:
        parts = own.split(".")
        for index, (parent, number) in enumerate(pairwise(parts), start=1):
            if parent == "layers" and index >= 2 and parts[index - 2] == "decoder":
                parts[index] = str(int(number) + before)
            elif parent == "local_experts":
                parts[index] = str(int(number) + experts_before)
        return ".".join(parts) if own else MODEL

    return [
        {own: whole(own, before) for own, _ in chunk.named_modules()}
        for chunk, before in zip(chunks, layers_before, strict=True)
    ]


def modules_of(
    chunks: list[torch.nn.Module], names: list[dict[str, str]]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module of a rank with its global name."""
    for chunk, names_of_chunk in zip(chunks, names, strict=True):
        for own, module in chunk.named_modules():
            yield names_of_chunk[own], module


def described(module: torch.nn.Module) -> CapturedModule:
    """Its class, and where its forward pass stands."""
    return CapturedModule(type(module).__name__, source_of(type(module).forward))


def source_of(function: Callable[..., Any]) -> str:
    """File and line of a function, from the folder that holds `megatron`; empty if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename)
    for index, part in enumerate(path.parts):
        if part in ("megatron", "megatron_patches", "torch"):
            path = Path(*path.parts[index:])
            break
    return f"{path}:{code.co_firstlineno}"
