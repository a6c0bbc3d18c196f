import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from parakit.config.groups import Group
from parakit.config.hardware import device_by_key
from parakit.config.model import find_model, load_model, model_names
from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, flags_from_spec, spec_from_flags, spec_from_model
from parakit.config.strategy import Batch, Parallelism, parse_strategy, strategy_name
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.memory import find_peak_rank
from parakit.costs.tensors import rank_parameters, total_parameters
from parakit.planner.one_strategy import TimedStrategy, time_strategy
from parakit.planner.options import RequestError
from parakit.planner.readings.local_readings import add_rows, build_measurement_row
from parakit.planner.readings.reading_to_spec import convert_measurement
from parakit.planner.readings.table import read_measurements
from parakit.planner.request import build_request, list_ignored_flags
from parakit.planner.search import Request, evaluate_configuration
from parakit.planner.time.iteration import iteration_seconds
from tests.given import asked_of_plan, run
from tests.program import run_plan as main

STRATEGY = ["--model", "gpt2-large", "--gpu", "h200", "--strategy", "tp2", "--micro-batch", "2"]
SMALL = "--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64\n"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    data: dict[str, object] = json.loads(capsys.readouterr().out)
    return data


def test_named_strategy_has_the_time_that_the_search_computes(
    capsys: pytest.CaptureFixture[str], make_request: Callable[..., Request]
) -> None:
    data = answer(capsys, *STRATEGY, "--global-batch", "64", "--recompute", "full")
    request = make_request("gpt2-large", 2, "h200", 64)
    spec = spec_from_model(load_model("gpt2-large"), Parallelism(tensor=2), Batch(2, 64))
    spec = replace(spec, recompute=Recompute.FULL)
    layout = data["layout"]
    assert isinstance(layout, dict)
    assert layout["iteration_seconds"] == pytest.approx(
        evaluate_configuration(request, spec).seconds.total
    )
    assert layout["recompute"] == "full"
    assert data["what_if"] is None


def test_what_if_is_shown_in_text_json_and_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [*STRATEGY, "--global-batch", "64", "--what-if", "GPU=b200 MICRO_BATCH=4"]
    picture = tmp_path / "layout.svg"
    assert main([*arguments, "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "gpt2-large as tp2 on 2 H200" in text
    assert "times as fast" in text
    assert "pipeline bubble" not in text
    drawn = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "exposed TP" in drawn
    assert "B200" in drawn
    other = answer(capsys, *arguments)["what_if"]
    assert isinstance(other, dict)
    assert (other["gpu"], other["layout"]["micro_batch_size"]) == ("b200", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--strategy tp8pp16dp8 --gpus 512", "multiplies to 1,024 devices, not 512"),
        ("--strategy tp3 --global-batch 3", "which TP 3 does not divide"),
        ("--strategy xx2", "Unknown strategy 'xx2'"),
        ("--strategy dp2 --what-if GPUU=b200", 'did you mean "GPU="?'),
        (
            "--strategy dp2 --what-if MICRO_BATCH=0",
            '--what-if: "MICRO_BATCH=0" is not a whole number above 0',
        ),
        ("--strategy dp2 --what-if GPU=", '--what-if has "GPU=", which changes nothing'),
        ("--strategy dp2 --what-if SVG=a.svg", '--what-if has "SVG=a.svg", which changes nothing'),
        ("--strategy dp2 --extra=garbage", "--extra begins with garbage, which is no flag"),
        ("--strategy dp2 --extra=--sequence-parallel", "which --strategy says here"),
        ("--strategy dp2 --extra=--tensor-model-parallel-size=2", "which --strategy says here"),
        ("--strategy dp2 --extra=--use-megatron-fsdp", "which --strategy says here"),
        ("--gpus 2 --micro-batch 2", "--micro-batch is of one strategy; name it: --strategy"),
    ],
)
def test_impossible_strategy_gives_a_single_sentence(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(["--model", "gpt2-large", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--fp16 --bf16", "leave one of them out"),
        (
            "--lr 1e-4 --micro-batch-size 2",
            "--extra has --micro-batch-size, which --micro-batch says",
        ),
    ],
)
def test_flags_that_contradict_the_strategy_or_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], extra: str, message: str
) -> None:
    assert main([*STRATEGY, f"--extra={extra}"]) == 2
    assert message in capsys.readouterr().err


