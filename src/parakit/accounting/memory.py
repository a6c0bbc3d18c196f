"""A rank's live bytes by category at their peak, measured over one warm-up iteration.

Every storage is registered where operators are dispatched, every tensor that autograd keeps where it is
packed. The iteration computes the same and is slower, so it is not one of the timed ones. On a CPU this
is exact; on a GPU it is what was requested of the allocator, without rounding and cached blocks.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parakit.accounting.model_state import (
    model_gradients,
    model_master_weights,
    model_weights,
    optimizer_tensors,
)
from parakit.accounting.timeline import Timeline
from parakit.artifacts.measurements import DeviceMemory, MemoryCategory, RankMemory
from parakit.costs import Phase


@dataclass
class _Storage:
    size: int
    category: MemoryCategory
    resting: MemoryCategory
    """Its category while autograd does not keep it."""
    handle: weakref.ref[torch.UntypedStorage]
    keepers: int = 0
    """Nodes of the autograd graph that hold it."""


class MemoryAccounting:
    """Follows live bytes by category from `start` to `stop`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._tracker: _Tracker | None = None
        self.result: RankMemory | None = None

    def start(self, rank: int, iteration: int, models: Any, optimizer: Any) -> None:
        """Follow from here on."""
        self._tracker = _Tracker(self._timeline, rank, iteration, list(models), optimizer)

    def note_received(self, tensors: Iterable[torch.Tensor]) -> None:
        """Other ranks' bytes arrive in these: communication buffers, until autograd keeps them."""
        if self._tracker is not None:
            self._tracker.note_received(tensors)

    def stop(self) -> None:
        """Stop following and keep the result; nothing if it was not started."""
        if self._tracker is not None:
            self.result, self._tracker = self._tracker.finish(), None


