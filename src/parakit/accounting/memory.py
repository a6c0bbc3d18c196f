"""Measure a rank's live bytes by category at their peak, over one warm-up iteration.

Every storage is registered when an operator returns it, and every tensor that autograd stores for backward when
it is stored. The iteration computes the same values but is slower, so its times do not count. On a CPU the bytes
are exact. On a GPU they are the bytes that were requested from the allocator, without rounding and cached
blocks.
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
    """A storage of tensors that is allocated at present, with its size and category."""

    size_bytes: int
    category: MemoryCategory
    resting: MemoryCategory
    """The storage's category while autograd does not store it."""
    handle: weakref.ref[torch.UntypedStorage]
    num_graph_nodes: int = 0
    """The number of nodes of the autograd graph that hold the storage."""


class MemoryAccounting:
    """Measurement of a rank's allocated bytes by category, from `start` to `stop`."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._tracker: _Tracker | None = None
        self.result: RankMemory | None = None
        """The measurement; None before the first `stop`."""

    def start(self, rank: int, iteration: int, models: Any, optimizer: Any) -> None:
        """Start to measure; rank and iteration are those of the result."""
        self._tracker = _Tracker(self._timeline, rank, iteration, list(models), optimizer)

    def note_received(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors in which other ranks' bytes arrive as communication buffers.

        They are activations once autograd stores them for backward. Nothing is done before `start`.
        """
        if self._tracker is not None:
            self._tracker.note_received(tensors)

    def stop(self) -> None:
        """Stop to measure and set the result; do nothing before `start`."""
        if self._tracker is not None:
            self.result, self._tracker = self._tracker.finish(), None


