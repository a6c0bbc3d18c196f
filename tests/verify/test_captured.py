"""The order in which tensors are compared."""

import numpy as np

from parakit.verify.captured import order_tensor_keys
from tests.verify.captures import output, rank, write


def test_experts_of_a_later_rank_are_ordered_after_those_of_the_first_rank(tmp_path):
    layer = "decoder.layers.0.mlp"
    names = {
        0: [f"{layer}.router", f"{layer}.experts.local_experts.0", layer],
        1: [f"{layer}.router", f"{layer}.experts.local_experts.1", layer],
    }
    ranks = [
        (
            rank(n, expert=(n, 2), data=(n, 2), world_size=2),
            [(output(name), np.zeros(1)) for name in names_of_rank],
        )
        for n, names_of_rank in names.items()
    ]
    ordered = [
        tensor_key.name.removeprefix(f"{layer}.")
        for tensor_key in order_tensor_keys(write(tmp_path, ranks))
    ]
    assert ordered == ["router", "experts.local_experts.0", "experts.local_experts.1", layer]