def test_what_if_columns_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parakit.planner.command.wide_console", lambda: Console(width=80))
    arguments = ["--model", "gpt3-175b", "--strategy", "sp8vpp16x6dp8-zero1", "--gpu", "a100"]
    assert main([*arguments, "--what-if", "GPU=b200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (total,) = (line for line in lines if line.startswith(" total"))
    assert total.count("(100%)") == 2


def test_any_args_file_is_a_model_and_extra_flags_change_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.args"
    file.write_text(SMALL)
    arguments = ["--model", str(file), "--strategy", "pp4", "--gpu", "h100", "--global-batch", "4"]
    assert main(arguments) == 2
    assert "6 layers, which PP 4 does not divide" in capsys.readouterr().err
    counted = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    data = answer(capsys, *arguments, f"--extra={counted} --no-mmap-bin-files")
    assert data["model"] == "mine"
    assert data["ignored_flags"] == ["--no-mmap-bin-files"]
    deeper = answer(capsys, *arguments, "--extra=--num-layers 8")
    assert deeper["ignored_flags"] == []


def test_what_if_with_expert_imbalance_is_compared_with_balance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "mixtral-8x7b", "--gpu", "h100", "--strategy", "sp2ep8dp4-zero1"]
    arguments += ["--global-batch", "64", "--what-if", "IMBALANCE=1.3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "sp2ep8dp4-zero1 on 64 H100 SXM 80 GB (8 nodes, " in text
    assert "sp2ep8dp4-zero1 on 64 H100 SXM 80 GB, imbalance 1.3" in text
    balanced = answer(capsys, *arguments)
    busier = balanced["what_if"]
    assert isinstance(balanced["layout"], dict)
    assert isinstance(busier, dict)
    assert busier["layout"]["memory_bytes"] > balanced["layout"]["memory_bytes"]
    limit = "--moe-router-force-load-balancing --moe-expert-capacity-factor 1.0"
    limited = answer(capsys, *arguments[:-2], f"--extra={limit}")
    assert limited["ignored_flags"] == []
    assert isinstance(limited["layout"], dict)
    assert limited["layout"]["iteration_seconds"] == balanced["layout"]["iteration_seconds"]


def test_cpu_ranks_are_planned_with_the_flags_of_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "gpt2-tiny", "--strategy", "cp2", "--gpu", "cpu"]
    assert main(arguments) == 0
    assert "parakit train-cp2-gpt2-tiny-2cpu\n" in capsys.readouterr().out
    assert time_strategy(asked_of_plan(arguments)).candidate.spec.cp_comm_type == "all_gather"
    arguments[3:] = ["dp2", "--gpu", "cpu", "--micro-batch", "2"]
    timed = time_strategy(asked_of_plan(arguments))
    flags = [*timed.request.model.flags, "--transformer-impl", "local"]
    flags += ["--micro-batch-size", "2", "--global-batch-size", "4"]
    trained = spec_from_flags(flags, 2, DeviceKind.CPU)
    seconds = iteration_seconds(trained, timed.request.cluster).total
    assert timed.candidate.seconds.total == pytest.approx(seconds)


def test_overlapping_gradient_reduction_makes_a_strategy_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "gpt3-13b", "--strategy", "sp4dp64-zero1", "--global-batch", "256"]
    plain = answer(capsys, *arguments)["layout"]
    overlapped = answer(capsys, *arguments, "--extra=--overlap-grad-reduce --overlap-param-gather")
    beside = overlapped["layout"]
    assert isinstance(plain, dict)
    assert isinstance(beside, dict)
    assert beside["time"]["gradient_sync"] < plain["time"]["gradient_sync"]
    assert overlapped["ignored_flags"] == []


def test_pipeline_layout_flag_sets_virtual_stages_and_the_command_omits_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "gpt3-13b", "--strategy", "tp2pp2", "--global-batch", "8"]
    laid = "--extra=--pipeline-model-parallel-layout Et*9|(t*10|)*2t*11L"
    layout = answer(capsys, *arguments, laid)["layout"]
    assert isinstance(layout, dict)
    assert layout["parallelism"]["virtual_stages"] == 2
    assert "make train-tp2pp2-gpt3-13b-4gpu " in layout["command"]
    assert main([*arguments[:2], "--strategy", "tp2pp3", *arguments[4:], laid]) == 2
    assert "cannot place on PP 3: it has 4 stages; use" in capsys.readouterr().err
    assert main([*arguments, f"{laid[:-1]}mL"]) == 2
    assert "has 1 MTP layers (m) and gpt3-13b has 0;" in capsys.readouterr().err
    assert main(["--model", "gpt3-13b", "--gpus", "8", laid]) == 2
    assert "which is of one strategy; name it: --strategy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("gpt3-13b", "--multi-latent-attention"),
        ("llama3-8b", "--mtp-num-layers 1"),
        ("moe-4m", "--moe-shared-expert-intermediate-size 4096"),
        ("moe-4m", "--cuda-graph-impl local"),
        ("gpt3-13b", "--attention-backend unfused"),
        ("gpt3-13b", "--hidden-dropout 0"),
        ("llama3-8b", "--use-precision-aware-optimizer --exp-avg-dtype bf16"),
        ("llama3-8b", "--grad-reduce-in-bf16"),
    ],
)
def test_flag_outside_the_ignored_list_changes_the_prediction(
    capsys: pytest.CaptureFixture[str], model: str, extra: str
) -> None:
    arguments = [
        "--model",
        model,
        "--strategy",
        "dp8-zero1",
        "--gpu",
        "h100",
        "--global-batch",
        "8",
    ]
    plain, changed = answer(capsys, *arguments), answer(capsys, *arguments, f"--extra={extra}")
    assert changed["ignored_flags"] == []
    assert seconds(changed) != seconds(plain)


