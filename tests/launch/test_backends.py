import importlib.util
from dataclasses import replace

import pytest

from parakit.config.flags import Flags, drop_flags
from parakit.config.run import Backend
from parakit.config.strategy import Batch
from parakit.launch.backends import NO_DEEPSPEED, backend_problems
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.train import compose_job
from parakit.native.settings import parse_settings

KNOWN = [
    (Backend.NATIVE, "baseline", 1),
    (Backend.NATIVE, "dp2", 2),
    (Backend.NATIVE, "tp4", 4),
    (Backend.NATIVE, "fsdp2", 2),
    (Backend.NATIVE, "gpipe4", 4),
    (Backend.NATIVE, "pipedream2", 2),
    (Backend.BARE, "dp2", 2),
]
UNKNOWN = [
    (Backend.NATIVE, "pp2", 2),
    (Backend.NATIVE, "sp2", 2),
    (Backend.NATIVE, "tp2dp2", 4),
    (Backend.NATIVE, "zero1", 2),
    (Backend.DEEPSPEED, "1f1b2", 2),
    (Backend.DEEPSPEED, "tp2", 2),
    (Backend.DEEPSPEED, "fsdp2", 2),
    (Backend.DEEPSPEED, "tp2dp2-zero3", 4),
    (Backend.DEEPSPEED, "pp2dp2-zero1", 4),
    (Backend.BARE, "zero3", 2),
]


def launch(
    strategy: str, ranks: int, backend: Backend, model: str = "gpt2-tiny", **changes: object
) -> Launch:
    target = parse_target(f"train-{strategy}-{model}-{ranks}cpu")
    options = replace(Options(backend=backend), **changes)  # type: ignore[arg-type]
    return compose_job(target.with_options(options))


@pytest.mark.parametrize(("backend", "strategy", "ranks"), KNOWN)
def test_what_a_backend_has_is_not_refused(backend: Backend, strategy: str, ranks: int) -> None:
    assert list(backend_problems(launch(strategy, ranks, backend))) == []


@pytest.mark.parametrize(("backend", "strategy", "ranks"), UNKNOWN)
def test_what_a_backend_lacks_is_refused_with_what_it_has(
    backend: Backend, strategy: str, ranks: int
) -> None:
    problem = next(backend_problems(launch(strategy, ranks, backend)))
    assert f"BACKEND={backend} has" in problem
    assert f"and no {strategy}; use one of these" in problem


def test_a_missing_package_is_refused_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(backend_problems(launch("zero2", 2, Backend.DEEPSPEED))) == [NO_DEEPSPEED]


def test_a_flag_that_only_megatron_knows_is_refused_by_name() -> None:
    problems = list(backend_problems(launch("dp2", 2, Backend.NATIVE, extra=("--qk-layernorm",))))
    assert any("--qk-layernorm" in problem for problem in problems)


def test_both_backends_are_given_the_same_model_batch_and_schedule() -> None:
    megatron, native = (
        Flags(launch("dp2", 2, backend).flags) for backend in (Backend.MEGATRON, Backend.NATIVE)
    )
    for name in ("--hidden-size", "--global-batch-size", "--seed", "--lr", "--train-iters"):
        assert megatron.text(name) == native.text(name) != ""


def test_fsdp2_of_pytorch_keeps_the_tied_embedding_that_megatrons_must_untie() -> None:
    megatron, native = (
        launch("fsdp2", 2, backend) for backend in (Backend.MEGATRON, Backend.NATIVE)
    )
    assert Flags(megatron.flags).has("--untie-embeddings-and-output-weights")
    assert not Flags(native.flags).has("--untie-embeddings-and-output-weights")
    assert native.initial_checkpoint == launch("dp2", 2, Backend.MEGATRON).initial_checkpoint
    assert native.initial_checkpoint != megatron.initial_checkpoint


