"""Observes every call that Python makes on a torch process group, and every wait for its result.

torch.distributed's functions all end in a method of the group, also when they were imported early or
coalesced, so the methods are wrapped, once, on the class. Functional collectives go from an operator
straight to C++; the operators are wrapped by name. Calls from C++ alone (DDP's reducer) are not seen.
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

# Method: operation, position of the tensor(s) that count. Names changed over torch 2.8 to 2.15.
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
PROCESS_GROUP_METHODS = tuple(name for name in _METHODS if hasattr(ProcessGroup, name))
"""Every method of a process group, in this torch, that a call ends in."""

# Functional operator: operation; its input is the first argument, its group's name the last.
_FUNCTIONAL = {
    "all_reduce": Operation.ALL_REDUCE,
    "all_reduce_": Operation.ALL_REDUCE,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "all_to_all_single": Operation.ALL_TO_ALL,
    "broadcast": Operation.BROADCAST,
}

# Received bytes arrive in a buffer of its own; with other operations the result replaces a tensor.
_RECEIVING = {
    Operation.ALL_GATHER,
    Operation.REDUCE_SCATTER,
    Operation.ALL_TO_ALL,
    Operation.RECEIVE,
}


class CallWatcher:
    """Reports every call and every wait to a ledger, while it is installed.

    Args:
        ledger: Where calls are kept.
        timeline: The clock, and the phase a call is made in.
        received: Called with the tensors that other ranks' bytes arrive in.
    """

    def __init__(
        self,
        ledger: CommunicationLog,
        timeline: Timeline,
        received: Callable[[Iterable[torch.Tensor]], None] = lambda tensors: None,
    ) -> None:
        self._ledger = ledger
        self._timeline = timeline
        self._received = received
        self.active = True
        """While False, calls are not counted."""
        # Holding the work keeps its Python object, so that its id names it until it is waited for.
        self._pending: dict[int, tuple[Any, ObservedCall]] = {}

    def install(self) -> None:
        """Wrap torch's classes and operators; for the life of the process."""
        for name in PROCESS_GROUP_METHODS:
            setattr(ProcessGroup, name, self._method(name, *_METHODS[name]))
        setattr(Work, "wait", self._wait(Work.wait))  # noqa: B010 - mypy knows it as a method
        functional = torch.ops._c10d_functional
        for name, operation in _FUNCTIONAL.items():
            setattr(functional, name, self._functional(getattr(functional, name), operation))

    def forget_pending(self) -> None:
        """Drop works that were never waited for."""
        self._pending.clear()

    def _method(self, name: str, operation: Operation, position: int) -> Callable[..., Any]:
        original = getattr(ProcessGroup, name)

        @functools.wraps(original, updated=())
        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(group, *args, **kwargs)
            call = self._describe(group, operation, position, args)
            started = self._timeline.clock.now()
            work = original(group, *args, **kwargs)
            watched = self._keep(call, started)
            if work is not None:
                self._pending[id(work)] = (work, watched)
            if operation in _RECEIVING:
                self._received(_tensors(args[0]))
            return work

        return method

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            _, watched = self._pending.pop(id(work), (None, None))
            if watched is None:
                return original(work, *args, **kwargs)
            began = self._timeline.clock.now()
            answer = original(work, *args, **kwargs)
            watched.waits.append((self._timeline.phase, began, self._timeline.clock.now()))
            return answer

        return wait

    def _functional(self, original: Any, operation: Operation) -> _Operator:
        def operator(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return original(tensor, *args, **kwargs)
            group = _resolve_process_group(args[-1])
            whole = group.size() if operation is Operation.ALL_GATHER else 1
            call = self._call(group, operation, [tensor], None, times=whole)
            started = self._timeline.clock.now()
            result = original(tensor, *args, **kwargs)
            self._keep(call, started)
            if operation in _RECEIVING:
                self._received([result])
            return result

        return _Operator(original, operator)

    def _keep(self, call: Call, started: TimeMark) -> ObservedCall:
        watched = ObservedCall(call, started, self._timeline.clock.now())
        self._ledger.observed_calls.append(watched)
        return watched

    def _describe(
        self, group: ProcessGroup, operation: Operation, position: int, args: Sequence[Any]
    ) -> Call:
        tensors = list(_tensors(args[position])) if operation is not Operation.BARRIER else []
        sent = None
        if operation is Operation.ALL_TO_ALL:
            sent = _bytes(tensors) - _own_part(group, tensors, args)
        return self._call(group, operation, tensors, sent)

    def _call(
        self,
        group: ProcessGroup,
        operation: Operation,
        tensors: Sequence[torch.Tensor],
        sent_bytes: int | None,
        times: int = 1,
    ) -> Call:
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
            payload_bytes=times * _bytes(tensors),
            sent_bytes=sent_bytes,
            transport=_transport(group, tensors),
            row_bytes=_row_bytes(tensors[0]) if name in ROUTED_GROUPS and tensors else 0,
        )


class _Operator:
    """A torch operator with another `__call__`; every other attribute is the original's.

    Under a TorchDispatchMode, such as the memory ledger's, torch looks its overloads up by attribute.
    """

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _transport(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> Transport:
    """The library that moves these tensors: a group may have gloo for the CPU and NCCL for the GPU."""
    if not tensors:
        return Transport.NCCL
    backend = group._get_backend(tensors[0].device)
    return Transport.GLOO if backend.name() == Transport.GLOO else Transport.NCCL


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """Tensors of an argument: one, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def _row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one of the rows that a router distributes."""
    return tensor.element_size() * math.prod(tensor.shape[1:])


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _own_part(group: ProcessGroup, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """Bytes of an all-to-all that stay on this rank."""
    rank, ranks = group.rank(), group.size()
    if len(tensors) == ranks and len(tensors) > 1:
        return _bytes([tensors[rank]])
    # A list, or the NumPy array that Megatron copies from the device.
    splits = list(args[3]) if len(args) > 3 and hasattr(args[3], "__len__") else []
    if not splits:
        return _bytes(tensors) // ranks
    rows = max(int(sum(splits)), 1)
    return _bytes(tensors) * int(splits[rank]) // rows