def seconds(data: dict[str, object]) -> float:
    layout = data["layout"]
    assert isinstance(layout, dict)
    return float(layout["iteration_seconds"])


def test_search_applies_extra_flags_lists_ignored_ones_and_prints_all_in_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "gpt2-large", "--gpus", "4", "--gpu", "h100"]
    extra = "--overlap-grad-reduce --app-tag-run-name --recompute-granularity full"
    plain, changed = answer(capsys, *arguments), answer(capsys, *arguments, f"--extra={extra}")
    assert (plain["ignored_flags"], changed["ignored_flags"]) == (
        [],
        ["--app-tag-run-name", "--recompute-granularity"],
    )
    assert (plain["unknown_flags"], changed["unknown_flags"]) == ([], ["--app-tag-run-name"])
    before, after = plain["winner"], changed["winner"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert after["iteration_seconds"] < before["iteration_seconds"]
    assert "--overlap-grad-reduce --app-tag-run-name" in after["command"]


def test_flag_that_megatron_does_not_have_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.args"
    file.write_text(f"{SMALL}--swigluu\n")
    for variables in ({"MODEL": str(file)}, {"MODEL": "gpt2-tiny", "EXTRA": "--swigluu"}):
        for target, more in (("plan", {"GPUS": "2"}), ("dryrun", {})):
            if target != "dryrun" or "EXTRA" not in variables:
                with pytest.raises(ValueError, match=r"has no flag --swigluu; .* mean --swiglu\?"):
                    run(target, variables | more)


def test_ignored_flags_of_a_model_file_are_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.args"
    model_flags = (
        "--moe-input-jitter-eps 0.1 --tensor-model-parallel-size 8 --lr 1e-4 --overlap-grad-reduce"
    )
    file.write_text(SMALL + model_flags.replace(" --", "\n--") + "\n--moe-layer-freq 2\n")
    arguments = ["--model", str(file), "--strategy", "dp4", "--gpu", "h100", "--global-batch", "4"]
    named = ["--moe-input-jitter-eps", "--tensor-model-parallel-size"]
    assert answer(capsys, *arguments)["ignored_flags"] == named


def test_reason_for_ignoring_a_flag_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.args"
    file.write_text(f"{SMALL}--tensor-model-parallel-size 8\n")
    extra = "--extra=--attention-softmax-in-fp32 --cp-comm-type a2a --app-tag-run-name"
    assert main(["--model", str(file), "--gpus", "4", "--gpu", "h100", extra]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "Not counted --tensor-model-parallel-size (--strategy sets it), "
        "--attention-softmax-in-fp32 (no formula counts it), "
        "--cp-comm-type (a search chooses it; --strategy takes it) and "
        "--app-tag-run-name (not known to this kit)."
    ) in output


@pytest.mark.parametrize("model", model_names())
def test_every_flag_of_the_kits_models_is_part_of_the_prediction(
    make_request: Callable[..., Request], model: str
) -> None:
    request = make_request(model, 2, "h200", 64)
    assert list_ignored_flags(request, is_one_strategy=True) == ()


def test_default_node_is_the_nvlink_domain_of_the_device(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "gpt3-13b", "--strategy", "sp8dp9-zero1", "--gpu", "gb200"]
    arguments += ["--global-batch", "9"]
    whole = answer(capsys, *arguments)
    assert seconds(whole) == seconds(answer(capsys, *arguments, "--gpus-per-node", "72"))
    assert seconds(whole) < seconds(answer(capsys, *arguments, "--gpus-per-node", "8"))
    searched = asked_of_plan(["--model", "gpt2-large", "--gpus", "72", "--gpu", "gb200"])
    assert build_request(searched).cluster.nodes == 1


def config(tmp_path: Path, **fields: object) -> str:
    folder = tmp_path / "some-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder / "config.json")


def test_hugging_face_config_gives_the_same_model_as_its_args_file(tmp_path: Path) -> None:
    model = find_model(config(tmp_path, **LLAMA))
    assert (model.name, model.dtype, model.dropout) == ("some-model", "bf16", 0)
    assert model.shape == load_model("llama3-8b").shape
    gpt2 = {"model_type": "gpt2", "n_layer": 36, "n_embd": 1280, "n_head": 20, "n_positions": 1024}
    converted = find_model(config(tmp_path, **gpt2, vocab_size=50257))
    assert (converted.shape.positions, converted.shape.tied_embeddings, converted.dropout) == (
        1024,
        True,
        0.1,
    )
    assert round(total_parameters(converted.shape) / 1e6) == 774
    qwen = find_model(config(tmp_path, **{**LLAMA, "model_type": "qwen2"}))
    assert qwen.shape.qkv_bias
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    mixtral = find_model(config(tmp_path, **{**LLAMA, **experts, "vocab_size": 32000}))
    assert round(total_parameters(mixtral.shape) / 1e9, 1) == 46.7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba', which has no mapping"),
        ({"model_type": "llama", "hidden_size": 8}, "lacks the field"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window of 4096"),
        ({**LLAMA, "hidden_size": "big"}, 'hidden_size = "big"; use a whole number of 1 or more'),
        ({**LLAMA, "hidden_size": None}, "hidden_size = null; use a whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers = 0; use a whole number"),
        ({**LLAMA, "num_attention_heads": 5000}, "--kv-channels 0; use 1 or more"),
        ({**LLAMA, "num_key_value_heads": 7}, "which 7 query groups do not divide"),
        ({**LLAMA, "rope_theta": "x"}, 'rope_theta = "x"; use a number'),
        ({**LLAMA, "rope_scaling": [1]}, "use an object or null"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "use float16 or bfloat16 or float32"),
    ],
)
def test_unsupported_hugging_face_config_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_model(config(tmp_path, **fields))


