import pytest
import torch

from megatron_patches.cpu.cpu_factories import to_cpu


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 0)])
def test_every_way_to_name_a_gpu_becomes_the_host(device: object) -> None:
    assert to_cpu(device) == torch.device("cpu")


@pytest.mark.parametrize("device", [None, "cpu", "meta", torch.device("cpu"), True, torch.float32])
def test_other_devices_are_unchanged(device: object) -> None:
    assert to_cpu(device) is device
