from typing import Any

from megatron_patches import device_mesh, fsdp_in_order, start_weights


def test_meshes_asked_for_on_cuda_are_made_on_the_host() -> None:
    asked: list[Any] = []
    make = device_mesh.PATCH.replacements[0].make
    patched = make(lambda *args, **kwargs: asked.append((args, kwargs))).__func__
    patched("group", "cuda", mesh_dim_names=("dp",))
    patched("group", device_type="cuda")
    assert asked == [(("group", "cpu"), {"mesh_dim_names": ("dp",)}), (("group", "cpu"), {})]


def test_gathers_are_never_left_in_flight() -> None:
    asked: list[bool] = []
    make = fsdp_in_order.PATCH.replacements[0].make
    patched = make(lambda group, device, async_ops: asked.append(async_ops))
    patched("group", async_ops=True)
    patched("group")
    assert asked == [False, False]


def test_weights_are_copied_in_only_where_a_start_is_named(monkeypatch: Any) -> None:
    monkeypatch.delenv(start_weights.VARIABLE, raising=False)
    assert not start_weights.PATCH.needed(None)  # type: ignore[arg-type]
    monkeypatch.setenv(start_weights.VARIABLE, "runs/.start/x")
    assert start_weights.PATCH.needed(None)  # type: ignore[arg-type]
