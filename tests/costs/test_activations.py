"""Activation offload: which tensors are offloaded, which stay on the device, and which computation waits."""

from dataclasses import replace

import pytest

from parakit.config.hardware import HostRates
from parakit.config.model import LatentAttention, load_model
from parakit.config.offload import OFFLOAD_MODULES, Offload
from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, RunSpec
from parakit.config.strategy import Batch, Parallelism
from parakit.costs.activations import (
    Offloaded,
    chunk_activation_bytes,
    layer_activation_bytes,
    offloaded_bytes,
)
from parakit.costs.constraints import find_violations
from parakit.costs.memory import activation_bytes, host_bytes
from parakit.planner.readings.published import usual_cluster
from parakit.planner.time.iteration import iteration_seconds
from parakit.planner.time.offload import exposed_copy_seconds
from parakit.planner.time.rates import NoPeakError
from tests.planner.conftest import TINY

TOKENS, HIDDEN = 32, 8
_HIDDEN = 2 * TOKENS * HIDDEN
"""Bytes of a hidden state: 32 tokens, 8 columns."""
_STATISTICS = 4 * 4 * TOKENS
"""Bytes of the softmax statistics of fused attention: 4 heads in fp32."""
EXPERTS = replace(
    TINY,
    bias=False,
    experts=4,
    experts_per_token=2,
    expert_ffn_hidden=4,
    latent=LatentAttention(3, 5, 2, 1, 2),
)


def tiny(offload: Offload, split: Parallelism | None = None, **changes: object) -> RunSpec:
    spec = RunSpec(TINY, split or Parallelism(), Batch(2, 64), offload=offload)
    return replace(spec, **changes)  # type: ignore[arg-type]


def fine(*modules: str, min_elements: int = 0, fraction: float = 1.0, kept: int = 0) -> Offload:
    return Offload(0, modules, min_elements, fraction, kept)


@pytest.mark.parametrize(
    ("modules", "offloaded", "copied"),
    [
        # A single linear layer saves the layer's input and the output of its norm.
        (("qkv_linear",), 2 * _HIDDEN, 2 * _HIDDEN),
        (("attn_norm",), 0, 0),
        # The output stays on the device for the projection.
        (("core_attn",), 3 * _HIDDEN + _STATISTICS, 4 * _HIDDEN + _STATISTICS),
        (("core_attn", "attn_proj"), 4 * _HIDDEN + _STATISTICS, 5 * _HIDDEN + _STATISTICS),
        (("mlp_norm", "moe_act"), 0, 0),
    ],
)
def test_saved_tensors_of_dense_modules_are_offloaded(
    modules: tuple[str, ...], offloaded: int, copied: int
) -> None:
    spec = tiny(fine(*modules))
    assert offloaded_bytes(spec, 1) == Offloaded(offloaded, copied)
    kept = layer_activation_bytes(spec)
    assert kept == layer_activation_bytes(tiny(Offload()))
    assert chunk_activation_bytes(spec, 3) == 3 * (kept - offloaded)


@pytest.mark.parametrize(
    ("modules", "offloaded"),
    [
        ("attn_norm", _HIDDEN),
        ("mlp_norm", _HIDDEN),
        # Its input is the norm's output. Compressed queries and keys are saved before and after a norm.
        ("qkv_linear", _HIDDEN + 2 * TOKENS * (2 * (3 + 5) + 1)),
        ("expert_fc1", 2 * 2 * TOKENS * HIDDEN),
        ("moe_act", 2 * 2 * TOKENS * 4),
        ("fused_group_mlp", 2 * 2 * TOKENS * (HIDDEN + 4 + 4)),
    ],
)
def test_saved_tensors_of_expert_and_latent_attention_modules_are_offloaded(
    modules: str, offloaded: int
) -> None:
    spec = tiny(fine(modules), shape=EXPERTS)
    assert offloaded_bytes(spec, 1) == Offloaded(offloaded, offloaded)


def test_unfused_attention_offloads_its_scores() -> None:
    spec = tiny(fine("core_attn"), fused_attention=False, dropout=0.0)
    scores = 2 * 4 * TOKENS * 16
    assert offloaded_bytes(spec, 1) == Offloaded(3 * _HIDDEN + scores, 3 * _HIDDEN + scores)


def test_small_tensors_are_not_offloaded() -> None:
    elements = TOKENS * HIDDEN
    assert offloaded_bytes(tiny(fine("qkv_linear", min_elements=elements)), 1).freed == 2 * _HIDDEN
    assert offloaded_bytes(tiny(fine("qkv_linear", min_elements=elements + 1)), 1) == Offloaded()
    # There are half as many softmax statistics.
    offloaded_sizes = offloaded_bytes(tiny(fine("core_attn", min_elements=elements)), 1)
    assert offloaded_sizes == Offloaded(3 * _HIDDEN, 4 * _HIDDEN)


