"""Both FSDPs on CPU ranks: device meshes of the host, and gathers that are finished when issued.

Megatron-FSDP and torch FSDP2 ask for a device mesh on `cuda` by name. With CUDA, a gather left in flight
is ordered by its stream before whatever reads, frees or sends next. gloo's runs in a thread that nothing
orders: beside tensor parallelism a rank once died in that thread, in memory that had been freed. Waiting
where the gather is issued gives the order of a stream. Megatron-FSDP of 0.15 looks flattened meshes up
where torch no longer keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_patches.registry import Patch, Replacement, around, cpu_patch


def _on_cpu(original: Callable[..., Any]) -> staticmethod[..., Any]:
    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return original(group, "cpu", *args, **kwargs)

    return staticmethod(from_group)


@around
def _without_overlap(
    original: Callable[..., Any],
    group: Any = None,
    device: Any = None,
    async_ops: bool = False,  # noqa: ARG001
) -> Any:
    return original(group, device, async_ops=False)


@around
def _with_flattened(_: Callable[..., list[str]], device_mesh: Any = None) -> list[str]:
    if device_mesh is None:
        return []
    flattened = device_mesh._get_root_mesh()._flatten_mapping
    return list(dict.fromkeys((*(device_mesh.mesh_dim_names or ()), *flattened)))


def _keeps_children() -> bool:
    from torch.distributed.device_mesh import _mesh_resources

    return hasattr(_mesh_resources, "child_to_root_mapping")


MESH = cpu_patch(
    "device_mesh",
    "FSDP's device meshes are built for cuda",
    Replacement("torch.distributed:DeviceMesh.from_group", _on_cpu),
)
ORDER = cpu_patch(
    "fsdp_order",
    "gloo orders nothing between a gather in flight and what follows, as CUDA streams do",
    Replacement(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:"
        "_coalescing_manager",
        _without_overlap,
    ),
)
NAMES = Patch(
    name="mesh_names",
    reason="Megatron-FSDP of 0.15 asks torch for the meshes within a mesh by a name that is gone",
    needed=lambda context: (
        context.on_cpu and context.megatron < Version("0.16.0rc0") and not _keeps_children()
    ),
    replacements=(
        Replacement(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.utils:get_mesh_names",
            _with_flattened,
        ),
    ),
)
