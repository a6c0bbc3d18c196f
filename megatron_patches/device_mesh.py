"""Device meshes of CPU ranks: both FSDPs ask for one on `cuda` by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement


def _on_host(original: Callable[..., Any]) -> staticmethod[..., Any]:
    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return original(group, "cpu", *args, **kwargs)

    return staticmethod(from_group)


PATCH = Patch(
    name="device_mesh",
    reason="FSDP's device meshes are built for cuda",
    needed=lambda situation: situation.on_cpu,
    replacements=(Replacement("torch.distributed:DeviceMesh.from_group", _on_host),),
)
