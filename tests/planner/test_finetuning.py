"""Plans of LoRA and of packed documents: time, what is searched, what is shown, and what is refused."""

import json
import shlex
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit import api
from parakit.config.peft import FrozenWeights, Lora
from parakit.config.strategy import Sharding
from parakit.costs import adapter_parameters, find_peak_rank
from parakit.planner.one_strategy import TimedStrategy, time_strategy
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.readings.reading_to_spec import RefusedError, convert_measurement
from parakit.planner.readings.residual import compute_residuals
from parakit.planner.readings.table import (
    PublishedMeasurement,
    read_measurements,
)
from parakit.planner.request import build_request
from parakit.planner.search import Plan, search_configurations
from parakit.planner.time.iteration import synchronisation_seconds
from tests.program import run_plan as main

LLAMA = PlanOptions("llama3-8b", "h100", gpus=8, global_batch=64, seq=4096)


@cache
def time_llama(peft: str | None, strategy: str = "dp8", **changes: object) -> TimedStrategy:
    """Return the prediction of one strategy of Llama 3 8B on H100."""
    options = replace(LLAMA, gpus=None, strategy=strategy, peft=peft, **changes)  # type: ignore[arg-type]
    return time_strategy(options)


@cache
def search(options: PlanOptions) -> Plan:
    return search_configurations(build_request(options))


