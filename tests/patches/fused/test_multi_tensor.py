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


def test_norm_includes_the_elements_of_all_tensors(device: str) -> None:
    norm, per_tensor = l2_norm(0, None, [tensors(torch.float32, device)], False)
    flat = torch.cat([tensor.flatten().double() for tensor in tensors(torch.float32, device)])
    assert per_tensor is None
    assert (norm.shape, norm.dtype, norm.device.type) == ((1,), torch.float32, device)
    torch.testing.assert_close(norm.double(), flat.norm().view(1), rtol=1e-6, atol=0)


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
def test_16_bit_gradients_are_converted_to_fp32_and_fp32_gradients_are_not_copied(
    dtype: torch.dtype, device: str
) -> None:
    wide = torch.randn(2, device=device)
    gradients = [*tensors(dtype, device), wide]
    widened = wide_gradients(gradients)
    assert widened[-1] is wide
    for actual, original in zip(widened, gradients, strict=True):
        assert actual.shape == original.shape
        assert torch.equal(actual, original.float())


def optimizer_of(dtype: torch.dtype) -> Any:
    models = [SimpleNamespace(main_grad=g, grad="old") for g in tensors(dtype, "cpu")]
    mains = [SimpleNamespace(grad=None) for _ in models]
    single = SimpleNamespace(main_grad=torch.ones(2), grad=None)
    return SimpleNamespace(
        float16_groups=[models[:1], models[1:]],
        fp32_from_float16_groups=[mains[:1], mains[1:]],
        fp32_from_fp32_groups=[[single]],
    )


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
def test_fp32_parameters_get_the_same_gradients_as_with_the_loop_of_megatron() -> None:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Upstream

    patched, upstream = optimizer_of(torch.bfloat16), optimizer_of(torch.bfloat16)
    Upstream._copy_model_grads_to_main_grads(upstream)
    _copy_gradients_at_once(lambda self: pytest.fail("not the fallback"))(patched)
    for patched_group, upstream_group in zip(
        patched.fp32_from_float16_groups, upstream.fp32_from_float16_groups, strict=True
    ):
        for actual, expected in zip(patched_group, upstream_group, strict=True):
            assert torch.equal(actual.grad, expected.grad)
    assert all(model.grad is None for group in patched.float16_groups for model in group)
    assert torch.equal(patched.fp32_from_fp32_groups[0][0].grad, torch.ones(2))


def test_copy_of_megatron_is_used_without_gradient_buffers() -> None:
    optimizer = optimizer_of(torch.bfloat16)
    del optimizer.float16_groups[0][0].main_grad
    asked: list[Any] = []
    _copy_gradients_at_once(asked.append)(optimizer)
    assert asked == [optimizer]
