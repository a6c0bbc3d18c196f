"""Optimizer offload: the memory that it frees on the device, and the time that it costs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from parakit.config.hardware import HostRates
from parakit.config.run import DeviceKind, RunSpec, StateTypes
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs.constraints import find_violations
from parakit.costs.memory import estimate_rank_memory
from parakit.costs.tensors import rank_tensors, total_parameters
from parakit.planner.readings.published import usual_cluster
from parakit.planner.time.compute import optimizer_seconds
from parakit.planner.time.execution import Execution
from parakit.planner.time.rates import DeviceRates, NoPeakError, compute_device_rates
from tests.planner.conftest import TINY

SPLIT = Parallelism(sharding=Sharding.ZERO1)
N = total_parameters(TINY)
HOST = HostRates(link_bytes_per_second=1.0, memory_bytes_per_second=10.0, source="")


def offloaded(share: float, **changes: object) -> RunSpec:
    types = StateTypes(precision_aware=True, offloaded_fraction=share)
    spec = RunSpec(TINY, SPLIT, Batch(1, 1), state_types=types)
    return replace(spec, **changes)  # type: ignore[arg-type]


def rate(host: HostRates | None, **execution: bool) -> DeviceRates:
    cluster = replace(usual_cluster("h100", 1), execution=Execution(**execution))
    return replace(compute_device_rates(cluster, "bf16"), host=host, bytes_per_second=1e30)


@pytest.mark.filterwarnings("ignore")  # Imports warn without Transformer Engine.
@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_device_memory_matches_tensors_that_the_hybrid_optimizer_keeps_on_the_device(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    import torch
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: tensor
    )  # Fake tensors have no data pointer.
    sizes = rank_tensors(offloaded(share))
    with FakeTensorMode():
        weights = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
        asked = SimpleNamespace(param_groups=[{"params": weights}], param_update_in_fp32=True)
        _, groups, *_ = HybridDeviceOptimizer._get_sub_optimizer_param_groups(asked, share)
        on_device = [tensor for group in groups for tensor in group["params"]]
    assert all(tensor.dtype is torch.float32 and tensor.is_cuda for tensor in on_device)
    memory = estimate_rank_memory(offloaded(share))
    kept = sum(tensor.nbytes for tensor in on_device)
    assert kept <= memory.main_parameters <= kept + 4 * max(sizes)
    assert memory.optimizer_state == 2 * memory.main_parameters
    assert (share < 1) == bool(kept) == bool(memory.main_parameters)
    assert memory.gradients == 4 * N


def test_cpu_ranks_keep_the_offloaded_optimizer_in_their_memory() -> None:
    memory = estimate_rank_memory(offloaded(1.0, device=DeviceKind.CPU))
    assert (memory.main_parameters, memory.optimizer_state) == (4 * N, 8 * N)


def test_copies_and_update_run_in_sequence_or_overlapped() -> None:
    # Copies move 4 bytes per parameter each way at 1 byte/s; the update moves 28 bytes at 10 bytes/s.
    after = optimizer_seconds(offloaded(1.0), rate(HOST), 0)
    assert after == pytest.approx((4 + 2.8 + 4) * N)
    beside = optimizer_seconds(offloaded(1.0), rate(HOST, overlap_offload=True), 0)
    assert beside == pytest.approx(4 * N)
    half = optimizer_seconds(offloaded(0.5), rate(HOST), 0)
    assert half == pytest.approx(after / 2)


def test_an_unknown_host_and_another_sharding_are_refused() -> None:
    with pytest.raises(NoPeakError, match="this GPU's host are not known; plan without"):
        optimizer_seconds(offloaded(1.0), rate(None), 0)
    assert optimizer_seconds(offloaded(0.0), rate(None), 0) >= 0
    zero3 = replace(SPLIT, data=2, sharding=Sharding.ZERO3)
    (problem,) = find_violations(offloaded(1.0, parallelism=zero3, batch=Batch(1, 2)))
    assert "planned for the distributed optimizer alone; use zero1" in problem
