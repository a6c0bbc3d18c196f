import copy

import torch

from megatron_patches.no_te.adam_step import count_steps_by_group


def optimizer_of(seed: int = 0) -> torch.optim.AdamW:
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(3, 2))]
    groups = [{"params": [parameters[0]], "weight_decay": 0.1}, {"params": [parameters[1]]}]
    return torch.optim.AdamW(groups, lr=0.1)


def train(optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    for step in steps:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 1.0 + step)
        optimizer.step()
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def test_counting_by_group_changes_no_update() -> None:
    plain, counted = optimizer_of(), optimizer_of()
    count_steps_by_group(counted)
    for actual, expected in zip(train(plain, range(5)), train(counted, range(5)), strict=True):
        assert torch.equal(actual, expected)


def test_the_count_is_in_the_groups_and_only_moments_are_in_the_state() -> None:
    optimizer = optimizer_of()
    count_steps_by_group(optimizer)
    train(optimizer, range(3))
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert {key for state in optimizer.state.values() for key in state} == {"exp_avg", "exp_avg_sq"}


def test_empty_state_of_a_parameter_is_initialised_by_the_first_step() -> None:
    plain, looked_at = optimizer_of(), optimizer_of()
    count_steps_by_group(looked_at)
    for group in looked_at.param_groups:
        for parameter in group["params"]:
            assert looked_at.state[parameter] == {}
    for actual, expected in zip(train(plain, range(2)), train(looked_at, range(2)), strict=True):
        assert torch.equal(actual, expected)


def test_adam_resumes_from_a_saved_state_as_without_interruption() -> None:
    whole, first = optimizer_of(), optimizer_of()
    for optimizer in (whole, first):
        count_steps_by_group(optimizer)
    expected = train(whole, range(6))
    half = train(first, range(3))
    saved = copy.deepcopy(first.state_dict())
    second = optimizer_of(seed=1)
    count_steps_by_group(second)
    for parameter, value in zip(
        (p for group in second.param_groups for p in group["params"]), half, strict=True
    ):
        parameter.data.copy_(value)
    second.load_state_dict(saved)
    for actual, reference in zip(train(second, range(3, 6)), expected, strict=True):
        assert torch.equal(actual, reference)
