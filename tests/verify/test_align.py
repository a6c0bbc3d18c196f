import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.artifacts.capture import CaptureStage, TensorKey
from parakit.verify.align import ActivationAligner
from tests.verify.captures import BATCH, HIDDEN, MODULE, SEQUENCE, output, pair, random, rank, write


def aligned(tmp_path, layout_rank, ours, reference_tensors, tensor_key=None, **reference):
    tensor_key = tensor_key or output()
    reference, layout = pair(
        tmp_path, [(layout_rank, [(tensor_key, ours)])], reference_tensors, **reference
    )
    captured_rank = layout.ranks[0]
    return ActivationAligner(reference, layout).align(captured_rank, captured_rank.records[0])


def zigzag(whole, context, axis=0):
    chunks = np.split(whole, 2 * context[1], axis)
    return np.concatenate([chunks[context[0]], chunks[-1 - context[0]]], axis)


@given(
    tensor=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    context=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    sequence_parallel=st.booleans(),
    split_hidden=st.booleans(),
)
def test_any_split_of_sequence_and_hidden_size_is_undone(
    tmp_path_factory, tensor, context, sequence_parallel, split_hidden
):
    whole = random(SEQUENCE, BATCH, HIDDEN)
    ours = zigzag(whole, context)
    if split_hidden:
        ours = np.split(ours, tensor[1], 2)[tensor[0]]
    elif sequence_parallel:
        ours = np.split(ours, tensor[1], 0)[tensor[0]]
    here = rank(tensor=tensor, context=context, sequence_parallel=sequence_parallel, world_size=1)
    alignment = aligned(tmp_path_factory.mktemp("c"), here, ours, [(output(), whole)])
    assert alignment.reference is not None
    assert np.array_equal(alignment.reference, ours)


def test_data_parallel_ranks_have_every_second_micro_batch(tmp_path):
    whole = [random(SEQUENCE, BATCH, HIDDEN, seed=number) for number in range(4)]
    reference_tensors = [
        (output(micro_batch=number), values) for number, values in enumerate(whole)
    ]
    alignment = aligned(
        tmp_path,
        rank(data=(1, 2), micro_batches=2),
        whole[3],
        reference_tensors,
        output(micro_batch=1),
        micro_batches=4,
    )
    assert np.array_equal(alignment.reference, whole[3])


@pytest.mark.parametrize("module", ["mlp", "mlp.shared_experts"])
def test_gate_and_value_of_a_gated_layer_are_split_separately(tmp_path, module):
    name = f"decoder.layers.0.{module}.linear_fc1"
    whole = random(SEQUENCE, BATCH, 8)
    ours = np.concatenate([whole[..., 2:4], whole[..., 6:8]], 2)
    here = rank(tensor=(1, 2), gated=True)
    alignment = aligned(tmp_path, here, ours, [(output(name), whole)], output(name))
    assert np.array_equal(alignment.reference, ours)


@pytest.mark.parametrize("elements", [SEQUENCE, SEQUENCE * BATCH])
def test_bias_with_as_many_elements_as_tokens_is_split_by_tensor_parallelism(tmp_path, elements):
    # tp2cp2 of 128 tokens and 4 samples was called wrong: linear_fc1 has 512 biases.
    bias, name = random(elements), "decoder.layers.0.mlp.linear_fc1"
    key = output(name, slot="output.1")
    here = rank(tensor=(1, 2), context=(0, 2), world_size=1)
    ours = np.split(bias, 2)[1]
    alignment = aligned(tmp_path, here, ours, [(key, bias)], key)
    assert np.array_equal(alignment.reference, ours)


def test_expert_rows_come_from_every_rank_that_sends_tokens(tmp_path):
    tensor_key = output("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1")
    first, second = random(3, HIDDEN), random(5, HIDDEN, seed=1)
    reference_tensors = [(tensor_key, first), (output(tensor_key.name, 1), second)]
    here = rank(data=(1, 2), expert=(1, 2), expert_sources=((0, 0, 0), (1, 0, 0)))
    alignment = aligned(
        tmp_path,
        here,
        np.concatenate([first, second]),
        reference_tensors,
        tensor_key,
        micro_batches=2,
    )
    assert np.array_equal(alignment.reference, np.concatenate([first, second]))


def test_gradients_are_scaled_to_the_layouts_number_of_micro_batches(tmp_path):
    tensor_key = output(stage=CaptureStage.ACTIVATION_GRADIENTS)
    whole = random(SEQUENCE, BATCH, HIDDEN)
    alignment = aligned(
        tmp_path, rank(data=(0, 2)), whole * 2, [(tensor_key, whole)], tensor_key, micro_batches=2
    )
    assert np.allclose(alignment.reference, whole * 2)


