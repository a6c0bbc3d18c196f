"""Let Megatron-FSDP and torch FSDP2 run on CPU ranks.

`MESH` replaces `DeviceMesh.from_group` and builds device meshes for the CPU. Both FSDPs name `cuda`;
without the patch, torch would refuse the mesh, because gloo has no CUDA tensors.

`ORDER` replaces `_coalescing_manager` of Megatron-FSDP and waits for each gather where it is issued. With
CUDA, a stream orders a gather in flight before whatever reads, frees or sends its memory next. gloo's
gather runs in a thread that nothing orders. Without the patch, a rank with tensor parallelism once died
in that thread, in memory that had been freed.

`NAMES` replaces `get_mesh_names` of Megatron-FSDP 0.15, which looks for flattened meshes where newer
versions of torch no longer keep them. Without the patch, Megatron-FSDP 0.15 would fail with these torches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_patches.registry import Patch, Replacement, cpu_patch, wrap_original


def _build_on_cpu(original: Callable[..., Any]) -> staticmethod[..., Any]:
    """Return a `DeviceMesh.from_group` that builds every mesh for the CPU."""

    @functools.wraps(original)
    def build_from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return original(group, "cpu", *args, **kwargs)

    return staticmethod(build_from_group)


@wrap_original
def _wait_at_once(
    original: Callable[..., Any],
    group: Any = None,
    device: Any = None,
    async_ops: bool = False,  # noqa: ARG001
) -> Any:
    """Open `_coalescing_manager` with synchronous operations, whatever the caller asks for."""
    return original(group, device, async_ops=False)


@wrap_original
def _list_mesh_names(_: Callable[..., list[str]], device_mesh: Any = None) -> list[str]:
    """Return the names of the mesh's dimensions and of its flattened meshes; none for None."""
    if device_mesh is None:
        return []
    dimensions = device_mesh.mesh_dim_names or ()
    flattened_meshes = device_mesh._get_root_mesh()._flatten_mapping
    # A dictionary keeps each name once, in the order in which it came.
    return list(dict.fromkeys((*dimensions, *flattened_meshes)))


def _has_child_meshes() -> bool:
    """Return True if this torch keeps the meshes within a mesh where Megatron-FSDP 0.15 looks."""
    from torch.distributed.device_mesh import _mesh_resources

    return hasattr(_mesh_resources, "child_to_root_mapping")


MESH = cpu_patch(
    "device_mesh",
    "FSDP's device meshes are built for cuda",
    Replacement("torch.distributed:DeviceMesh.from_group", _build_on_cpu),
)
ORDER = cpu_patch(
    "fsdp_order",
    "gloo orders nothing between a gather in flight and what follows, as CUDA streams do",
    Replacement(
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:"
        "_coalescing_manager",
        _wait_at_once,
    ),
)
NAMES = Patch(
    name="mesh_names",
    reason="Megatron-FSDP of 0.15 asks torch for the meshes within a mesh by a name that is gone",
    needed=lambda context: (
        context.on_cpu and context.megatron < Version("0.16.0rc0") and not _has_child_meshes()
    ),
    replacements=(
        Replacement(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.utils:get_mesh_names",
            _list_mesh_names,
        ),
    ),
)