def test_recomputed_tensors_are_copied_but_not_saved() -> None:
    spec = tiny(fine("core_attn"), shape=EXPERTS, recompute=Recompute.parse("mla_up_proj"))
    of_heads = 2 * TOKENS * 4 * (3 + 3 + 2)
    output = 2 * TOKENS * 4 * 2
    assert offloaded_bytes(spec, 1) == Offloaded(_STATISTICS, of_heads + output + _STATISTICS)


@pytest.mark.filterwarnings("ignore")  # Imports warn without Transformer Engine.
@pytest.mark.parametrize("fraction", [1.0, 0.7, 0.5, 0.0])
def test_offloaded_groups_are_those_that_megatron_marks(
    monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    import torch
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron

    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda **_: None)
    monkeypatch.setattr(megatron, "print_offload_summary_table", lambda _: None)
    monkeypatch.setattr(megatron.PipelineOffloadManager, "OFFLOAD_MGR", None)
    modules, layers = ("qkv_linear", "core_attn", "attn_proj"), 5
    alone = {name: offloaded_bytes(tiny(fine(name)), 1).copied for name in modules}
    manager = megatron.PipelineOffloadManager.get_instance()
    chunks = [megatron.ChunkOffloadHandler(0, None) for _ in range(3)]
    for chunk in chunks:
        for name in layers * modules:
            group = megatron.OffloadTensorGroup(name)
            group.total_offload_bytes = alone[name]
            chunk.offload_groups.append(group)
    manager._cached_chunks_forward = manager._cached_chunks_backward = chunks
    manager._pp_rank = manager._delta_offload_bytes_across_pp_ranks = 0
    manager._activation_offload_fraction = fraction
    manager.post_warmup_callback()
    spec = tiny(fine(*modules, fraction=fraction))
    for index, chunk in enumerate(chunks):
        marked = sum(group.total_offload_bytes for group in chunk.offload_groups if group.offload)
        assert marked == offloaded_bytes(spec, layers, first=index == 0).copied


def test_last_layer_of_the_first_returning_micro_batch_is_not_offloaded() -> None:
    split, modules = Parallelism(pipeline=2), ("qkv_linear", "core_attn", "attn_proj")
    plain, spec = tiny(Offload(), split), tiny(fine(*modules), split)
    offloaded, copied = offloaded_bytes(spec, 1)
    # The first stage has two layers and two micro batches in flight. Three of its four stored layers are offloaded.
    assert activation_bytes(plain, 0) - activation_bytes(spec, 0) == 3 * offloaded
    assert activation_bytes(plain, 1) - activation_bytes(spec, 1) == offloaded
    # Megatron's pool keeps the host memory that the first iteration used.
    assert (host_bytes(spec, 0), host_bytes(spec, 1)) == (4 * copied, 2 * copied)
    assert host_bytes(plain, 0) == 0


def test_later_stages_keep_the_requested_number_of_layers() -> None:
    split = Parallelism(pipeline=2)
    spec, told = (tiny(fine("qkv_linear", kept=kept), split) for kept in (0, 100))
    assert activation_bytes(told, 0) == activation_bytes(spec, 0)
    assert activation_bytes(told, 1) == activation_bytes(spec, 1) + 100
    # At most one of two layers can be kept in addition, because the other is never offloaded.
    all_kept = tiny(fine("qkv_linear", kept=10**9), split)
    assert activation_bytes(all_kept, 1) == activation_bytes(tiny(Offload(), split), 1)


def test_layer_offload_keeps_the_other_layers_on_the_device() -> None:
    spec = tiny(Offload(layers=3, min_elements=TOKENS * HIDDEN))
    layer = layer_activation_bytes(spec)
    gone = 3 * (layer - _STATISTICS)
    assert offloaded_bytes(spec, 4) == Offloaded(gone, gone)
    assert chunk_activation_bytes(spec, 4) == layer + 3 * _STATISTICS


HOST = HostRates(link_bytes_per_second=2.0, memory_bytes_per_second=1.0, source="")


def test_copies_overlap_with_the_computation_of_their_layers() -> None:
    spec = tiny(fine("qkv_linear"))
    copying = (
        4 * 2 * float(_HIDDEN)
    )  # Four layers are copied at 1 byte/s, the rate of the host memory.
    wait = exposed_copy_seconds(spec, 0, (copying, 2 * copying), HOST)
    assert wait == 0
    assert exposed_copy_seconds(spec, 0, (copying - 3, copying - 2), HOST) == pytest.approx(5)


