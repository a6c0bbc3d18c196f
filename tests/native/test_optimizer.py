"""Count the ranks that hold the same part of a parameter."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from parakit.native.optimizer import _count_copies
from parakit.native.parallel import COPIES_ATTRIBUTE


@pytest.fixture
def mesh():
    """Return a mesh of 2 replicas of 4 shards, in a fake process group without communication."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "copies"),
    [
        ((Shard(0), Shard(0)), 1),
        ((Replicate(), Shard(0)), 2),
        ((Shard(0), Replicate()), 4),
        ((Replicate(), Replicate()), 0),
    ],
)
def test_copies_of_a_distributed_gradient_are_the_ranks_with_the_same_shard(
    mesh, placements, copies
):
    shard = DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False)
    parameter = nn.Parameter(shard)
    parameter.grad = shard.detach()
    assert _count_copies(parameter) == copies


def test_copies_of_a_plain_gradient_are_those_of_its_attribute():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert _count_copies(parameter) == 0
    setattr(parameter, COPIES_ATTRIBUTE, 2)
    assert _count_copies(parameter) == 2
