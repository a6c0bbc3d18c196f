import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches.no_te.attention import (
    _attend_gathered,
    _attend_to_documents,
    _find_mask,
    attend,
    causal_mask,
    gathered_mask,
    gathered_positions,
    has_bias_or_packing,
    hidden_keys,
    hidden_outside_documents,
    is_plain,
    rank_positions,
)


def test_rank_holds_its_chunk_and_the_mirrored_chunk() -> None:
    assert [rank_positions(r, 2, 4).tolist() for r in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_position_is_on_exactly_one_rank(ranks: int) -> None:
    held = torch.cat([rank_positions(r, ranks, 16 // ranks) for r in range(ranks)])
    assert sorted(held.tolist()) == list(range(16))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_attends_to_the_same_number_of_keys(ranks: int) -> None:
    seen = {int(causal_mask(r, ranks, 16 // ranks).sum()) for r in range(ranks)}
    assert seen == {16 * 17 // 2 // ranks}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 4])
def test_split_attention_equals_causal_attention_over_the_full_sequence(
    ranks: int, groups: int
) -> None:
    torch.manual_seed(0)
    length, batch, heads, width = 16, 2, 4, 8
    query = torch.randn(length, batch, heads, width, dtype=torch.float64)
    key, value = torch.randn(2, length, batch, groups, width, dtype=torch.float64)
    scale = 1 / math.sqrt(width)
    scores = (
        torch.einsum("sbhd,tbhd->bhst", query, key.repeat_interleave(heads // groups, 2)) * scale
    )
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    values = value.repeat_interleave(heads // groups, 2)
    whole = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), values).flatten(2)

    order = torch.cat([rank_positions(r, ranks, length // ranks) for r in range(ranks)])
    for rank in range(ranks):
        mine = rank_positions(rank, ranks, length // ranks)
        mask = causal_mask(rank, ranks, length // ranks)
        part = attend(query[mine], key[order], value[order], mask, scale, 0.0)
        torch.testing.assert_close(part, whole[mine])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_keys_masked_by_megatron_are_masked_on_every_rank(ranks: int) -> None:
    length, document = 16, torch.tensor([0] * 5 + [1] * 11)
    hidden = torch.ones(length, length).triu(1).bool() | (document[:, None] != document)
    order = torch.cat([rank_positions(r, ranks, length // ranks) for r in range(ranks)])
    for rank in range(ranks):
        mine = rank_positions(rank, ranks, length // ranks)
        rank_mask = hidden[mine][None, None]
        mask = gathered_mask(rank_mask, rank, ranks, length // ranks)
        assert torch.equal(mask[0, 0], ~hidden[mine][:, order])
        assert gathered_mask(None, rank, ranks, length // ranks) is causal_mask(
            rank, ranks, length // ranks
        )


def attend_explicitly(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return attention as Megatron computes it: scores, softmax and the product with the values."""
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(query.size(-1))
    probabilities = scores.masked_fill(hidden, -10000.0).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", probabilities, value).flatten(2)


def set_context_group(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """Let this process be a rank of a context-parallel group, whose gather returns its input."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: group)
    monkeypatch.setattr(
        mappings, "gather_from_sequence_parallel_region", lambda tensor, group: tensor
    )


def query_gradient(
    forward: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of the queries for inputs [query, key, value, upstream gradient]."""
    query, key, value, upstream = (tensor.to(dtype) for tensor in inputs)
    query.requires_grad_()
    forward(None, query, key, value).backward(upstream)  # type: ignore[no-untyped-call]
    assert query.grad is not None
    return query.grad


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallelism_on_cpus_rounds_query_gradients_as_the_reference_does(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Values with a large common part: each row sum of the softmax's backward is then much larger than
    # the differences that remain, as with a bias of values.
    torch.manual_seed(0)
    length, width = 128, 16
    query, key, value = torch.randn(3, length, 2, 4, width)
    key, value = key + 2.0, value * 0.01 + 2.0
    upstream = torch.randn(length, 2, 4 * width)
    hidden = hidden_keys(0, 1, length)
    whole = [query * 0.01, key, value, upstream]

    def attend_to_all(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        return attend_explicitly(module, query, key, value, hidden)

    exact = query_gradient(attend_to_all, whole, torch.float64)
    rounding_of_reference = (query_gradient(attend_to_all, whole, torch.float32) - exact).norm()
    order = gathered_positions(ranks, length // ranks)
    squares = 0.0
    for rank in range(ranks):
        set_context_group(monkeypatch, rank, ranks)
        positions = rank_positions(rank, ranks, length // ranks)

        def attend_to_gathered(
            _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            module = SimpleNamespace(
                config=SimpleNamespace(sequence_parallel=True),
                training=False,
                softmax_scale=1 / math.sqrt(width),
                scale_mask_softmax=SimpleNamespace(scale=None),
            )
            return _attend_gathered(module, attend_explicitly, query, key, value, None)

        inputs = [query[positions] * 0.01, key[order], value[order], upstream[positions]]
        gradient = query_gradient(attend_to_gathered, inputs, torch.float32)
        squares += float((gradient - exact[positions]).square().sum())
    assert math.sqrt(squares) < 1.5 * rounding_of_reference


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
def test_attention_of_megatron_gets_ordered_keys_and_its_mask_under_context_parallelism_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[torch.Tensor] = []

    def note(_: Any, query: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        passed.extend(tensors)
        return query

    positions = gathered_positions(2, 4).float().view(8, 1, 1, 1)
    set_context_group(monkeypatch, 1, 2)
    _attend_gathered(None, note, positions[:4], positions, positions, None)
    key, value, hidden = passed
    assert key.flatten().tolist() == value.flatten().tolist() == list(range(8))
    # Rank 1 of 2 has the tokens 2 to 5.
    assert (~hidden[0, 0]).sum(1).tolist() == [3, 4, 5, 6]
    megatrons = torch.ones(1, 1, 4, 8, dtype=torch.bool)
    _attend_gathered(None, note, positions[:4], positions, positions, megatrons)
    assert passed[-1] is megatrons


def test_attention_without_a_mask_is_causal() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 8, 2, 4, 8, dtype=torch.float64)
    whole = attend(query, key, value, causal_mask(0, 1, 8), 0.3, 0.0)
    torch.testing.assert_close(attend(query, key, value, None, 0.3, 0.0), whole)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_its_fraction_of_weights_and_keeps_their_mean(p: float) -> None:
    torch.manual_seed(0)
    length, width = 64, 8
    # Equal scores, and a value that tells its position: each weight of the last query can be read.
    query = torch.zeros(length, 200, 1, length)
    value = torch.eye(length)[:, None, None, :].expand(length, 200, 1, length).contiguous()
    out = attend(query, query, value, None, 1 / math.sqrt(width), p)[-1]
    dropped = (out == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / out.numel()))
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (length * (1 - p))))


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
@pytest.mark.parametrize(
    ("mask", "window", "offset", "plain"),
    [
        ("causal", None, None, True),
        ("padding", None, None, False),
        ("causal", (8, 0), None, False),
        ("causal", None, torch.zeros(4), False),
    ],
)
def test_only_causal_attention_with_the_usual_softmax_is_plain(
    mask: str, window: object, offset: object, plain: bool
) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    config = SimpleNamespace(window_size=window)
    module = SimpleNamespace(
        attn_mask_type=AttnMaskType[mask], config=config, softmax_offset=offset
    )
    assert is_plain(module) is plain


def test_bias_and_packed_sequences_are_detected() -> None:
    assert not has_bias_or_packing((torch.ones(1), "causal"), {"attention_bias": None})
    assert has_bias_or_packing((torch.ones(1), "causal", torch.ones(1)), {})
    assert has_bias_or_packing((torch.ones(1),), {"packed_seq_params": object()})


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
@pytest.mark.parametrize("argument", ["attention_bias", "packed_seq_params"])
def test_bias_and_packed_sequences_are_refused_under_context_parallelism(
    argument: str,
) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    module = SimpleNamespace(
        attn_mask_type=AttnMaskType.causal, config=SimpleNamespace(window_size=None)
    )
    mask = torch.ones(1)
    assert _find_mask(module, (mask,), {argument: None}) is None
    with pytest.raises(NotImplementedError, match="no bias, no packed sequences"):
        _find_mask(module, (mask,), {argument: object()})


def test_keys_and_values_are_repeated_per_head_if_a_mask_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def noting(*args: object, **kwargs: object) -> torch.Tensor:
        asked.append(bool(kwargs["enable_gqa"]))
        return real(*args, **kwargs)  # type: ignore[arg-type, no-any-return]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    query, key = torch.randn(4, 1, 4, 8), torch.randn(4, 1, 2, 8)
    masked = attend(query, key, key, causal_mask(0, 1, 4), 0.3, 0.0)
    torch.testing.assert_close(attend(query, key, key, None, 0.3, 0.0), masked)
    assert asked == [False, True]


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
def test_attention_within_documents_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.training import global_vars

    module = SimpleNamespace(
        attn_mask_type=AttnMaskType.causal, config=SimpleNamespace(window_size=None)
    )
    for resets in (False, True):
        monkeypatch.setattr(
            global_vars, "_GLOBAL_ARGS", SimpleNamespace(reset_attention_mask=resets)
        )
        assert is_plain(module) is not resets


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_documents_hide_each_other_on_every_rank(ranks: int) -> None:
    length, lengths = 16, torch.tensor([0, 5, 6, 16], dtype=torch.int32)
    document = torch.tensor([0] * 5 + [1] + [2] * 10)
    hidden = torch.ones(length, length).triu(1).bool() | (document[:, None] != document)
    for rank in range(ranks):
        positions = rank_positions(rank, ranks, length // ranks)
        mask = hidden_outside_documents(lengths, rank, ranks, length // ranks)
        assert torch.equal(mask[0, 0], hidden[positions])


@pytest.mark.filterwarnings("ignore")  # Megatron warns about packages that are not installed.
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_attention_is_that_of_each_document_alone(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    length, lengths = 16, [0, 5, 6, 16]
    query, key, value = torch.randn(3, length, 2, 4, dtype=torch.float64)
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor(lengths))
    config = SimpleNamespace(context_parallel_size=ranks)
    attention = SimpleNamespace(config=config)
    alone = [
        attend_explicitly(
            None,
            *(tensor[start:end, None] for tensor in (query, key, value)),
            torch.ones(end - start, end - start).triu(1).bool(),
        )
        for start, end in pairwise(lengths)
    ]
    monkeypatch.setattr(
        "megatron.core.tensor_parallel.checkpoint", lambda function, _, *tensors: function(*tensors)
    )
    order = gathered_positions(ranks, length // ranks)
    for rank in range(ranks):
        set_context_group(monkeypatch, rank, ranks)
        positions = rank_positions(rank, ranks, length // ranks)
        keys = (key[order], value[order])
        out = _attend_to_documents(attention, attend_explicitly, query[positions], *keys, packed)
        torch.testing.assert_close(out, torch.cat(alone)[positions])