class _Tracker:
    def __init__(
        self, timeline: Timeline, rank: int, iteration: int, models: Any, optimizer: Any
    ) -> None:
        self._timeline, self._models = timeline, models
        self._rank, self._iteration = rank, iteration
        self._modules = _ModulePath(self._models)
        self._live: dict[int, _Storage] = {}
        self._bytes: Counter[MemoryCategory] = Counter()
        self._peak = 0
        self._at_peak: Counter[MemoryCategory] = Counter()
        self._peak_phase, self._peak_module = Phase.OTHER, ""
        self._phase_peaks: dict[Phase, int] = {}
        self._kept_by_layer: Counter[str] = Counter()
        # Columns that this rank's logits may have: rows of its output layer, or of the embedding it is
        # tied to. FSDP computes with all of a DTensor's rows, tensor parallelism with the rank's own.
        self._vocabulary = frozenset(
            rows
            for model in self._models
            for name, parameter in model.named_parameters()
            if name.endswith(("word_embeddings.weight", "output_layer.weight"))
            for rows in (parameter.shape[0], _local(parameter).shape[0])
        )
        for category, tensors in (
            (MemoryCategory.OPTIMIZER_STATE, model_master_weights(models)),
            (MemoryCategory.WEIGHTS, model_weights(models)),
            (MemoryCategory.GRADIENTS, model_gradients(models)),
            (MemoryCategory.OPTIMIZER_STATE, optimizer_tensors(optimizer)),
        ):
            for tensor in tensors:
                self._register(tensor, category)
        self._stack = ExitStack()
        self._stack.enter_context(self._modules)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        self._stack.enter_context(_EveryResult(self._register_results))

    def finish(self) -> RankMemory:
        self._stack.close()
        return RankMemory(
            rank=self._rank,
            iteration=self._iteration,
            peak_bytes=self._peak,
            peak_phase=self._peak_phase,
            peak_module=self._peak_module,
            categories={category: self._at_peak[category] for category in MemoryCategory},
            activations_by_layer=dict(self._kept_by_layer),
            phase_peak_bytes=self._phase_peaks,
            device=_device_memory(self._models),
        )

    def note_received(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = self._register(tensor, MemoryCategory.TEMPORARY)
            if storage is not None and storage.category is MemoryCategory.TEMPORARY:
                storage.resting = MemoryCategory.COMMUNICATION
                self._move(storage, storage.resting)
        if sum(self._bytes.values()) == self._peak:
            # The peak was recorded when the buffer was made, before its use was known.
            self._at_peak = Counter(self._bytes)

    def _register_results(self, results: Any) -> None:
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self._register(leaf, MemoryCategory.TEMPORARY)
        self._note_peak()

    def _register(self, tensor: torch.Tensor, category: MemoryCategory) -> _Storage | None:
        tensor = _local(tensor)
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is None and size:
            is_logits = tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary
            if category is MemoryCategory.TEMPORARY and is_logits:
                category = MemoryCategory.LOGITS
            known = self._live[key] = _Storage(size, category, category, weakref.ref(storage))
            self._bytes[category] += size
            weakref.finalize(storage, self._forget, key)
        elif known is not None:
            # Megatron frees a stage's output by resizing its storage to nothing.
            self._resize(known, size)
        return known

    def _resize(self, known: _Storage, size: int) -> None:
        self._bytes[known.category] += size - known.size
        known.size = size

    def _update_resized(self) -> None:
        """Find storages that were resized in place without an operator, as FSDP's gathered weights."""
        for known in list(self._live.values()):
            storage = known.handle()
            if storage is not None:
                self._resize(known, storage.nbytes())

    def _forget(self, key: int) -> None:
        storage = self._live.pop(key, None)
        if storage is not None:
            self._bytes[storage.category] -= storage.size

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        storage = self._register(tensor, MemoryCategory.TEMPORARY)
        if storage is None or storage.category not in _MAY_BE_KEPT:
            return _Kept(tensor)
        if storage.keepers == 0:
            self._kept_by_layer[self._modules.layer] += storage.size
            if storage.resting is not MemoryCategory.LOGITS:
                self._move(storage, MemoryCategory.ACTIVATIONS)
        storage.keepers += 1
        return _Kept(tensor, self, storage)

    def _release(self, storage: _Storage) -> None:
        storage.keepers -= 1
        if storage.keepers == 0:
            self._move(storage, storage.resting)

    def _move(self, storage: _Storage, category: MemoryCategory) -> None:
        self._bytes[storage.category] -= storage.size
        storage.category = category
        self._bytes[storage.category] += storage.size

    def _note_peak(self) -> None:
        total, phase = sum(self._bytes.values()), self._timeline.phase
        if total > min(self._peak, self._phase_peaks.get(phase, 0)):
            self._update_resized()
            total = sum(self._bytes.values())
        self._phase_peaks[phase] = max(total, self._phase_peaks.get(phase, 0))
        if total > self._peak:
            self._peak, self._at_peak = total, Counter(self._bytes)
            self._peak_phase, self._peak_module = phase, self._modules.current


_MAY_BE_KEPT = (
    MemoryCategory.TEMPORARY,
    MemoryCategory.ACTIVATIONS,
    MemoryCategory.LOGITS,
    MemoryCategory.COMMUNICATION,
)


class _Kept:
    """A tensor in the autograd graph; the graph frees it together with this object."""

    def __init__(
        self, tensor: torch.Tensor, tracker: _Tracker | None = None, storage: _Storage | None = None
    ) -> None:
        self.tensor = tensor
        if tracker is not None and storage is not None:
            weakref.finalize(self, tracker._release, storage)


def _unpack(kept: _Kept) -> torch.Tensor:
    return kept.tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part: a DTensor's shape is the whole, its memory the local part alone."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _device_memory(models: Sequence[torch.nn.Module]) -> DeviceMemory | None:
    if all(p.device.type != "cuda" for model in models for p in model.parameters()):
        return None
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(
        allocated_peak_bytes=torch.cuda.max_memory_allocated(),
        reserved_peak_bytes=torch.cuda.max_memory_reserved(),
        used_bytes=total - free,
    )


class _EveryResult(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, callback: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._callback = callback

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self._callback(results)
        return results


_LAYER = re.compile(r"(?:.*\.)?layers\.\d+")


class _ModulePath:
    """The modules that are in their forward, through hooks that last as long as a `with` block."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._models = tuple(models)
        self._open: list[str] = []
        self._handles: list[Any] = []

    @property
    def current(self) -> str:
        """The innermost module's name, or nothing between modules."""
        return self._open[-1] if self._open else ""

    @property
    def layer(self) -> str:
        """The transformer layer that is computing, else the module; `loss` outside of both."""
        match = _LAYER.match(self.current)
        name = match[0] if match else self.current
        return re.sub(r"^(module(\.|$))+", "", name) or "loss"  # Without wrappers around the model.

    def __enter__(self) -> Self:
        for model in self._models:
            for name, module in model.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._enter(name)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        return lambda module, arguments: self._open.append(name)

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop()