WHOLE_EXPERTS = "--expert-tensor-parallel-size 1"


def mixtral(strategy: str, extra: str = "") -> TimedStrategy:
    devices = ["--gpu", "h100", "--gpus", "8", "--strategy", strategy, f"--extra={extra}"]
    batch = ["--micro-batch", "1", "--global-batch", "16"]
    return time_strategy(asked_of_plan(["--model", "mixtral-8x7b", *devices, *batch]))


@pytest.mark.parametrize(
    ("strategy", "extra", "experts", "copies", "gathered"),
    [
        # 32 layers of 2 experts of 3 matrices of 4,096 x 14,336, over TP 2.
        ("sp2ep4", "", 5_637_144_576, 1, 2 * 4096 * 4096 * 2),
        ("sp2ep4", "--expert-tensor-parallel-size 2", 5_637_144_576, 1, 2 * 4096 * 4096 * 2),
        ("sp2ep4", WHOLE_EXPERTS, 11_274_289_152, 2, 0),
        ("sp2ep4-etp1", "", 11_274_289_152, 2, 0),
        # EP 8 over TP 2 and DP 4: one whole expert a rank.
        ("sp2ep8-etp1", "", 5_637_144_576, 1, 0),
        ("sp2ep8", WHOLE_EXPERTS, 5_637_144_576, 1, 0),
    ],
)
def test_expert_tensor_parallelism_is_set_by_flag_or_strategy_name(
    strategy: str, extra: str, experts: int, copies: int, gathered: int
) -> None:
    timed = mixtral(strategy, extra)
    spec = timed.candidate.spec
    assert rank_parameters(spec).experts == experts
    assert (spec.parallelism.expert_data, timed.ignored_flags) == (copies, ())
    calls = rank_collectives(spec)
    inside = [call.payload_bytes for call in calls if call.group is Group.EXPERT_TENSOR]
    assert max(inside, default=0) == gathered
    # A rank's 2,048 tokens go to two experts each: hidden states of 4,096 in bf16.
    (exchanged,) = {
        call.payload_bytes
        for call in calls
        if call.group is Group.EXPERT and call.payload_bytes > 2**20
    }
    assert exchanged == 2048 * 2 * 4096 * 2