def test_a_pipeline_without_flushes_is_untied_and_starts_from_an_untied_model() -> None:
    tied, untied = (launch(name, 2, Backend.NATIVE) for name in ("gpipe2", "pipedream2"))
    assert tied.initial_checkpoint != untied.initial_checkpoint
    flags = Flags(untied.flags)
    assert flags.text("--pipeline-schedule") == "pipedream"
    assert flags.number("--clip-grad", 1) == 0
    assert flags.has("--untie-embeddings-and-output-weights")
    assert not untied.spec.shape.tied_embeddings


def test_a_flag_goes_with_its_values() -> None:
    assert drop_flags(("--a", "1", "2", "--b", "--c", "3"), ("--a", "--b")) == ("--c", "3")


@pytest.mark.parametrize(
    ("backend", "strategy", "ranks", "known"),
    [
        (Backend.NATIVE, "ep2", 2, True),
        (Backend.NATIVE, "ep2dp2", 4, True),
        (Backend.NATIVE, "tp2", 2, False),
        (Backend.NATIVE, "fsdp2", 2, False),
        (Backend.BARE, "ep2", 2, False),
        (Backend.BARE, "dp2", 2, True),
        (Backend.DEEPSPEED, "dp2", 2, False),
    ],
)
def test_experts_are_native_on_data_and_expert_ranks(
    backend: Backend, strategy: str, ranks: int, known: bool
) -> None:
    composed = launch(strategy, ranks, backend, model="moe-tiny")
    problems = [p for p in backend_problems(composed) if "needs the package" not in p]
    assert (problems == []) == known
    assert composed.entry.path == "examples/moe/pretrain_native.py"


def test_a_value_that_only_megatron_has_is_refused_before_anything_starts() -> None:
    sinkhorn = ("--moe-router-load-balancing-type", "sinkhorn")
    composed = launch("ep2", 2, Backend.NATIVE, model="moe-tiny", extra=sinkhorn)
    (problem,) = backend_problems(composed)
    assert problem.startswith(
        "BACKEND=native cannot take --moe-router-load-balancing-type: invalid choice: 'sinkhorn'"
    )


@pytest.mark.parametrize(
    ("strategy", "ranks", "model"),
    [
        ("baseline", 1, "gpt2-xl"),
        ("tp2", 2, "gpt2-tiny"),
        ("1f1b2", 2, "gpt3-64m"),
        ("ep2", 2, "moe-tiny"),
        ("baseline", 1, "blueberry-79m"),
    ],
)
def test_the_backend_reads_the_same_run_from_the_flags_as_the_records_do(
    strategy: str, ranks: int, model: str
) -> None:
    composed = launch(strategy, ranks, Backend.NATIVE, model)
    ours, spec = parse_settings(composed.arguments("run")), composed.spec
    shape, split = spec.trained_shape, spec.parallelism
    read = replace(
        shape,
        layers=ours.num_layers,
        hidden=ours.hidden_size,
        heads=ours.num_attention_heads,
        seq_length=ours.seq_length,
        positions=ours.max_position_embeddings if "learned" in ours.position_embedding_type else 0,
        vocabulary=ours.vocab_size,
        vocabulary_multiple=ours.make_vocab_size_divisible_by,
        gated=ours.activation == "swiglu",
        bias=ours.bias,
        rms_norm=ours.normalization == "RMSNorm",
        tied_embeddings=not ours.untie_embeddings_and_output_weights,
        experts=ours.num_experts,
        experts_per_token=ours.moe_router_topk if ours.num_experts else 0,
        expert_ffn_hidden=ours.mlp_width,
    )
    assert read == shape
    assert ours.padded_vocabulary == shape.padded_vocabulary(split.tensor)
    assert Batch(ours.micro_batch_size, ours.global_batch_size) == spec.batch
    degrees = (ours.tensor_model_parallel_size, ours.pipeline_model_parallel_size)
    assert degrees == (split.tensor, split.pipeline)
    assert (ours.expert_model_parallel_size, ours.pipeline_schedule) == (
        split.expert,
        split.schedule,
    )
    assert (ours.hidden_dropout, ours.attention_dropout) == (spec.dropout, spec.dropout)
    assert (ours.seed, ours.optimizer) == (spec.seed, spec.optimizer)
    assert (ours.fp16, ours.bf16, spec.dtype) == (False, False, "fp32")