@pytest.mark.parametrize(
    ("gone", "forward", "backward"),
    [
        # Four layers take 10 s forward and 20 s backward; a copy takes 15 s.
        # The copy starts with the second layer and ends before the last; the copy back has the time of two layers.
        (1, 0, 0),
        # Copies end at 25 s and 40 s; the third and fourth layer could begin at 20 s and 30 s. Twice 5 s are exposed.
        (2, 10, 0),
        # Every copy is exposed, to the host and back.
        (3, 45, 45),
    ],
)
def test_layer_offload_overlaps_with_computation_of_other_layers(
    gone: int, forward: float, backward: float
) -> None:
    spec = tiny(Offload(layers=gone, min_elements=0))
    bytes_per_layer = offloaded_bytes(spec, 4).copied / gone
    host = HostRates(bytes_per_layer / 15, bytes_per_layer, "")
    assert exposed_copy_seconds(spec, 0, (40, 1e9), host) == pytest.approx(
        forward + (45 if gone == 3 else 0)
    )
    assert exposed_copy_seconds(spec, 0, (1e9, 80), host) == pytest.approx(
        backward + (45 if gone == 3 else 0)
    )


def test_a_rank_whose_layers_all_move_to_the_host_waits_for_every_copy() -> None:
    # Forward waits for three of four copies: nothing replaces the last layer. Backward waits for all.
    spec = tiny(Offload(layers=5, min_elements=0))
    layer_bytes = offloaded_bytes(spec, 4).copied / 4
    host = HostRates(layer_bytes / 15, layer_bytes, "")
    assert exposed_copy_seconds(spec, 0, (40, 80), host) == pytest.approx(3 * 15 + 4 * 15)


def test_iteration_waits_for_exposed_copies() -> None:
    model = load_model("gpt2-large")
    spec = RunSpec(
        model.shape, Parallelism(), Batch(8, 16), offload=Offload(modules=OFFLOAD_MODULES[1:4])
    )
    cluster = usual_cluster("h100", 1)
    plain = iteration_seconds(replace(spec, offload=Offload()), cluster)
    seconds = iteration_seconds(spec, cluster)
    assert plain.host_copies == 0
    assert seconds.host_copies > 0
    assert seconds.matmul == plain.matmul
    unknown = replace(cluster, device=replace(cluster.device, host=None))
    with pytest.raises(NoPeakError, match="without offload of activations"):
        iteration_seconds(spec, unknown)


@pytest.mark.parametrize(
    ("offload", "changes", "sentence"),
    [
        (Offload(layers=4), {}, "offloads all of the model's 4 layers; use at most 3"),
        (Offload(layers=1), {"parallelism": Parallelism(pipeline=2)}, "refuses PP 2"),
        (Offload(layers=1), {"recompute": Recompute.SELECTIVE}, "refuses recomputation"),
        (Offload(layers=1, modules=("core_attn",)), {}, "excludes --cpu-offloading-num-layers"),
        (Offload(layers=1), {"fused_norms": False}, "needs a GPU and Transformer Engine"),
        (fine("core_attn"), {"device": DeviceKind.CPU}, "needs a GPU and Transformer Engine"),
        (fine("attn_proj"), {}, "attn_proj needs core_attn"),
        (fine("core_attn"), {"recompute": Recompute.SELECTIVE}, "recomputed or offloaded"),
        (
            fine("core_attn"),
            {"recompute": Recompute.FULL},
            "full layers recomputed is not planned",
        ),
        (fine("moe_act", "fused_group_mlp"), {}, "fused_group_mlp includes moe_act"),
        (fine("moe_act"), {"recompute": Recompute.parse("moe")}, "also recomputes moe_act"),
        (fine("core_attn"), {"shape": replace(TINY, blocks="*-")}, "are not planned on the host"),
    ],
)
def test_offload_that_megatron_refuses_gives_a_sentence(
    offload: Offload, changes: dict[str, object], sentence: str
) -> None:
    (violation,) = find_violations(tiny(offload, **changes))  # type: ignore[arg-type]
    assert sentence in violation


def test_combination_in_a_test_of_megatron_is_accepted() -> None:
    modules = Recompute.parse("layernorm mla_up_proj mlp moe_act")
    spec = tiny(fine(*OFFLOAD_MODULES[:7]), shape=EXPERTS, recompute=modules)
    assert find_violations(spec) == ()


def test_clamped_activation_stores_its_unclamped_input_unless_recomputed() -> None:
    shape = replace(load_model("mixtral-8x7b").shape, seq_length=8)
    spec = RunSpec(shape, Parallelism(data=8, expert=8), Batch(1, 8), "bf16", dropout=0.0)
    clamped = replace(spec, shape=replace(shape, clamps_activations=True))
    columns = 8 * 2 * 2 * 14336
    assert layer_activation_bytes(clamped) - layer_activation_bytes(spec) == 2 * columns
    again = Recompute(frozenset({"moe_act"}))
    kept = [
        layer_activation_bytes(replace(run_spec, recompute=again)) for run_spec in (clamped, spec)
    ]
    assert kept[0] == kept[1]