def test_plan_differs_between_full_and_tensor_parallel_experts() -> None:
    split, whole = mixtral("sp2ep4"), mixtral("sp2ep4", WHOLE_EXPERTS)
    assert whole.candidate.memory.total > 1.3 * split.candidate.memory.total
    assert whole.candidate.seconds.expert_parallel < 0.6 * split.candidate.seconds.expert_parallel
    assert whole.candidate.seconds.optimizer > 1.5 * split.candidate.seconds.optimizer


@pytest.mark.parametrize(
    "strategy", ["sp2ep4", "sp2ep4-etp1", "sp2ep8-etp1-zero1", "sp4pp2ep2-etp2"]
)
def test_plan_and_validate_predict_the_same_time_for_a_run(tmp_path: Path, strategy: str) -> None:
    model, split = load_model("mixtral-8x7b"), parse_strategy(strategy, 8)
    planned = replace(spec_from_model(model, split, Batch(1, 16)), dropout=0.0)
    # Plans count no copy of the attention mask, which their commands avoid if it is large.
    argv = (
        *model.flags,
        *("--moe-token-dispatcher-type", "alltoall", "--no-create-attention-mask-in-dataloader"),
        *flags_from_spec(planned),
    )
    row = build_measurement_row(
        spec_from_flags(argv, 8, DeviceKind.GPU, model.name),
        argv,
        device_by_key("h100"),
        "run",
        1.0,
    )
    add_rows(tmp_path / "mine.csv", [row])
    (measurement,) = read_measurements(tmp_path / "mine.csv")[0]
    validated = convert_measurement(measurement)
    flag = f"--expert-tensor-parallel-size {split.effective_expert_tensor}"
    plain = strategy.replace("-etp1", "").replace("-etp2", "")
    for timed in (mixtral(strategy), mixtral(plain, flag)):
        candidate = timed.candidate
        assert candidate.spec.parallelism == validated.spec.parallelism == split
        assert candidate.memory == find_peak_rank(validated.spec)[1]
        # The kit's launcher groups experts, and `row_of` keeps no flag that says so.
        grouped = replace(validated.cluster.execution, grouped_experts=True)
        seconds = iteration_seconds(validated.spec, replace(validated.cluster, execution=grouped))
        assert candidate.seconds == seconds


