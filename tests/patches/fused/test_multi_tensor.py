from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.fused.multi_tensor import (
    _copy_gradients_at_once,
    copy_all,
    scale,
    wide_gradients,
)
from megatron_patches.l2_norm import l2_norm


def tensors(dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(5,), (3, 7), (), (1, 1, 9)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def test_norm_runs_over_the_elements_of_all_tensors(device: str) -> None:
    found, per_tensor = l2_norm(0, None, [tensors(torch.float32, device)], False)
    flat = torch.cat([tensor.flatten().double() for tensor in tensors(torch.float32, device)])
    assert per_tensor is None
    assert (found.shape, found.dtype, found.device.type) == ((1,), torch.float32, device)
    torch.testing.assert_close(found.double(), flat.norm().view(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [0.5, torch.tensor([0.5])])
def test_tensors_are_scaled_in_place_and_into_other_tensors(factor: Any, device: str) -> None:
    factor = factor.to(device) if isinstance(factor, torch.Tensor) else factor
    sources, targets = tensors(torch.float32, device), tensors(torch.float32, device)
    for target in targets:
        target.zero_()
    scale(0, None, [sources, targets], factor)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source * 0.5)
    before = [source.clone() for source in sources]
    scale(0, None, [sources, sources], factor)
    for source, old in zip(sources, before, strict=True):
        assert torch.equal(source, old * 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copying_all_tensors_converts_like_copying_each(dtype: torch.dtype, device: str) -> None:
    sources, targets = tensors(torch.float32, device), tensors(dtype, device)
    copy_all(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.to(dtype))
    copy_all([], [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_become_fp32_and_fp32_gradients_are_returned_themselves(
    dtype: torch.dtype, device: str
) -> None:
    wide = torch.randn(2, device=device)
    gradients = [*tensors(dtype, device), wide]
    found = wide_gradients(gradients)
    assert found[-1] is wide
    for one, other in zip(found, gradients, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other.float())


def optimizer_of(dtype: torch.dtype) -> Any:
    models = [SimpleNamespace(main_grad=g, grad="old") for g in tensors(dtype, "cpu")]
    mains = [SimpleNamespace(grad=None) for _ in models]
    single = SimpleNamespace(main_grad=torch.ones(2), grad=None)
    return SimpleNamespace(
        float16_groups=[models[:1], models[1:]],
        fp32_from_float16_groups=[mains[:1], mains[1:]],
        fp32_from_fp32_groups=[[single]],
    )


@pytest.mark.filterwarnings("ignore")  # Megatron tells of what is not installed.
def test_gradients_reach_the_fp32_parameters_as_megatrons_loop_brings_them() -> None:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Upstream

    mine, theirs = optimizer_of(torch.bfloat16), optimizer_of(torch.bfloat16)
    Upstream._copy_model_grads_to_main_grads(theirs)
    _copy_gradients_at_once(lambda self: pytest.fail("not the fallback"))(mine)
    for one, other in zip(
        mine.fp32_from_float16_groups, theirs.fp32_from_float16_groups, strict=True
    ):
        for left, right in zip(one, other, strict=True):
            assert torch.equal(left.grad, right.grad)
    assert all(model.grad is None for group in mine.float16_groups for model in group)
    assert torch.equal(mine.fp32_from_fp32_groups[0][0].grad, torch.ones(2))


def test_without_gradient_buffers_megatrons_own_copies() -> None:
    optimizer = optimizer_of(torch.bfloat16)
    del optimizer.float16_groups[0][0].main_grad
    asked: list[Any] = []
    _copy_gradients_at_once(asked.append)(optimizer)
    assert asked == [optimizer]
