import pytest
import torch

from megatron_patches.fused.adamw import _make_fused_adamw
from megatron_patches.no_te.adam_step import count_steps_by_group

FUSED = _make_fused_adamw(torch.optim.AdamW)
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def trained(make: object, dtype: torch.dtype, device: str, by_group: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(5,), (3, 7), (1,)]
    parameters = [
        torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in shapes
    ]
    optimizer = make(parameters, **OPTIONS)  # type: ignore[operator]
    if by_group:
        count_steps_by_group(optimizer)
    for _ in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("by_group", [False, True])
def test_fused_updates_equal_unfused_updates_and_float64(device: str, by_group: bool) -> None:
    torch.manual_seed(0)
    fused = trained(FUSED, torch.float64, device, by_group)
    plain = trained(torch.optim.AdamW, torch.float64, device, False)
    for actual, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    single = trained(FUSED, torch.float32, device, by_group)
    unfused = trained(torch.optim.AdamW, torch.float32, device, False)
    for actual, expected in zip(single, unfused, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_fused_adamw_is_an_instance_of_torchs_adam() -> None:
    optimizer = FUSED([torch.nn.Parameter(torch.zeros(2))], **OPTIONS)
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.param_groups[0]["lr"] == 0.01