def run(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `plan` prints, with all spaces and line ends as one space."""
    assert main(shlex.split(arguments)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_backward_of_frozen_layers_computes_input_gradients_alone() -> None:
    trained = time_llama(None).candidate.seconds
    frozen = time_llama("lora rank=4 targets=linear_proj").candidate.seconds
    assert 0.64 * trained.matmul < frozen.matmul < 0.72 * trained.matmul
    assert frozen.attention == trained.attention
    assert frozen.optimizer < 0.01 * trained.optimizer
    assert frozen.gradient_sync < 0.05 * trained.gradient_sync


def test_each_target_adds_time() -> None:
    times = [
        time_llama(f"lora rank=16 targets={targets}").candidate.seconds.total
        for targets in (
            "linear_qkv",
            "linear_qkv,linear_proj",
            "linear_qkv,linear_proj,linear_fc1",
            "linear_qkv,linear_proj,linear_fc1,linear_fc2",
        )
    ]
    assert times == sorted(set(times))


@settings(max_examples=12, deadline=None)
@given(rank=st.integers(1, 16).map(lambda factor: 8 * factor), tensor=st.sampled_from((1, 2, 4)))
def test_a_larger_rank_takes_more_time_and_memory(rank: int, tensor: int) -> None:
    strategy = f"tp{tensor}dp{8 // tensor}" if tensor > 1 else "dp8"
    smaller, larger = (
        time_llama(f"lora rank={size}", strategy).candidate for size in (rank, 2 * rank)
    )
    assert smaller.seconds.total < larger.seconds.total
    assert smaller.memory.total < larger.memory.total


def test_weights_in_nf4_save_memory_and_cost_time() -> None:
    half, quantised = (time_llama(f"lora weights={kind}").candidate for kind in ("bf16", "nf4"))
    assert half.memory.weights - quantised.memory.weights > 9e9
    assert quantised.seconds.memory_bound > half.seconds.memory_bound
    assert quantised.seconds.matmul == half.seconds.matmul


def test_adapters_with_many_kernels_wait_longer_for_the_host() -> None:
    small = {"model": "gpt2-large", "global_batch": 8, "seq": 128}
    trained, adapted = (
        time_llama(peft, **small).candidate.seconds for peft in ("lora targets=linear_qkv", "lora")
    )
    assert adapted.host_launches > trained.host_launches


def test_search_with_lora_shards_at_most_the_optimizer() -> None:
    plan = search(replace(LLAMA, peft="lora"))
    assert plan.ranked
    shardings = {candidate.spec.parallelism.sharding for candidate in plan.examined}
    assert shardings <= {Sharding.NONE, Sharding.ZERO1}
    assert all(candidate.spec.lora == Lora() for candidate in plan.ranked)


def test_search_leaves_out_degrees_that_do_not_divide_the_rank() -> None:
    plan = search(replace(LLAMA, peft="lora rank=2"))
    assert {candidate.spec.parallelism.tensor for candidate in plan.ranked} <= {1, 2}


def test_search_with_nf4_has_data_parallelism_alone() -> None:
    plan = search(replace(LLAMA, peft="lora weights=nf4"))
    assert {candidate.spec.parallelism.data for candidate in plan.ranked} == {8}


def test_lora_fits_where_training_all_weights_does_not() -> None:
    single = replace(LLAMA, gpus=1)
    assert search(single).winner is None
    winner = search(replace(single, peft="lora")).winner
    assert winner is not None
    assert winner.spec.lora == Lora()
    # 70 billion weights take 131 GiB in bf16 and 34 GiB in NF4.
    large = replace(single, model="llama3-70b", global_batch=8)
    assert search(replace(large, peft="lora")).winner is None
    assert search(replace(large, peft="lora weights=nf4")).winner is not None


def test_memory_of_the_search_is_that_of_the_winner() -> None:
    winner = search(replace(LLAMA, peft="lora")).winner
    assert winner is not None
    assert winner.memory == find_peak_rank(winner.spec)[1]


def test_mfu_counts_no_gradients_of_frozen_weights() -> None:
    trained, frozen = (time_llama(peft).candidate for peft in (None, "lora"))
    ratio = (frozen.mfu * frozen.seconds.total) / (trained.mfu * trained.seconds.total)
    assert 0.66 < ratio < 0.72


def test_screen_says_what_is_trained_and_what_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    screen = run("--model llama3-8b --gpus 8 --gpu h100 --peft 'lora rank=16'", capsys)
    assert (
        "LoRA rank 16 on linear_qkv, linear_proj, linear_fc1 and linear_fc2 trains 35.7 million of 8.03 billion "
        "parameters (0.44%); the frozen weights of linear layers are in bf16."
    ) in screen
    assert "pretrain_gpt.py and this kit have no LoRA. Megatron-Bridge has it:" in screen
    assert "run_recipe.py --recipe llama3_8b_peft_config --mode lora" in screen
    assert "peft.dim=16 'peft.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]'" in (
        screen
    )
    assert "make train" not in screen


def test_one_strategy_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    question = "--model llama3-8b --gpu h100 --strategy dp8 --peft 'lora weights=nf4'"
    screen = run(question, capsys)
    assert (
        "LoRA rank 32 on linear_qkv, linear_proj, linear_fc1 and linear_fc2 trains 71.3" in screen
    )
    assert "the frozen weights of linear layers are in nf4." in screen
    assert "Neither Megatron-LM nor Megatron-Bridge trains with weights in NF4" in screen
    assert "run_recipe.py" not in screen


def test_data_has_the_adapters_and_their_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model llama3-8b --gpu h100 --strategy dp8 --json --peft 'lora rank=8'"
    assert main(shlex.split(arguments)) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["peft"]["rank"] == 8
    shape = time_llama(None).request.template.shape
    assert data["peft"]["trained_parameters"] == adapter_parameters(shape, Lora(rank=8))
    assert "--mode lora" in data["layout"]["command"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--for megatron", "Megatron-LM has no LoRA and would train all weights; use FOR=bridge."),
        ("--for torchtitan", "torchtitan 0.2.2 has no LoRA and would train all weights; "),
        ("--launcher slurm", "Megatron-LM has no LoRA and would train all weights; "),
    ],
)
@pytest.mark.parametrize("strategy", ["", "--strategy dp8"])
def test_trainers_without_lora_are_refused(
    arguments: str, sentence: str, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    question = f"--model llama3-8b --gpus 8 --gpu h100 --peft lora {arguments} {strategy}"
    assert main(question.split()) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence.split("FOR=", maxsplit=1)[0] in output.err


def test_bridge_is_no_trainer_of_nf4(capsys: pytest.CaptureFixture[str]) -> None:
    question = "--model llama3-8b --gpu h100 --strategy dp8 --for bridge --peft"
    assert main([*question.split(), "lora weights=nf4"]) == 2
    assert "peft with bitsandbytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peft": "qlora"}, "There is no fine-tuning 'qlora'; use lora or none."),
        ({"gpu": "cpu"}, "LoRA is planned on GPUs alone"),
        ({"verify": 1}, "VERIFY= runs Megatron-LM's own model, which has no LoRA"),
        ({"model": "deepseek-v3", "peft": "lora targets=linear_qkv"}, "none of LoRA's targets"),
        ({"model": "nemotron-3-nano"}, "blocks of several kinds"),
        (
            {"peft": "lora weights=nf4", "extra": "--fp8-format hybrid"},
            "so FP8 computes none of them",
        ),
    ],
)
def test_what_no_formula_covers_is_refused(changes: dict[str, object], sentence: str) -> None:
    options = replace(LLAMA, **{"peft": "lora", **changes})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=sentence):
        build_request(options)


def test_largest_model_is_not_searched_with_lora(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--largest", "--gpus", "8", "--peft", "lora"]) == 2
    assert "sizes models whose weights are all trained; leave" in capsys.readouterr().err


def test_library_takes_adapters_and_documents() -> None:
    timed = api.estimate(
        "llama3-8b", "dp8", gpu="h100", peft="lora rank=8", document_length=512, seq=4096
    )
    assert timed.candidate.spec.lora == Lora(rank=8)
    assert timed.request.cluster.execution.document_length == 512


def test_shorter_documents_take_less_attention_and_nothing_else_changes() -> None:
    times = [
        time_llama(None, document_length=length).candidate.seconds
        for length in (None, 4096, 1024, 256)
    ]
    assert times[0] == times[1]
    attention = [seconds.attention for seconds in times[1:]]
    assert attention == sorted(set(attention), reverse=True)
    # Attention computes the square of a document, for as many documents as a sample has.
    assert attention[1] < 0.5 * attention[0]
    assert len({seconds.matmul for seconds in times}) == 1


def test_screen_names_packed_documents(capsys: pytest.CaptureFixture[str]) -> None:
    question = "--model llama3-8b --gpu h100 --strategy dp8 --seq 4096 --document-length 512"
    sentence = "A sample packs documents of 512 tokens on average, and attention stays inside them."
    assert sentence in run(question, capsys)


def test_documents_of_unknown_or_impossible_length_are_refused() -> None:
    with pytest.raises(RequestError, match=r"--sft packs documents into a sample.*document-length"):
        build_request(replace(LLAMA, extra="--sft"))
    request = build_request(replace(LLAMA, extra="--sft", document_length=300))
    assert request.cluster.execution.document_length == 300
    with pytest.raises(RequestError, match="Documents of 5,000 tokens do not fit into a sample of"):
        build_request(replace(LLAMA, document_length=5000))


def lora_measurements() -> list[PublishedMeasurement]:
    """Return the published measurements with LoRA that can be predicted."""
    measurements = []
    for measurement in read_measurements()[0]:
        try:
            run = convert_measurement(measurement)
        except RefusedError:
            continue
        if run.spec.lora:
            measurements.append(measurement)
    return measurements


def test_published_runs_with_lora_train_the_adapters_of_their_recipes() -> None:
    ranks = {
        (item.source, spec.lora.rank, len(spec.lora.targets))
        for item in lora_measurements()
        if (spec := convert_measurement(item).spec).lora
    }
    assert ranks == {
        ("NVIDIA-NeMo/Megatron-Bridge", 16, 1),
        ("NVIDIA/dgxc-benchmarking", 16, 1),
        ("NVIDIA-NeMo/Automodel", 16, 4),
        ("NVIDIA-NeMo/Megatron-Bridge verification cards", 8, 2),
    }


def test_published_runs_with_lora_are_predicted_better_with_adapters_than_without() -> None:
    measurements = lora_measurements()
    residuals = compute_residuals(measurements).predicted
    assert len(residuals) == len(measurements) == 36
    # Before adapters had a time of their own, the mean was 10.8%.
    assert sum(abs(residual.error) for residual in residuals) / len(residuals) < 0.085


def test_a_row_states_its_adapters_in_the_column_peft() -> None:
    measurement = next(item for item in lora_measurements() if item.gpus == 1)
    stated = replace(measurement, facts=(*measurement.facts, ("peft", "lora rank=4 weights=nf4")))
    assert convert_measurement(stated).spec.lora == Lora(4, weights=FrozenWeights.NF4)
    trained = replace(measurement, facts=(*measurement.facts, ("peft", "none")))
    assert convert_measurement(trained).spec.lora is None
    wrong = replace(measurement, facts=(*measurement.facts, ("peft", "dora")))
    with pytest.raises(RefusedError, match="its column peft: There is no fine-tuning 'dora'"):
        convert_measurement(wrong)


def test_gradients_of_adapters_take_less_time_than_those_of_all_weights() -> None:
    timed = time_llama("lora", "dp16")
    spec, cluster = timed.candidate.spec, timed.request.cluster
    reduced, updated = synchronisation_seconds(spec, cluster, 1.0)
    all_reduced, all_updated = synchronisation_seconds(replace(spec, lora=None), cluster, 1.0)
    assert 0 < reduced < 0.1 * all_reduced
    assert 0 < updated < 0.1 * all_updated
