import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from parakit.artifacts.run import RUN_FILE, MegatronEntry, decode_run
from parakit.config.files import ROOT
from parakit.config.flags import Flags, count_end_of_document_in_vocabulary, null_tokenizer_flags
from parakit.config.model import load_model
from parakit.config.run import DeviceKind
from parakit.config.strategy import (
    PUBLISHED_STRATEGIES,
    Batch,
    Parallelism,
    StrategyError,
    parse_strategy,
    strategy_flags,
)
from parakit.launch.compose import Launch, compose_launch
from parakit.launch.flags import initial_checkpoint_flags
from parakit.launch.job import Job, parse_target
from parakit.launch.options import Options
from parakit.launch.train import compose_job


def composed(name: str, **options: object) -> Launch:
    target = parse_target(name)
    return compose_job(target.with_options(replace(Options(), **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", PUBLISHED_STRATEGIES)
def test_a_script_passes_the_flags_of_the_grammar(strategy: str) -> None:
    text = (ROOT / f"examples/gpt3/train_{strategy}.sh").read_text()
    command = text.split("parakit run ", 1)[1].replace("\\\n", " ")
    devices = 1 if strategy == "baseline" else 2
    arguments = command.split()
    assert arguments[0] == strategy
    flags = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    assert tuple(flags) == strategy_flags(parse_strategy(strategy, devices))


@pytest.mark.parametrize(
    ("target", "batch"),
    [
        ("train-baseline-gpt2-large-1gpu", Batch(32, 32)),
        ("train-dp2-gpt2-large-2gpu", Batch(32, 64)),
        ("train-sp2-gpt2-large-2gpu", Batch(64, 64)),
        ("train-pp2-gpt2-large-2gpu", Batch(64, 64)),
    ],
)
def test_batches_are_the_published_ones(target: str, batch: Batch) -> None:
    launch = composed(target)
    assert launch.spec.batch == batch
    flags = Flags(launch.flags)
    assert flags.integer("--micro-batch-size", 0) == batch.micro_batch_size
    assert flags.integer("--global-batch-size", 0) == batch.global_batch_size


def test_a_cpu_run_computes_in_fp32_whatever_the_model_says() -> None:
    launch = composed("train-dp2-gpt2-large-2cpu")
    assert (launch.spec.dtype, "--fp16" in launch.flags) == ("fp32", False)
    assert "--fp16" in composed("train-dp2-gpt2-large-2gpu").flags


def test_variables_override_the_recipe_and_each_flag_is_given_once() -> None:
    launch = composed(
        "train-pp2-gpt2-tiny-2cpu", micro_batch_size=2, dropout=0.1, extra=("--lr", "5")
    )
    names = [flag for flag in launch.flags if flag.startswith("--")]
    assert len(names) == len(set(names))
    flags = Flags(launch.flags)
    assert flags.text("--micro-batch-size") == "2"
    assert flags.text("--hidden-dropout") == flags.text("--attention-dropout") == "0.1"
    assert flags.text("--lr") == "5"


def test_iterations_are_an_exit_interval_and_never_change_the_order_of_samples() -> None:
    short, long = (composed("train-dp2-gpt2-tiny-2cpu", iterations=n) for n in (3, 50))
    assert Flags(short.flags).text("--exit-interval") == "3"
    assert Flags(short.flags).text("--train-iters") == Flags(long.flags).text("--train-iters")


def test_a_run_longer_than_its_model_s_file_says_has_the_samples_for_it() -> None:
    assert Flags(composed("train-dp2-gpt2-tiny-2cpu").flags).text("--train-iters") == "500"
    longer = composed("train-dp2-gpt2-tiny-2cpu", iterations=600)
    assert Flags(longer.flags).text("--train-iters") == "600"
    shorter = composed("train-dp2-gpt2-tiny-2cpu", iterations=600, extra=("--train-iters", "9"))
    assert Flags(shorter.flags).text("--train-iters") == "9"


def test_cpu_runs_share_their_start_by_default_and_gpu_runs_do_not() -> None:
    tiny = [composed(f"train-{s}-gpt2-tiny-2cpu").initial_checkpoint for s in ("dp2", "tp2")]
    assert tiny[0] == tiny[1] is not None
    assert composed("train-dp2-gpt2-tiny-2cpu", shared_start=False).initial_checkpoint is None
    assert composed("train-dp2-gpt2-tiny-2cpu", seed=7).initial_checkpoint != tiny[0]
    assert composed("train-dp2-gpt2-large-2gpu").initial_checkpoint is None


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_a_shared_start_keeps_the_padded_vocabulary_whatever_the_tensor_degree(tensor: int) -> None:
    flags = Flags(initial_checkpoint_flags(Path("c"), Parallelism(tensor=tensor), 128))
    multiple = flags.integer("--make-vocab-size-divisible-by", 0)
    shape = replace(load_model("gpt2-tiny").shape, vocabulary_multiple=multiple)
    assert shape.padded_vocabulary(tensor) == 50304


@pytest.mark.parametrize(
    ("version", "size"),
    [("0.15.0rc2", 50256), ("0.17.1", 50256), ("0.18.2", 50257), ("0.19.0", 50257)],
)
def test_the_null_tokenizer_gets_the_size_that_gives_gpt2s(version: str, size: int) -> None:
    flags = null_tokenizer_flags(50257, version)
    assert flags == ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(size))
    assert (
        Flags(count_end_of_document_in_vocabulary(flags, version)).integer("--vocab-size", 0)
        == 50257
    )


def test_a_run_of_an_older_megatron_has_the_models_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = MegatronEntry("e.py", "0.17.1")
    monkeypatch.setattr("parakit.launch.compose.find_entry", lambda *_: older)
    launch = composed("train-tp2-gpt2-tiny-2cpu")
    assert Flags(launch.flags).integer("--vocab-size", 0) == 50256
    assert launch.spec.shape.vocabulary == 50257
    run = next((ROOT / "tests/golden/runs").glob(f"*-tp2-gpt2-tiny-2cpu/{RUN_FILE}"))
    data = msgspec.json.decode(run.read_bytes())
    data |= {"argv": launch.flags, "entry": msgspec.to_builtins(older)}
    assert decode_run(data).spec.shape.vocabulary == 50257


def test_fsdp_leaves_the_connection_limit_unset() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in composed("train-tp2-gpt2-tiny-2cpu").environment
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in composed("train-zero2-gpt2-tiny-2cpu").environment


def test_degrees_set_by_hand_count_in_the_record() -> None:
    extra = Options(extra=("--context-parallel-size", "2"))
    job = Job("dp4", load_model("gpt2-tiny"), 4, DeviceKind.CPU, extra)
    launch = compose_launch(job)
    assert (launch.spec.parallelism.data, launch.spec.parallelism.context) == (2, 2)
    with pytest.raises(StrategyError, match="does not divide 3"):
        compose_launch(job.with_strategy("dp3", 3))


def test_a_dry_run_prints_the_command_and_writes_nothing(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "RUNS": str(tmp_path / "runs")}
    command = ("make", "-s", "train-sp2-gpt2-tiny-2cpu")
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "--tensor-model-parallel-size 2 --sequence-parallel" in answer.stdout
    assert answer.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_shape_in_extra_is_the_runs_own_with_starting_weights_of_its_own() -> None:
    plain = composed("train-pp2-gpt2-tiny-2cpu")
    shallow = composed("train-pp2-gpt2-tiny-2cpu", extra=("--num-layers", "2"))
    assert (plain.model.shape.layers, shallow.model.shape.layers) == (4, 2)
    assert shallow.initial_checkpoint != plain.initial_checkpoint
    same = composed("train-tp2-gpt2-tiny-2cpu", extra=("--num-layers", "2"))
    assert same.initial_checkpoint == shallow.initial_checkpoint


def test_torch_fsdp2_runs_without_the_fusion_that_upstream_refuses_with_it() -> None:
    launch = composed("train-fsdp2-gpt2-large-2gpu", runtime=None)
    assert Flags(launch.flags).has("--no-gradient-accumulation-fusion")