def test_loss_is_summed_over_context_parallel_ranks(tmp_path):
    tensor_key = TensorKey(CaptureStage.LOSS, "loss", "sum", 0)
    parts = [
        (rank(number, context=(number, 2), world_size=2), [(tensor_key, np.float32(number + 1))])
        for number in range(2)
    ]
    reference = write(tmp_path / "reference", [(rank(), [(tensor_key, np.float32(3))])])
    layout = write(tmp_path / "layout", parts)
    captured_rank = layout.ranks[0]
    assert (
        ActivationAligner(reference, layout).align(captured_rank, captured_rank.records[0]).ours
        == 3
    )


@pytest.mark.parametrize("shape", [(SEQUENCE, BATCH, 4), (SEQUENCE, BATCH), (3, BATCH, HIDDEN)])
def test_obstacle_names_a_shape_that_no_split_gives(tmp_path, shape):
    reference_tensors = [(output(), random(SEQUENCE, BATCH, HIDDEN))]
    alignment = aligned(tmp_path, rank(tensor=(0, 2)), random(*shape), reference_tensors)
    assert alignment.reference is None
    assert (
        f"its shape {list(shape)} of the reference's {[SEQUENCE, BATCH, HIDDEN]}"
        in alignment.obstacle
    )


def test_obstacle_names_a_tensor_that_the_reference_lacks(tmp_path):
    alignment = aligned(tmp_path, rank(), random(2), [(output(MODULE + ".other"), random(2))])
    assert alignment.obstacle == "the reference has no such tensor"


def of_samples(form, samples):
    """A tensor of one micro batch's samples, in one of the forms that Megatron has."""
    numbers = 100 * np.arange(SEQUENCE)[:, None] + np.array(samples, np.float32)
    sequence_first = np.stack([numbers] * HIDDEN, -1)
    return {
        "sequence first": sequence_first,
        "batch first": numbers.T,
        "tokens": sequence_first.reshape(-1, HIDDEN),
        "no samples": np.arange(SEQUENCE, dtype=np.float32),
    }[form].astype(np.float32)


