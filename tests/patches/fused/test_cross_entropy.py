import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches.fused import cross_entropy
from megatron_patches.fused.cross_entropy import ChunkedCrossEntropy, _compute_chunked
from tests.patience import PATIENCE

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def loss_and_gradient(
    logits: torch.Tensor, target: torch.Tensor, upstream: torch.Tensor, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = ChunkedCrossEntropy.apply(leaf * 1, target, group)
    loss.backward(upstream)
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def exact(
    logits: torch.Tensor, target: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.double().requires_grad_()
    flat = torch.nn.functional.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none")
    loss = flat.view(target.shape)
    loss.backward(upstream.double())
    assert wide.grad is not None
    return loss.detach(), wide.grad


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("shape", [(5, 3, 7), (1, 1, 2), (8, 2, 130)])
def test_losses_and_gradients_equal_float64_for_any_chunk_size(
    dtype: torch.dtype,
    chunk: int,
    shape: tuple[int, int, int],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", chunk)
    torch.manual_seed(0)
    logits = torch.randn(shape, device=device).mul(4).to(dtype)
    target = torch.randint(shape[-1], shape[:2], device=device)
    upstream = torch.rand(shape[:2], device=device)
    loss, gradient = loss_and_gradient(logits, target, upstream)
    expected_loss, expected_gradient = exact(logits, target, upstream)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=2e-6)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(gradient.double(), expected_gradient, **close)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[60000.0, -60000.0]]], dtype=torch.float16)
    loss, gradient = loss_and_gradient(logits, torch.tensor([[0]]), torch.ones(1, 1))
    assert loss.item() == 0
    assert gradient.flatten().tolist() == [0, 0]


def test_gradient_reuses_the_memory_of_logits_and_is_computed_only_once() -> None:
    logits = torch.randn(4, 2, 6)
    held = (logits.requires_grad_() * 1).contiguous()
    held.retain_grad()
    loss = ChunkedCrossEntropy.apply(held, torch.zeros(4, 2, dtype=torch.long), None).sum()
    loss.backward(retain_graph=True)
    assert held.grad is not None
    torch.testing.assert_close(held.grad, held.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cross_entropy_stores_only_the_logits_for_backward() -> None:
    saved: list[torch.Tensor] = []
    logits = torch.randn(4, 2, 6, dtype=torch.bfloat16, requires_grad=True) * 1

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ChunkedCrossEntropy.apply(logits, torch.zeros(4, 2, dtype=torch.long), None)
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_over_ranks_with_parts_of_the_vocabulary_equals_the_full_loss(ranks: int) -> None:
    torch.manual_seed(0)
    logits, upstream = torch.randn(5, 2, 4 * ranks).mul(3), torch.rand(5, 2)
    target = torch.randint(4 * ranks, (5, 2))
    expected_loss, expected_gradient = exact(logits, target, upstream)
    store, results = dist.HashStore(), {}

    def work(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=PATIENCE))
        part = logits[..., 4 * rank : 4 * rank + 4].contiguous()
        results[rank] = loss_and_gradient(part, target, upstream, group)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert sorted(results) == list(range(ranks))
    for loss, _ in results.values():
        torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=2e-6)
    gradient = torch.cat([results[rank][1] for rank in range(ranks)], -1)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-6, atol=1e-6)


def test_label_smoothing_is_refused_by_name() -> None:
    replaced = _compute_chunked(lambda *args, **kwargs: torch.zeros(1))
    with pytest.raises(NotImplementedError, match="label smoothing"):
        replaced(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), label_smoothing=0.1)
