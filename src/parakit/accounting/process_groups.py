"""Observe every call that Python makes on a torch process group, and every wait for its result.

All functions of torch.distributed end in a method of the process group, also those that were imported early or
are coalesced. So the methods are wrapped, once, on the class. Functional collectives go from an operator
straight to C++, so the operators are wrapped by name. Calls that C++ makes without Python, such as those of
DDP's reducer, are not observed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup, Work

from parakit.accounting.communication import Call, CommunicationLog, ObservedCall
from parakit.accounting.timeline import Timeline, TimeMark
from parakit.artifacts.measurements import ROUTED_GROUPS
from parakit.config.groups import Group, group_name
from parakit.config.run import Transport
from parakit.costs import Operation, Phase

_METHODS = {
    "allreduce": (Operation.ALL_REDUCE, 0),
    "allreduce_coalesced": (Operation.ALL_REDUCE, 0),
    "allgather": (Operation.ALL_GATHER, 0),
    "_allgather_base": (Operation.ALL_GATHER, 0),
    "all_gather_single": (Operation.ALL_GATHER, 0),
    "allgather_coalesced": (Operation.ALL_GATHER, 0),
    "allgather_into_tensor_coalesced": (Operation.ALL_GATHER, 0),
    "all_gather_single_coalesced": (Operation.ALL_GATHER, 0),
    "reduce_scatter": (Operation.REDUCE_SCATTER, 1),
    "_reduce_scatter_base": (Operation.REDUCE_SCATTER, 1),
    "reduce_scatter_single": (Operation.REDUCE_SCATTER, 1),
    "reduce_scatter_tensor_coalesced": (Operation.REDUCE_SCATTER, 1),
    "reduce_scatter_single_coalesced": (Operation.REDUCE_SCATTER, 1),
    "alltoall": (Operation.ALL_TO_ALL, 1),
    "alltoall_base": (Operation.ALL_TO_ALL, 1),
    "all_to_all_single": (Operation.ALL_TO_ALL, 1),
    "broadcast": (Operation.BROADCAST, 0),
    "reduce": (Operation.REDUCE, 0),
    "gather": (Operation.GATHER, 0),
    "scatter": (Operation.SCATTER, 1),
    "send": (Operation.SEND, 0),
    "recv": (Operation.RECEIVE, 0),
    "recv_anysource": (Operation.RECEIVE, 0),
    "barrier": (Operation.BARRIER, 0),
}
"""Operation, and position of the tensors whose bytes count, by method name. Names changed over torch 2.8 to 2.15."""

PROCESS_GROUP_METHODS = tuple(name for name in _METHODS if hasattr(ProcessGroup, name))
"""The methods of a process group that calls end in and that this version of torch has."""

_FUNCTIONAL = {
    "all_reduce": Operation.ALL_REDUCE,
    "all_reduce_": Operation.ALL_REDUCE,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "all_to_all_single": Operation.ALL_TO_ALL,
    "broadcast": Operation.BROADCAST,
}
"""Operation by functional operator. The input is the first argument, the group's name the last."""

_RECEIVING = {
    Operation.ALL_GATHER,
    Operation.REDUCE_SCATTER,
    Operation.ALL_TO_ALL,
    Operation.RECEIVE,
}
"""Operations whose received bytes arrive in a buffer of their own. The results of others replace a tensor."""