class _Tracker:
    """The allocated storages while an iteration is measured. The constructor installs the hooks."""

    def __init__(
        self, timeline: Timeline, rank: int, iteration: int, models: Any, optimizer: Any
    ) -> None:
        self._timeline, self._models = timeline, models
        self._rank, self._iteration = rank, iteration
        self._modules = _ModulePath(self._models)
        self._live: dict[int, _Storage] = {}
        self._bytes: Counter[MemoryCategory] = Counter()
        self._peak_bytes = 0
        self._bytes_at_peak: Counter[MemoryCategory] = Counter()
        self._peak_phase, self._peak_module = Phase.OTHER, ""
        self._phase_peaks: dict[Phase, int] = {}
        self._activations_by_layer: Counter[str] = Counter()
        self._vocabulary_rows = _find_vocabulary_rows(self._models)
        tensors_by_category = (
            (MemoryCategory.OPTIMIZER_STATE, model_master_weights(models)),
            (MemoryCategory.WEIGHTS, model_weights(models)),
            (MemoryCategory.GRADIENTS, model_gradients(models)),
            (MemoryCategory.OPTIMIZER_STATE, optimizer_tensors(optimizer)),
        )
        for category, tensors in tensors_by_category:
            for tensor in tensors:
                self._register(tensor, category)
        self._stack = ExitStack()
        self._stack.enter_context(self._modules)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._stack.enter_context(hooks)
        self._stack.enter_context(_ResultObserver(self._register_results))

    def finish(self) -> RankMemory:
        """Remove the hooks, and return the measurement of the iteration."""
        self._stack.close()
        return RankMemory(
            rank=self._rank,
            iteration=self._iteration,
            peak_bytes=self._peak_bytes,
            peak_phase=self._peak_phase,
            peak_module=self._peak_module,
            categories={category: self._bytes_at_peak[category] for category in MemoryCategory},
            activations_by_layer=dict(self._activations_by_layer),
            phase_peak_bytes=self._phase_peaks,
            device=_read_device_memory(self._models),
        )

    def note_received(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move storages of the category TEMPORARY to the category COMMUNICATION.

        `tensors` are the tensors in which bytes of other ranks arrive.
        """
        for tensor in tensors:
            storage = self._register(tensor, MemoryCategory.TEMPORARY)
            if storage is not None and storage.category is MemoryCategory.TEMPORARY:
                storage.resting = MemoryCategory.COMMUNICATION
                self._move(storage, storage.resting)
        if sum(self._bytes.values()) == self._peak_bytes:
            # The peak was recorded when the buffer was made, before it was known to be for communication.
            self._bytes_at_peak = Counter(self._bytes)

    def _register_results(self, results: Any) -> None:
        """Register the tensors that an operator returns, then update the peaks."""
        for leaf in tree_leaves(results):
            if isinstance(leaf, torch.Tensor):
                self._register(leaf, MemoryCategory.TEMPORARY)
        self._update_peaks()

    def _register(self, tensor: torch.Tensor, category: MemoryCategory) -> _Storage | None:
        """Return the storage of a tensor. A storage that is not known yet is added with the category `category`.

        A new temporary storage counts as logits if the last dimension of the tensor is the rank's vocabulary.
        None means that the storage is new and has no bytes.
        """
        tensor = _local_tensor(tensor)
        untyped_storage = tensor.untyped_storage()
        key, size_bytes = untyped_storage._cdata, untyped_storage.nbytes()
        storage = self._live.get(key)
        if storage is not None:
            # Megatron frees a stage's output by resizing its storage to nothing.
            self._resize(storage, size_bytes)
        elif size_bytes:
            is_logits = tensor.dim() > 1 and tensor.shape[-1] in self._vocabulary_rows
            if category is MemoryCategory.TEMPORARY and is_logits:
                category = MemoryCategory.LOGITS
            handle = weakref.ref(untyped_storage)
            storage = self._live[key] = _Storage(size_bytes, category, category, handle)
            self._bytes[category] += size_bytes
            weakref.finalize(untyped_storage, self._forget, key)
        return storage

    def _resize(self, storage: _Storage, size_bytes: int) -> None:
        """Set the size of a storage, and count the difference."""
        self._bytes[storage.category] += size_bytes - storage.size_bytes
        storage.size_bytes = size_bytes

    def _update_resized(self) -> None:
        """Read the sizes of all storages anew. FSDP resizes gathered weights in place, without an operator."""
        for storage in list(self._live.values()):
            untyped_storage = storage.handle()
            if untyped_storage is not None:
                self._resize(storage, untyped_storage.nbytes())

    def _forget(self, key: int) -> None:
        """Subtract a storage that was freed."""
        storage = self._live.pop(key, None)
        if storage is not None:
            self._bytes[storage.category] -= storage.size_bytes

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor:
        """Count a tensor that autograd stores for backward as an activation of the layer that computes now.

        Logits stay in their category. Weights, gradients and optimizer states keep theirs and are not counted,
        because they are allocated anyway.
        """
        storage = self._register(tensor, MemoryCategory.TEMPORARY)
        if storage is None or storage.category not in _POSSIBLE_ACTIVATIONS:
            return _SavedTensor(tensor)
        if storage.num_graph_nodes == 0:
            self._activations_by_layer[self._modules.layer] += storage.size_bytes
            if storage.resting is not MemoryCategory.LOGITS:
                self._move(storage, MemoryCategory.ACTIVATIONS)
        storage.num_graph_nodes += 1
        return _SavedTensor(tensor, self, storage)

    def _release(self, storage: _Storage) -> None:
        """Note that a node of the autograd graph was freed; the last one gives the category back."""
        storage.num_graph_nodes -= 1
        if storage.num_graph_nodes == 0:
            self._move(storage, storage.resting)

    def _move(self, storage: _Storage, category: MemoryCategory) -> None:
        """Move a storage to another category."""
        self._bytes[storage.category] -= storage.size_bytes
        storage.category = category
        self._bytes[storage.category] += storage.size_bytes

    def _update_peaks(self) -> None:
        """Raise the peak, and the peak of the present phase, if more bytes are allocated now.

        The sizes of all storages are read again only if a peak could rise, because that takes long.
        """
        live_bytes, phase = sum(self._bytes.values()), self._timeline.phase
        if live_bytes > min(self._peak_bytes, self._phase_peaks.get(phase, 0)):
            self._update_resized()
            live_bytes = sum(self._bytes.values())
        self._phase_peaks[phase] = max(live_bytes, self._phase_peaks.get(phase, 0))
        if live_bytes > self._peak_bytes:
            self._peak_bytes, self._bytes_at_peak = live_bytes, Counter(self._bytes)
            self._peak_phase, self._peak_module = phase, self._modules.current


_POSSIBLE_ACTIVATIONS = (
    MemoryCategory.TEMPORARY,
    MemoryCategory.ACTIVATIONS,
    MemoryCategory.LOGITS,
    MemoryCategory.COMMUNICATION,
)
"""Categories of tensors that live longer because autograd stores them for backward."""


class _SavedTensor:
    """A wrapper of a tensor that the autograd graph stores. The graph frees the wrapper together with the tensor."""

    def __init__(
        self, tensor: torch.Tensor, tracker: _Tracker | None = None, storage: _Storage | None = None
    ) -> None:
        self.tensor = tensor
        if tracker is not None and storage is not None:
            weakref.finalize(self, tracker._release, storage)


def _unpack(saved: _SavedTensor) -> torch.Tensor:
    """Return the tensor that `_pack` stored."""
    return saved.tensor


def _find_vocabulary_rows(models: Iterable[torch.nn.Module]) -> frozenset[int]:
    """Return the numbers of columns that this rank's logits can have.

    These are the numbers of rows of the embedding and of the output layer. FSDP computes with all rows of a
    DTensor, and tensor parallelism computes with the rank's own rows, so both numbers are returned.
    """
    rows = set()
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                rows |= {parameter.shape[0], _local_tensor(parameter).shape[0]}
    return frozenset(rows)


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, whose memory alone is this rank's; else the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _read_device_memory(models: Sequence[torch.nn.Module]) -> DeviceMemory | None:
    """Return the memory that the GPU's allocator and driver report; None if no parameter is on a GPU."""
    parameters = (parameter for model in models for parameter in model.parameters())
    if not any(parameter.device.type == "cuda" for parameter in parameters):
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return DeviceMemory(
        allocated_peak_bytes=torch.cuda.max_memory_allocated(),
        reserved_peak_bytes=torch.cuda.max_memory_reserved(),
        used_bytes=total_bytes - free_bytes,
    )


class _ResultObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode of torch that passes the results of every operator to a callback."""

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
    """The modules whose forward pass is running. Hooks follow them for as long as a `with` block lasts."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._models = tuple(models)
        self._open: list[str] = []
        self._handles: list[Any] = []

    @property
    def current(self) -> str:
        """The name of the innermost module; empty between modules."""
        return self._open[-1] if self._open else ""

    @property
    def layer(self) -> str:
        """The name of the transformer layer whose forward pass is running.

        Outside of layers it is the name of the running module, and outside of modules it is `loss`. The names
        of modules that wrap the model are left out.
        """
        match = _LAYER.match(self.current)
        name = match[0] if match else self.current
        return re.sub(r"^(module(\.|$))+", "", name) or "loss"

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
        """Return a hook that notes that the module's forward begins."""
        return lambda module, arguments: self._open.append(name)

    def _leave(self, *_: Any) -> None:
        """Note that the innermost module's forward has ended."""
        if self._open:
            self._open.pop()
