"""Both FSDPs on CPU ranks: device meshes of the host, and gathers that are finished when issued.

Megatron-FSDP and torch FSDP2 ask for a device mesh on `cuda` by name. With CUDA, a gather left in flight
is ordered by its stream before whatever reads, frees or sends next. gloo's runs in a thread that nothing
orders: beside tensor parallelism a rank once died in that thread, in memory that had been freed. Waiting
where the gather is issued gives the order of a stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement


def _on_cpu(original: Callable[..., Any]) -> staticmethod[..., Any]:
    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return original(group, "cpu", *args, **kwargs)

    return staticmethod(from_group)


def _without_overlap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Any:  # noqa: ARG001
        return original(group, device, async_ops=False)

    return manager


MESH = Patch(
    name="device_mesh",
    reason="FSDP's device meshes are built for cuda",
    needed=lambda context: context.on_cpu,
    replacements=(Replacement("torch.distributed:DeviceMesh.from_group", _on_cpu),),
)
ORDER = Patch(
    name="fsdp_order",
    reason="gloo orders nothing between a gather in flight and what follows, as CUDA streams do",
    needed=lambda context: context.on_cpu,
    replacements=(
        Replacement(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:"
            "_coalescing_manager",
            _without_overlap,
        ),
    ),
)