class CallWatcher:
    """An observer that, once installed, adds the communication calls of a process to a log, and the waits for them.

    Args:
        log: The log of calls.
        timeline: The clock, and the phase in which a call is made.
        on_received: Called with the tensors in which bytes of other ranks arrive.
    """

    def __init__(
        self,
        log: CommunicationLog,
        timeline: Timeline,
        on_received: Callable[[Iterable[torch.Tensor]], None] = lambda tensors: None,
    ) -> None:
        self._log = log
        self._timeline = timeline
        self._on_received = on_received
        self.active = True
        """While False, calls are not counted."""
        # The work object is stored with its call. Otherwise Python could give its id to another object
        # before somebody waits for it.
        self._pending: dict[int, tuple[Any, ObservedCall]] = {}

    def install(self) -> None:
        """Wrap torch's methods and operators for the life of the process, so that calls and waits are recorded."""
        for name in PROCESS_GROUP_METHODS:
            setattr(ProcessGroup, name, self._wrap_method(name, *_METHODS[name]))
        setattr(Work, "wait", self._wrap_wait(Work.wait))  # noqa: B010 - mypy knows it as a method
        functional = torch.ops._c10d_functional
        for name, operation in _FUNCTIONAL.items():
            original = getattr(functional, name)
            setattr(functional, name, self._wrap_functional(original, operation))

    def forget_pending(self) -> None:
        """Drop the calls that nobody has waited for."""
        self._pending.clear()

    def _wrap_method(self, name: str, operation: Operation, position: int) -> Callable[..., Any]:
        """Return a method that records the call and calls torch's method of the same name.

        While the watcher is not active, nothing is recorded.

        Args: name: The name of the method of ProcessGroup. operation: The operation that the method does.
        position: The index of the argument whose bytes are counted.
        """
        original = getattr(ProcessGroup, name)

        @functools.wraps(original, updated=())
        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(group, *args, **kwargs)
            call = self._describe_method_call(group, operation, position, args)
            started = self._timeline.clock.now()
            work = original(group, *args, **kwargs)
            observed = self._record(call, started)
            if work is not None:
                self._pending[id(work)] = (work, observed)
            if operation in _RECEIVING:
                self._on_received(_flatten_tensors(args[0]))
            return work

        return method

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `Work.wait` that also adds the wait to its recorded call. Waits for other calls are not recorded."""

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            _, observed = self._pending.pop(id(work), (None, None))
            if observed is None:
                return original(work, *args, **kwargs)
            start = self._timeline.clock.now()
            result = original(work, *args, **kwargs)
            observed.waits.append((self._timeline.phase, start, self._timeline.clock.now()))
            return result

        return wait

    def _wrap_functional(self, original: Any, operation: Operation) -> _Operator:
        """Return a functional collective that records the call and calls torch's operator."""

        def call_operator(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(tensor, *args, **kwargs)
            group = _resolve_process_group(args[-1])
            # The input of an all-gather is one of as many shards as there are ranks.
            num_shards = group.size() if operation is Operation.ALL_GATHER else 1
            call = self._describe_call(group, operation, [tensor], None, num_shards=num_shards)
            started = self._timeline.clock.now()
            result = original(tensor, *args, **kwargs)
            self._record(call, started)
            if operation in _RECEIVING:
                self._on_received([result])
            return result

        return _Operator(original, call_operator)

    def _record(self, call: Call, started: TimeMark) -> ObservedCall:
        """Add a call that has just returned to the log, and return its entry."""
        observed = ObservedCall(call, started, self._timeline.clock.now())
        self._log.observed_calls.append(observed)
        return observed

    def _describe_method_call(
        self, group: ProcessGroup, operation: Operation, position: int, args: Sequence[Any]
    ) -> Call:
        """Describe the call of a method. The argument at `position` has the tensors; a barrier has no tensors."""
        is_barrier = operation is Operation.BARRIER
        tensors = [] if is_barrier else list(_flatten_tensors(args[position]))
        sent_bytes = None
        if operation is Operation.ALL_TO_ALL:
            sent_bytes = _count_bytes(tensors) - _count_local_bytes(group, tensors, args)
        return self._describe_call(group, operation, tensors, sent_bytes)

    def _describe_call(
        self,
        group: ProcessGroup,
        operation: Operation,
        tensors: Sequence[torch.Tensor],
        sent_bytes: int | None,
        num_shards: int = 1,
    ) -> Call:
        """Describe a call in the present phase.

        Args:
            group: The process group.
            operation: What the call does.
            tensors: The tensors whose bytes are counted.
            sent_bytes: Bytes that this rank sends; None if they follow from the operation and the tensors.
            num_shards: Number of shards of the full tensor, if the tensors are one shard of it; else 1.
        """
        phase = self._timeline.phase
        name = group_name(group.group_desc)
        if phase is Phase.PIPELINE:
            # With two stages Megatron sends one direction over the default group.
            name = Group.PIPELINE
        return Call(
            group=name,
            ranks=group.size(),
            operation=operation,
            phase=phase,
            dtype=_dtype_name(tensors[0].dtype) if tensors else "",
            payload_bytes=num_shards * _count_bytes(tensors),
            sent_bytes=sent_bytes,
            transport=_find_transport(group, tensors),
            row_bytes=_bytes_per_row(tensors[0]) if name in ROUTED_GROUPS and tensors else 0,
        )


class _Operator:
    """A torch operator with another `__call__`. All other attributes are looked up in the original.

    They are needed because under a TorchDispatchMode, as `MemoryAccounting` uses it, torch looks up the
    operator's overloads by attribute.
    """

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _find_transport(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> Transport:
    """Return the library that communicates the tensors, gloo or NCCL; NCCL if there are no tensors.

    A group may have gloo for tensors of the CPU and NCCL for those of the GPU.
    """
    if not tensors:
        return Transport.NCCL
    backend = group._get_backend(tensors[0].device)
    return Transport.GLOO if backend.name() == Transport.GLOO else Transport.NCCL


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _flatten_tensors(value: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors of an argument, which is a tensor, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _flatten_tensors(item)


def _bytes_per_row(tensor: torch.Tensor) -> int:
    """Return the bytes of one index of the first dimension: a row that a router sends to an expert."""
    return tensor.element_size() * math.prod(tensor.shape[1:])


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _count_local_bytes(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], args: Sequence[Any]
) -> int:
    """Return the bytes of an all-to-all that stay on this rank.

    Args:
        group: The process group.
        tensors: One tensor per rank, or one tensor for all ranks.
        args: The method's arguments. The fourth is the list of rows per rank of a single tensor; if it is
            missing or empty, the ranks get equal shares.
    """
    rank, ranks = group.rank(), group.size()
    if len(tensors) == ranks and len(tensors) > 1:
        return _count_bytes([tensors[rank]])
    # Megatron passes a NumPy array that was copied from the device, others pass a list.
    has_splits = len(args) > 3 and hasattr(args[3], "__len__")
    splits = list(args[3]) if has_splits else []
    if not splits:
        return _count_bytes(tensors) // ranks
    rows = max(int(sum(splits)), 1)
    return _count_bytes(tensors) * int(splits[rank]) // rows
