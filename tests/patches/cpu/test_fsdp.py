from typing import Any

from megatron_patches.cpu import fsdp


def test_meshes_asked_for_on_cuda_are_made_on_the_host() -> None:
    asked: list[Any] = []
    make = fsdp.MESH.replacements[0].make
    patched = make(lambda *args, **kwargs: asked.append((args, kwargs))).__func__
    patched("group", "cuda", mesh_dim_names=("dp",))
    patched("group", device_type="cuda")
    assert asked == [(("group", "cpu"), {"mesh_dim_names": ("dp",)}), (("group", "cpu"), {})]


def test_gathers_are_never_left_in_flight() -> None:
    asked: list[bool] = []
    make = fsdp.ORDER.replacements[0].make
    patched = make(lambda group, device, async_ops: asked.append(async_ops))
    patched("group", async_ops=True)
    patched("group")
    assert asked == [False, False]
