import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.artifacts.capture import CaptureStage, Placement, TensorKey
from parakit.verify.reassemble import reassemble_to_one_rank
from parakit.verify.verdict import judge
from tests.verify.captures import (
    BATCH,
    HIDDEN,
    MODULE,
    SEQUENCE,
    output,
    place,
    random,
    rank,
    write,
)

LOCAL = TensorKey(CaptureStage.LOCAL_GRADIENTS, f"{MODULE}.weight", "gradient")
LONG = 16
"""No part of it is as long as another dimension."""


def zigzag(whole, context, axis=0):
    chunks = np.split(whole, 2 * context[1], axis)
    return np.concatenate([chunks[context[0]], chunks[-1 - context[0]]], axis)


def one_rank(folder, ranks):
    """A reference of these ranks, as one."""
    reference = write(folder / "several", ranks)
    full_tensors = reassemble_to_one_rank(
        reference, write(folder / "layout", [(rank(), [])]), folder / "one"
    )
    return full_tensors.ranks[0]


def tensors_in(capture):
    return {record.tensor_key: capture.values(record) for record in capture.records}


@settings(max_examples=40)
@given(
    tensors=st.sampled_from([1, 2]),
    contexts=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    form=st.sampled_from(["sequence", "hidden", "heads", "scores", "tokens", "ids", "whole"]),
)
def test_parts_of_sequence_and_hidden_size_are_joined(
    tmp_path_factory, tensors, contexts, sequence_parallel, form
):
    shape, axis, split = {
        "sequence": ((LONG, BATCH, HIDDEN), 0, 0 if sequence_parallel else None),
        "hidden": ((LONG, BATCH, HIDDEN), 0, 2),
        "heads": ((LONG, BATCH, 6, 3), 0, 2),
        "scores": ((BATCH, 6, LONG, LONG), 2, 1),
        "tokens": ((LONG, BATCH, 3), 0, 0 if sequence_parallel else None),
        "ids": ((BATCH, LONG), 1, None),
        "whole": ((LONG, BATCH, HIDDEN), 0, None),
    }[form]
    if form == "whole" and sequence_parallel:
        shape, axis = (BATCH, LONG, HIDDEN), 1
    whole = random(*shape)

    def part(context, tensor):
        values = zigzag(whole, (context, contexts), axis)
        if split is not None:
            values = np.split(values, tensors, split)[tensor]
        return values.reshape(-1, 3) if form == "tokens" else values

    ranks = [
        (
            rank(
                number,
                world_size=tensors * contexts,
                sequence_length=LONG,
                tensor=(number % tensors, tensors),
                context=(number // tensors, contexts),
                sequence_parallel=sequence_parallel and tensors > 1,
            ),
            [(output(), part(number // tensors, number % tensors))],
        )
        for number in range(tensors * contexts)
    ]
    full_tensors = tensors_in(one_rank(tmp_path_factory.mktemp("w"), ranks))
    assert np.array_equal(
        full_tensors[output()], whole.reshape(-1, 3) if form == "tokens" else whole
    )


def test_gates_are_joined_before_values(tmp_path):
    tensor_key = output("decoder.layers.0.mlp.linear_fc1", slot="output.0")
    whole = random(SEQUENCE, BATCH, 8)
    ranks = [
        (
            rank(n, tensor=(n, 2), gated=True, world_size=2),
            [
                (
                    tensor_key,
                    np.concatenate(
                        [whole[..., 2 * n :][..., :2], whole[..., 4 + 2 * n :][..., :2]], 2
                    ),
                )
            ],
        )
        for n in range(2)
    ]
    assert np.array_equal(tensors_in(one_rank(tmp_path, ranks))[tensor_key], whole)


def test_micro_batches_of_data_parallel_ranks_and_their_gradients_are_those_of_one_rank(tmp_path):
    def gradient(number):
        return output(micro_batch=number, stage=CaptureStage.ACTIVATION_GRADIENTS)

    values = [random(SEQUENCE, BATCH, HIDDEN, seed=number) for number in range(4)]
    ranks = [
        (
            rank(n, data=(n, 2), micro_batches=2, world_size=2),
            [(gradient(batch), 2 * values[2 * batch + n]) for batch in range(2)],
        )
        for n in range(2)
    ]
    capture = one_rank(tmp_path, ranks)
    assert (capture.rank.micro_batches, capture.rank.data, capture.rank.world_size) == (
        4,
        (0, 1),
        1,
    )
    full_tensors = tensors_in(capture)
    assert all(np.array_equal(full_tensors[gradient(n)], values[n]) for n in range(4))


def test_loss_is_joined_as_a_sum_over_context_parallel_ranks(tmp_path):
    tensor_key = TensorKey(CaptureStage.LOSS, "loss", "sum", 0)
    ranks = [
        (rank(n, context=(n, 2), world_size=2), [(tensor_key, np.float32(n + 1))]) for n in range(2)
    ]
    assert tensors_in(one_rank(tmp_path, ranks))[tensor_key] == 3


@pytest.mark.parametrize("shape", ["data", "context", "sequence"])
def test_expert_rows_are_joined_in_the_order_of_tokens(tmp_path, shape):
    layer = "decoder.layers.0.mlp"
    router, tensor_key = (
        output(f"{layer}.router", slot="output.1"),
        output(f"{layer}.experts.local_experts.1.linear_fc2", slot="output.0"),
    )
    wholes = {n: random(SEQUENCE * BATCH, HIDDEN, seed=n) for n in range(2)}
    routed = {n: np.arange(SEQUENCE * BATCH) % (3 + n) == 0 for n in range(2)}

    def tokens(number):
        positions = np.arange(SEQUENCE)
        if shape == "context":
            positions = zigzag(positions, (number, 2))
        elif shape == "sequence":
            positions = np.split(positions, 2)[number]
        return (positions[:, None] * BATCH + np.arange(BATCH)).ravel()

    batches = [0, 1] if shape == "data" else [0]
    split = {"data": "data", "context": "context", "sequence": "tensor"}[shape]
    coordinate = ["data", "context", "tensor"].index(split)
    sources = tuple(tuple(n * (i == coordinate) for i in range(3)) for n in range(2))
    rows = []
    for number in range(2):
        batch = number if shape == "data" else 0
        mine = tokens(number)
        rows.append(wholes[batch][mine[routed[batch][mine]]])
    ranks = []
    for number in range(2):
        batch = number if shape == "data" else 0
        chosen = routed[batch][tokens(number)]
        tensors = [(router, np.stack([~chosen, chosen], 1))]
        if number == 1:  # Only the second rank has the expert.
            tensors.append((tensor_key, np.concatenate(rows)))
        described = rank(
            number,
            world_size=2,
            expert=(number, 2),
            expert_sources=sources,
            sequence_parallel=shape == "sequence",
            **{split: (number, 2)},
        )
        ranks.append((described, tensors))
    full_tensors = tensors_in(one_rank(tmp_path, ranks))
    for batch in batches:
        numbered = msgspec.structs.replace(tensor_key, micro_batch=batch)
        assert np.array_equal(full_tensors[numbered], wholes[batch][routed[batch]])


def test_layers_of_a_pipeline_follow_one_another_forward_and_backward(tmp_path):
    def on(stage, layers, backward, *more_groups):
        there = [
            *(output(name) for name in more_groups[:1]),
            *(output(f"decoder.layers.{n}") for n in layers),
            *(output(name) for name in more_groups[1:]),
        ]
        back = [output(s.name, stage=CaptureStage.ACTIVATION_GRADIENTS) for s in there[::-1]]
        described = rank(stage, pipeline=(stage, 2), virtual_stages=2, world_size=2)
        return described, [
            (tensor_key, random(SEQUENCE, BATCH, HIDDEN)) for tensor_key in (*there, *back)
        ]

    first, last = on(0, [0, 2], "", "embedding"), on(1, [1, 3], "", "loss")
    forward, back = [], []
    for record in one_rank(tmp_path, [first, last]).records:
        (forward if record.tensor_key.stage is CaptureStage.OUTPUTS else back).append(
            record.tensor_key.name
        )
    layers = [f"decoder.layers.{n}" for n in range(4)]
    assert [name for name in forward if name in layers] == layers
    assert [name for name in back if name in layers] == layers[::-1]
    assert (forward[0], back[-1]) == ("embedding", "embedding")


@pytest.mark.parametrize("alike", [True, False])
def test_local_gradients_of_tensor_parallel_ranks_are_copies_or_terms_of_a_sum(tmp_path, alike):
    values = [random(4, 3), random(4, 3) if alike else random(4, 3, seed=1)]
    ranks = [
        (
            rank(n, tensor=(n % 2, 2), data=(n // 2, 2), world_size=4),
            [(LOCAL, values[n % 2], place((0, 0, 0)))],
        )
        for n in range(4)
    ]
    full_tensors = tensors_in(one_rank(tmp_path, ranks))[LOCAL]
    assert np.allclose(full_tensors, values[0] if alike else sum(values))


def test_expert_gradient_is_averaged_over_all_ranks_that_send_tokens(tmp_path):
    whole = random(4, 3)
    ranks = [
        (
            rank(n, data=(n, 2), expert=(n, 2), world_size=2),
            [(LOCAL, 2 * whole, place((0, 0, 0)))] if n else [],
        )
        for n in range(2)
    ]
    assert np.allclose(tensors_in(one_rank(tmp_path, ranks))[LOCAL], whole)


def test_weights_are_joined_with_the_placement_of_the_full_parameter(tmp_path):
    tensor_key = TensorKey(CaptureStage.WEIGHTS, f"{MODULE}.weight", "weight")
    whole = random(4, 3)
    ranks = [
        (
            rank(n, tensor=(n, 2), world_size=2),
            [(tensor_key, whole[2 * n :][:2], place((0, 2 * n, 0)))],
        )
        for n in range(2)
    ]
    (record,) = one_rank(tmp_path, ranks).records
    assert record.placement == Placement(record.placement.key, (1, 4, 3), (0, 0, 0))
    assert record.shape == (4, 3)


@pytest.mark.parametrize("split", ["context", "tensor"])
def test_tensor_that_cannot_be_joined_is_listed_and_the_others_are_compared(tmp_path, split):
    odd, scalar, even = output("decoder.layers.0.odd"), output("decoder.scalar"), output()
    whole = random(SEQUENCE, BATCH, HIDDEN)
    reference = write(
        tmp_path / "reference",
        [
            (
                rank(n, **{split: (n, 2)}, world_size=2),
                [
                    (odd, random(3, seed=n)),
                    (scalar, np.float32(n)),
                    (even, zigzag(whole, (n, 2)) if split == "context" else whole),
                ],
            )
            for n in range(2)
        ],
    )
    layout = write(
        tmp_path / "layout", [(rank(), [(odd, random(3)), (scalar, np.float32(0)), (even, whole)])]
    )
    verdict = judge(reassemble_to_one_rank(reference, layout, tmp_path / "one"), layout).verdict
    assert (verdict.verdict, verdict.compared, verdict.seen) == ("held", 1, 3)
    listed = " ".join(verdict.not_aligned)
    assert "decoder.layers.0.odd output" in listed
    assert "decoder.scalar output" in listed


def test_error_of_sequence_parallelism_is_found_with_a_tensor_parallel_reference(tmp_path):
    whole = random(SEQUENCE, BATCH, HIDDEN)
    tensor_key = output("decoder.layers.0.mlp.linear_fc1")
    reference = write(
        tmp_path / "reference",
        [
            (rank(n, tensor=(n, 2), world_size=2), [(tensor_key, np.split(whole, 2, 2)[n])])
            for n in range(2)
        ],
    )
    layout = write(
        tmp_path / "layout",
        [
            (
                rank(n, tensor=(n, 2), sequence_parallel=True, world_size=2),
                [(tensor_key, (1 + n) * np.split(whole, 2, 2)[n])],
            )
            for n in range(2)
        ],
    )
    verdict = judge(reassemble_to_one_rank(reference, layout, tmp_path / "one"), layout).verdict
    assert (verdict.module, verdict.ranks, verdict.factor) == (
        tensor_key.name,
        (1,),
        pytest.approx(2),
    )


def test_reference_of_the_same_layout_is_returned_unchanged(tmp_path):
    ranks = [(rank(n, tensor=(n, 2), world_size=2), [(output(), random(2))]) for n in range(2)]
    reference, layout = write(tmp_path / "reference", ranks), write(tmp_path / "layout", ranks)
    assert reassemble_to_one_rank(reference, layout, tmp_path / "one") is reference
    assert not (tmp_path / "one").exists()
