"""The losses of fine-tuning: any split of a batch of rollouts gives the same sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are missing.
LENGTH, VOCABULARY = 64, 1024


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of losses, in a process that is its context-parallel group's only rank."""
    from examples.losses import rollouts

    arguments = SimpleNamespace(seq_length=LENGTH, padded_vocab_size=VOCABULARY)
    monkeypatch.setattr(rollouts, "get_args", lambda: arguments)
    monkeypatch.setattr(rollouts, "mpu", SimpleNamespace(get_context_parallel_group=lambda: None))
    set_context_rank(monkeypatch, rollouts, 0)
    return rollouts


def set_context_rank(monkeypatch: pytest.MonkeyPatch, rollouts: Any, rank: int) -> None:
    monkeypatch.setattr(rollouts.mpu, "get_context_parallel_rank", lambda: rank, raising=False)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)


def make_batch(rollouts: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return token losses, loss mask and labels of six rollouts, as the patched data set makes them."""
    torch.manual_seed(0)
    # The rollout is the sum of the sample's tokens modulo six, so the first token decides.
    masks = []
    for number in range(6):
        sample = {"tokens": torch.tensor([number] + [0] * (LENGTH - 1))}
        sample["loss_mask"] = torch.ones(LENGTH)
        read = rollouts._mask_prompts(lambda _, __, sample=sample: sample)
        masks.append(read(None, 0)["loss_mask"])
    losses = torch.rand(6, LENGTH, dtype=torch.float64) + 6.5
    return losses, torch.stack(masks), torch.randint(VOCABULARY, (6, LENGTH))


def test_prompts_are_masked_and_a_rollout_without_response_has_no_token(rollouts: Any) -> None:
    _, mask, _ = make_batch(rollouts)
    starts = [int((row > 0).nonzero()[0]) if row.any() else LENGTH for row in mask]
    prompts = [eighths * LENGTH // 8 for eighths in rollouts.PROMPT_EIGHTHS]
    assert starts == [prompt - 1 if prompt < LENGTH else LENGTH for prompt in prompts]
    assert [row.max().item() for row in mask] == [1, 2, 3, 0, 5, 6]


@pytest.mark.parametrize("name", ["sum_over_tokens", "sum_over_sequences"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_of_any_size_add_up_to_the_batch(name: str, size: int, rollouts: Any) -> None:
    losses, mask, _ = make_batch(rollouts)
    function = getattr(rollouts, name)
    parts = [function(losses[i : i + size], mask[i : i + size]) for i in range(0, 6, size)]
    total, number = function(losses, mask)
    torch.testing.assert_close(sum(part[0] for part in parts), total)
    assert sum(int(part[1]) for part in parts) == int(number)


def test_every_response_weighs_the_same_by_sequence_whatever_its_length(rollouts: Any) -> None:
    _, mask, _ = make_batch(rollouts)
    total, number = rollouts.sum_over_sequences(torch.ones(6, LENGTH), mask)
    assert int(number) == 5
    assert total.item() == pytest.approx(5)


def test_context_ranks_add_up_to_the_batch_and_count_each_response_once(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, mask, _ = make_batch(rollouts)
    total, number = rollouts.sum_over_sequences(losses, mask)
    parts = (torch.cat((torch.arange(16), torch.arange(48, 64))), torch.arange(16, 48))
    sums: list[Tensor] = []
    numbers: list[int] = []
    for rank, positions in enumerate(parts):
        set_context_rank(monkeypatch, rollouts, rank)
        # The other rank's part of the number of responses.
        other_positions = parts[1 - rank]
        lengths = (mask > 0).sum(1, keepdim=True).clamp(min=1)
        share = ((mask[:, other_positions] > 0) / lengths).sum()
        monkeypatch.setattr(
            torch.distributed, "all_reduce", lambda tensor, group, share=share: tensor.add_(share)
        )
        part = rollouts.sum_over_sequences(losses[:, positions], mask[:, positions])
        sums.append(part[0])
        numbers.append(int(part[1]))
    torch.testing.assert_close(sums[0] + sums[1], total)
    assert numbers == [int(number), 0]


def test_policy_loss_stops_at_the_clip_and_kl_is_zero_at_the_old_policy(rollouts: Any) -> None:
    labels = torch.arange(8)
    at_old = -rollouts.old_log_probabilities(labels)
    torch.testing.assert_close(rollouts.kl_losses(at_old, labels), torch.zeros(8))
    torch.testing.assert_close(
        rollouts.policy_losses(at_old, labels, torch.ones(8)), -torch.ones(8)
    )
    likelier = rollouts.policy_losses(at_old - 1.0, labels, torch.ones(8))
    torch.testing.assert_close(likelier, torch.full((8,), -1.2))
    assert (rollouts.kl_losses(at_old + 0.5, labels) > 0).all()
