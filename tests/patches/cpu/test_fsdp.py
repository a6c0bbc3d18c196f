from typing import Any

from megatron_patches.cpu import fsdp


def test_device_meshes_for_cuda_are_created_on_the_host() -> None:
    asked: list[Any] = []
    make = fsdp.MESH.replacements[0].make
    patched = make(lambda *args, **kwargs: asked.append((args, kwargs))).__func__
    patched("group", "cuda", mesh_dim_names=("dp",))
    patched("group", device_type="cuda")
    assert asked == [(("group", "cpu"), {"mesh_dim_names": ("dp",)}), (("group", "cpu"), {})]


def test_gathers_are_never_asynchronous() -> None:
    asked: list[bool] = []
    make = fsdp.ORDER.replacements[0].make
    patched = make(lambda group, device, async_ops: asked.append(async_ops))
    patched("group", async_ops=True)
    patched("group")
    assert asked == [False, False]


class Mesh:
    """The names of a device mesh."""

    mesh_dim_names = ("dp", "tp")

    def __init__(self, *flattened: str) -> None:
        self._flatten_mapping = dict.fromkeys(flattened)

    def _get_root_mesh(self) -> "Mesh":
        return self


def test_names_of_a_mesh_include_its_flattened_meshes() -> None:
    def gone(device_mesh: Any) -> list[str]:
        raise AttributeError("child_to_root_mapping")

    names = fsdp.NAMES.replacements[0].make(gone)
    assert names(Mesh("dp_cp", "tp")) == ["dp", "tp", "dp_cp"]
    assert names(None) == []