@pytest.mark.parametrize(
    ("strategy", "extra", "message"),
    [
        (
            "sp2ep4-etp2",
            WHOLE_EXPERTS,
            "splits each expert over 2 and .* over 1; leave one of them out",
        ),
        ("sp2ep4", "--expert-tensor-parallel-size 0", "size is 0; use 1 or more"),
        ("sp2ep4", "--expert-tensor-parallel-size 3", "DP x CP x TP = 8 and does not divide it"),
        ("sp2ep8", "", "multiplies to 16 devices, not 8"),
    ],
)
def test_impossible_expert_tensor_parallelism_gives_a_single_sentence(
    strategy: str, extra: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        mixtral(strategy, extra)


def test_expert_tensor_parallelism_is_refused_for_a_dense_model() -> None:
    arguments = ["--model", "gpt2-large", "--strategy", "tp2", f"--extra={WHOLE_EXPERTS}"]
    with pytest.raises(RequestError, match="1 is of experts and gpt2-large is dense; leave it out"):
        time_strategy(asked_of_plan(arguments))


def test_search_applies_the_expert_tensor_parallel_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "mixtral-8x7b", "--gpu", "h100", "--gpus", "16", "--global-batch", "8"]
    plan = answer(capsys, *arguments, f"--extra={WHOLE_EXPERTS}")
    assert plan["ignored_flags"] == []
    ranked = plan["ranked"]
    assert isinstance(ranked, list)
    splits = [Parallelism(**candidate["parallelism"]) for candidate in ranked]
    assert all(split.effective_expert_tensor == 1 for split in splits)
    over_tensor = [split for split in splits if split.data % split.expert]
    assert over_tensor, "EP lies over TP where experts are whole"
    for candidate, split in zip(ranked, splits, strict=True):
        assert candidate["strategy"] == strategy_name(split)
        assert WHOLE_EXPERTS not in candidate["command"]  # The strategy's name says it.


def test_memory_above_device_limit_states_reclaimable_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "--model",
        "gpt3-1.3b",
        "--strategy",
        "dp8",
        "--micro-batch",
        "1",
        "--global-batch",
        "8",
        # The replay of the allocator does not know the fused loss, and states no reclaimable memory.
        "--extra=--cross-entropy-loss-fusion",
    ]
    assert main([*arguments, "--gpu", "v100", "--dtype", "fp16"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    close = r"32\.6 GiB, 102% of the device, which is close: try it"
    reason = r"\(\d\.\d GiB are blocks that PyTorch gives back only when memory runs out, and"
    assert re.search(f"{close} {reason} predictions miss by up to 3%", text)
    assert main([*arguments, "--gpu", "a100"]) == 0
    assert "close" not in capsys.readouterr().out


def test_time_is_printed_with_errors_of_similar_published_measurements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", "gpt3-175b", "--strategy", "tp8pp16dp8", "--micro-batch", "1"]
    assert main([*arguments, "--gpu", "a100", "--global-batch", "1536"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"Expect .* to .* s with 80% probability, or .* to .* s with 95%, by the",
        text,
    )
    assert "A100" in text.split("The nearest measurement is ")[1]
    assert main(["--model", "gpt2-large", "--strategy", "dp2", "--gpu", "rtx6000-ada"]) == 0
    assert "No published measurement on" in " ".join(capsys.readouterr().out.split())
