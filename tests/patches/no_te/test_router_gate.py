import torch

from megatron_patches.no_te.router_gate import compute_router_logits


def test_the_gate_computes_in_the_routers_dtype_with_and_without_a_bias() -> None:
    tokens, weight = torch.ones(2, 1, 3, dtype=torch.bfloat16), torch.ones(4, 3)
    logits = compute_router_logits(tokens, weight, torch.float32)
    assert (logits.shape, logits.dtype) == ((2, 1, 4), torch.float32)
    assert torch.equal(logits, torch.full((2, 1, 4), 3.0))
    assert torch.equal(compute_router_logits(tokens, weight, None, torch.float32), logits)
    assert torch.equal(
        compute_router_logits(tokens, weight, torch.ones(4), torch.float32), logits + 1
    )
