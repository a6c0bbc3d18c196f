"""The capture hashes this rank's values of all parameters after an iteration."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_patches.capture.parameters import hash_local_values


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Yield a mesh of 2 ranks in a fake process group without communication."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_sharded_parameter_of_torch_fsdp2_is_hashed_by_its_local_shard(mesh: DeviceMesh) -> None:
    shard = torch.arange(6.0).view(3, 2)
    parameter = torch.nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
    assert hash_local_values([parameter]) == hash_local_values([shard])
    assert hash_local_values([parameter]) != hash_local_values([shard + 1])


def test_the_hash_depends_on_each_bit_and_not_on_strides() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    same_values = torch.tensor([[1.0, 3.0], [2.0, 4.0]], dtype=torch.bfloat16).t()
    negative_zero = torch.tensor([0.0, -0.0])
    assert hash_local_values([weight]) == hash_local_values([same_values])
    assert hash_local_values([negative_zero]) != hash_local_values([torch.zeros(2)])