@pytest.mark.parametrize("form", ["sequence first", "batch first", "tokens", "no samples"])
@pytest.mark.parametrize(
    ("size", "data", "number", "samples"),
    [
        (1, (0, 1), 3, [3]),
        (1, (1, 2), 1, [3]),  # The second of the ranks' second micro batches.
        (4, (0, 1), 0, [0, 1, 2, 3]),
        (3, (0, 1), 1, [3, 4, 5]),  # From the middle of the reference's second micro batch on.
    ],
)
def test_micro_batches_of_another_size_are_aligned_by_sample_number(
    tmp_path, form, size, data, number, samples
):
    reference_tensors = [
        (output(micro_batch=there), of_samples(form, [2 * there, 2 * there + 1]))
        for there in range(3)
    ]
    ours = of_samples(form, samples)
    here = rank(micro_batch_size=size, micro_batches=6 // size // data[1], data=data)
    alignment = aligned(
        tmp_path, here, ours, reference_tensors, output(micro_batch=number), micro_batches=3
    )
    assert np.array_equal(alignment.reference, ours)


def test_token_sums_are_compared_over_the_global_batch_if_micro_batch_sizes_differ(tmp_path):
    def sums(count, values):
        return [
            (TensorKey(CaptureStage.LOSS, "loss", "sum", n), np.float32(values[n]))
            for n in range(count)
        ]

    reference = write(tmp_path / "r", [(rank(micro_batches=2), sums(2, [10, 20]))])
    layout = write(
        tmp_path / "l", [(rank(micro_batch_size=1, micro_batches=4), sums(4, [4, 6, 9, 11]))]
    )
    captured_rank = layout.ranks[0]
    alignment = ActivationAligner(reference, layout).align(captured_rank, captured_rank.records[1])
    assert (alignment.ours, alignment.reference) == (30, 30)


def test_gradients_are_scaled_to_the_size_of_a_micro_batch(tmp_path):
    tensor_key = output(stage=CaptureStage.ACTIVATION_GRADIENTS)
    whole = random(SEQUENCE, BATCH, HIDDEN)
    # The mean over twice as many tokens, of half as many micro batches.
    here, ours = rank(micro_batch_size=2 * BATCH), np.concatenate([whole, whole], 1)
    reference_tensors = [
        (tensor_key, whole),
        (output(micro_batch=1, stage=tensor_key.stage), whole),
    ]
    alignment = aligned(tmp_path, here, ours, reference_tensors, tensor_key, micro_batches=2)
    assert np.allclose(alignment.reference, ours)


def test_expert_rows_of_other_micro_batch_sizes_are_not_aligned(tmp_path):
    tensor_key = output("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1")
    here = rank(micro_batch_size=1)
    alignment = aligned(
        tmp_path, here, random(3, HIDDEN), [(tensor_key, random(5, HIDDEN))], tensor_key
    )
    assert alignment.obstacle == (
        "it belongs to a full micro batch, and the micro batches of the two runs differ in size"
    )


def test_expert_rows_are_selected_by_the_tokens_of_a_context_parallel_rank(tmp_path):
    layer = "decoder.layers.0.mlp"
    tensor_key = output(f"{layer}.experts.local_experts.1.linear_fc1")
    routed = np.arange(SEQUENCE * BATCH) % 3 == 0  # Tokens 0, 3, …, 15; a position has two tokens.
    chosen = np.stack([~routed, routed], 1)
    whole = random(int(routed.sum()), HIDDEN)
    reference_tensors = [(output(f"{layer}.router", slot="output.1"), chosen), (tensor_key, whole)]
    sources = ((0, 0, 0), (0, 1, 0))
    # Context rank 0 has positions 0, 1, 6, 7 (tokens 0-3 and 12-15), rank 1 the others.
    rows = [0, 1, 4, 5, 2, 3]
    here = rank(context=(1, 2), expert=(1, 2), expert_sources=sources)
    assert np.array_equal(
        aligned(tmp_path, here, whole[rows], reference_tensors, tensor_key).reference, whole[rows]
    )
    alone = rank(context=(1, 2), expert_sources=sources[1:])
    alignment = aligned(tmp_path / "alone", alone, whole[[2, 3]], reference_tensors, tensor_key)
    assert np.array_equal(alignment.reference, whole[[2, 3]])


def test_expert_rows_are_in_the_order_of_the_sending_ranks(
    tmp_path,
):
    layer = "decoder.layers.0.mlp"
    tensor_key = output(f"{layer}.experts.local_experts.0.linear_fc1")
    chosen = np.arange(SEQUENCE * BATCH) % 2 == 0  # The first of the two tokens of every position.
    wholes = [random(SEQUENCE, HIDDEN, seed=number) for number in range(2)]
    reference_tensors = [
        record
        for number, whole in enumerate(wholes)
        for record in (
            (output(f"{layer}.router", number, slot="output.1"), chosen[:, None]),
            (output(tensor_key.name, number), whole),
        )
    ]
    # Of both data-parallel ranks the first half of the sequence, then of both the second.
    sources = ((0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1))
    ours = np.concatenate([whole[half] for half in (slice(4), slice(4, 8)) for whole in wholes])
    here = rank(tensor=(0, 2), sequence_parallel=True, data=(0, 2), expert_sources=sources)
    alignment = aligned(tmp_path, here, ours, reference_tensors, tensor_key, micro_batches=2)
    assert np.array_equal(alignment.reference, ours)


@pytest.mark.parametrize(
    "split", [{"context": (1, 2)}, {"tensor": (1, 2), "sequence_parallel": True}]
)
def test_concatenated_sequences_are_split_separately(tmp_path, split):
    both = [random(SEQUENCE, BATCH, HIDDEN, seed=number) for number in range(2)]
    parts = [zigzag(sequence, (1, 2)) if "context" in split else sequence[4:] for sequence in both]
    ours = np.concatenate(parts)
    alignment = aligned(
        tmp_path, rank(**split), ours, [(output("mtp"), np.concatenate(both))], output("mtp")
    )
    assert np.array_equal(alignment.reference, ours)


def test_embedding_output_is_transposed_to_sequence_first_before_it_is_split(tmp_path):
    whole = random(BATCH, SEQUENCE, HIDDEN)
    ours = whole.swapaxes(0, 1)[4:]
    here = rank(tensor=(1, 2), sequence_parallel=True)
    alignment = aligned(tmp_path, here, ours, [(output(), whole)])
    assert np.array_equal(alignment.reference, ours)


def test_same_rank_is_compared_if_the_reference_has_the_same_layout(tmp_path):
    tensor_key = output("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1")
    split = {"expert": (1, 2), "data": (1, 2), "world_size": 2}
    both = [
        write(
            tmp_path / name, [(rank(n, **split), [(tensor_key, random(n + 2))]) for n in range(2)]
        )
        for name in ("reference", "layout")
    ]
    for captured_rank in both[1].ranks:
        alignment = ActivationAligner(*both).align(captured_rank, captured_rank.records[0])
        assert np.array_equal(alignment.reference, random(captured_rank.rank.rank + 2))
