import numpy as np
import torch

from megatron_patches.experts import _numpy_as_from_a_gpu, gate


def stays(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Megatron's own on the host: it moves nothing."""
    return tensor


def test_split_sizes_are_numpy_arrays_as_they_are_from_a_gpu() -> None:
    move = _numpy_as_from_a_gpu(stays)
    sizes = move(torch.tensor([3, 1]), as_numpy=True)
    assert isinstance(sizes, np.ndarray)
    assert sizes.tolist() == [3, 1]


def test_what_is_wanted_as_a_tensor_stays_one() -> None:
    move = _numpy_as_from_a_gpu(stays)
    tokens = torch.tensor([3, 1])
    assert move(tokens) is tokens
    assert move(None, as_numpy=True) is None


def test_the_gate_computes_in_the_routers_dtype_with_and_without_a_bias() -> None:
    tokens, weight = torch.ones(2, 1, 3, dtype=torch.bfloat16), torch.ones(4, 3)
    logits = gate(tokens, weight, torch.float32)
    assert (logits.shape, logits.dtype) == ((2, 1, 4), torch.float32)
    assert torch.equal(logits, torch.full((2, 1, 4), 3.0))
    assert torch.equal(gate(tokens, weight, None, torch.float32), logits)
    assert torch.equal(gate(tokens, weight, torch.ones(4), torch.float32), logits + 1)
