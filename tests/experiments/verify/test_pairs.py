"""Pairs of launches that a verification compares, and requests that it refuses before training."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from parakit.artifacts.capture import START_WEIGHT, CaptureStage, TensorKey
from parakit.artifacts.verdict import VerifyOutcome
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.flags import Flags, values_by_flag
from parakit.config.run import Backend
from parakit.config.setting import SettingError
from parakit.experiments.verify import pairs
from parakit.experiments.verify.command import keep_log, run_verification, train_and_judge
from parakit.experiments.verify.pairs import LaunchPair, Verification, compose_pair, parse_pair
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.supervise.warm import WarmPool
from tests.given import given
from tests.small import write_documents
from tests.verify import captures

Composer = Callable[..., Verification]


@pytest.fixture
def composed(tmp_path: Path) -> Composer:
    def compose_named(
        name: str, *, iterations: int | None = None, extra: str = "", **b: object
    ) -> Verification:
        options = Options(
            data="owt-ds/any", runs=tmp_path, iterations=iterations, extra=tuple(extra.split())
        )
        return compose_pair(LaunchPair(parse_target(f"train-{name}", options), **b))  # type: ignore[arg-type]

    return compose_named


def test_dropout_is_disabled_if_the_reference_draws_other_masks(
    composed: Composer,
) -> None:
    def hidden(**variables: str) -> set[str]:
        verified = composed("tp2-gpt3-64m-2cpu", **variables)
        return {Flags(launch.flags).text("--hidden-dropout") for launch in verified.launches}

    assert hidden() == {"0.0"}
    assert hidden(reference="tp2") == {
        ""
    }  # With Megatron's default of 0.1 both sides draw the same masks.
    assert hidden(extra="--hidden-dropout 0.2") == {"0.2"}


def test_strategy_and_reference_draw_from_the_same_blend(tmp_path: Path) -> None:
    blend = " ".join(
        f"{weight} {write_documents(tmp_path / name, [300] * 40)}"
        for weight, name in (("0.3", "a"), ("0.7", "b"))
    )
    options = Options(data=blend, runs=tmp_path)
    verified = compose_pair(LaunchPair(parse_target("train-tp2-gpt2-tiny-2cpu", options)))
    drawn = [values_by_flag(launch.arguments())["--data-path"] for launch in verified.launches]
    assert drawn == [["0.3", str(tmp_path / "a"), "0.7", str(tmp_path / "b")]] * 2


@pytest.mark.parametrize("where", ["extra", "flags"])
def test_both_logs_print_every_iteration_so_that_every_reported_loss_is_compared(
    composed: Composer, where: str
) -> None:
    interval = "--log-interval 100"
    variables_of_make: dict[str, Any] = {
        where: interval if where == "extra" else tuple(interval.split())
    }
    verified = composed("tp2-gpt2-tiny-2cpu", **variables_of_make)
    intervals = {Flags(launch.flags).text("--log-interval") for launch in verified.launches}
    assert intervals == {"1"}


@pytest.mark.parametrize("comm_type", ["a2a", "a2a+p2p"])
def test_context_parallelism_that_cpu_attention_ignores_is_refused_wherever_a_pair_is_composed(
    composed: Composer, comm_type: str
) -> None:
    with pytest.raises(LaunchError, match=r"^--cp-comm-type a2a.* chooses how Transformer Engine"):
        composed("cp2-gpt2-tiny-2cpu", extra=f"--cp-comm-type {comm_type}")
    with pytest.raises(LaunchError, match=r"^--cp-comm-type a2a.* chooses how Transformer Engine"):
        composed("cp2-gpt2-tiny-2cpu", flags=("--cp-comm-type", comm_type))


def test_reference_has_an_untied_output_layer_if_the_strategy_has_one(
    composed: Composer,
) -> None:
    untied = "--untie-embeddings-and-output-weights"
    both = composed("fsdp2-gpt2-tiny-2cpu")
    assert all(untied in launch.flags for launch in both.launches)
    assert both.strategy.initial_checkpoint == both.reference.initial_checkpoint
    assert not any(untied in launch.flags for launch in composed("tp2-gpt2-tiny-2cpu").launches)


def test_megatron_fsdp_with_tensor_parallelism_is_refused(
    composed: Composer,
) -> None:
    with pytest.raises(LaunchError, match="verify the two apart"):
        composed("tp2dp2-zero2-gpt2-tiny-4cpu")


def test_variables_select_how_the_strategy_differs_from_its_reference() -> None:
    target = "verify-tp2-gpt2-tiny-2cpu"
    asked = {"REFERENCE": "tp2", "EXTRA_B": "--micro-batch-size 1", "RESUMED": "1"}
    pair = parse_pair(target, given(target, asked), Options())
    assert pair == LaunchPair(pair.job, "tp2", ("--micro-batch-size", "1"), None, "1")
    assert pair.target == target
    with pytest.raises(SettingError, match="--megatron-lm-b: /nowhere is not a folder with"):
        given(target, {"ARGS": "--megatron-lm-b /nowhere"})


def test_strategy_is_compared_with_one_rank_of_otherwise_equal_flags(composed: Composer) -> None:
    pair = composed("tp2-gpt2-tiny-2cpu")
    assert (pair.reference.devices, pair.strategy.devices, pair.iteration) == (1, 2, 2)
    assert (pair.mode, pair.saving, pair.pair.reference_strategy) == (None, None, "baseline")


def test_other_micro_batch_is_a_separate_mode_with_the_same_global_batch(
    composed: Composer,
) -> None:
    pair = composed("dp2-gpt2-tiny-2cpu", flags=("--micro-batch-size", "1"))
    assert pair.mode == "micro batches of 1 against 2 at one global batch"
    sizes = [launch.spec.batch.global_batch_size for launch in (pair.strategy, pair.reference)]
    assert sizes == [12, 12]


@pytest.mark.parametrize(
    ("extra", "alike", "refused"),
    [
        ("--moe-expert-capacity-factor 1.0", "ep2", "64 in the strategy and 128 in its reference"),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
            "dp2",
            r"by sinkhorn .* 64 in the strategy and 128",
        ),
    ],
)
def test_experts_with_balance_per_rank_are_compared_only_with_equal_tokens_per_rank(
    composed: Composer, extra: str, alike: str, refused: str
) -> None:
    assert composed(f"{alike}-moe-tiny-2cpu", extra=extra).strategy.devices == 2
    assert composed("sp2-moe-tiny-2cpu", extra=extra, reference="cp2").strategy.devices == 2
    with pytest.raises(ValueError, match=refused):
        composed("sp2-moe-tiny-2cpu", extra=extra)


def test_experts_with_global_balance_are_compared_only_with_equal_data_parallel_ranks(
    composed: Composer,
) -> None:
    extra = "--moe-router-load-balancing-type global_aux_loss"
    assert composed("sp2-moe-tiny-2cpu", extra=extra).strategy.devices == 2
    with pytest.raises(ValueError, match="4 samples at once against 2 train something else"):
        composed("ep2-moe-tiny-2cpu", extra=extra)


@pytest.mark.parametrize(
    ("name", "reference", "batch"),
    [("pp2", "dp2", 12), ("dp2", "tp2", 12), ("tp2", "vpp2", 8), ("dp2", "vpp2", 16)],
)
def test_global_batch_is_divisible_by_ranks_of_strategy_and_reference(
    composed: Composer, name: str, reference: str, batch: int
) -> None:
    pair = composed(f"{name}-gpt2-tiny-2cpu", reference=reference)
    sizes = {launch.spec.batch.global_batch_size for launch in pair.launches}
    assert sizes == {batch}


def test_an_interleaved_reference_of_a_longer_pipeline_gets_a_multiple_of_its_stages() -> None:
    job = parse_target("train-pp5-gpt2-tiny-5cpu", Options())
    # 5 micro batches, one per stage of the strategy, would be no multiple of the reference's 2 stages.
    assert pairs._choose_micro_batches(LaunchPair(job, "vpp2")) == 8


def test_resumed_run_is_compared_with_an_uninterrupted_run_of_its_strategy(
    composed: Composer, tmp_path: Path
) -> None:
    pair = composed("tp2-gpt2-tiny-2cpu", resumed="1")
    assert pair.saving is not None
    assert (pair.pair.reference_strategy, pair.reference.devices) == ("tp2", 2)
    assert pair.mode == "resumed after iteration 2 from a checkpoint of tp2 against undisturbed"
    saved = Flags(pair.add_saving_flags(pair.saving, tmp_path / "c").flags)
    assert (saved.text("--exit-interval"), saved.text("--save-interval")) == ("2", "2")
    assert saved.text("--save") == str(tmp_path / "c")
    resumed = Flags(pair.add_resuming_flags(pair.strategy, tmp_path / "c").flags)
    assert (resumed.text("--load"), resumed.text("--ckpt-step")) == (str(tmp_path / "c"), "2")
    assert resumed.text("--exit-interval") == "3"
    assert not resumed.has("--finetune")
    assert not resumed.has("--no-load-optim")


def test_run_may_resume_from_the_checkpoint_of_another_strategy(composed: Composer) -> None:
    pair = composed("pp2-gpt2-tiny-2cpu", resumed="baseline", iterations=4)
    assert pair.saving is not None
    assert (pair.saving.devices, pair.strategy.devices, pair.pair.reference_strategy) == (
        1,
        2,
        "pp2",
    )
    with pytest.raises(ValueError, match="ITERS=2 or more"):
        composed("pp2-gpt2-tiny-2cpu", resumed="1", iterations=1)
    with pytest.raises(ValueError, match="xp2"):
        composed("pp2-gpt2-tiny-2cpu", resumed="xp2")


def test_the_native_backend_is_one_rank_and_has_no_bf16(composed: Composer) -> None:
    pair = composed("tp2-gpt2-tiny-2cpu", reference="native")
    assert (pair.reference.spec.backend, pair.reference.devices) == (Backend.NATIVE, 1)
    assert pair.mode == "Megatron against plain PyTorch"
    with pytest.raises(ValueError, match="REFERENCE=native keeps fp32 weights"):
        composed("tp2-gpt2-tiny-2cpu", reference="native", extra="--bf16")


def test_weights_in_flat_buffers_are_no_reference(composed: Composer) -> None:
    with pytest.raises(ValueError, match="The reference zero3 keeps its weights in flat buffers"):
        composed("dp2-gpt2-tiny-2cpu", reference="zero3")
    assert composed("zero3-gpt2-tiny-2cpu").pair.reference_strategy == "baseline"


def test_other_megatron_starts_with_the_weights_of_the_reference(
    composed: Composer, tmp_path: Path
) -> None:
    fork = tmp_path / "fork"
    (fork / "megatron/core").mkdir(parents=True)
    (fork / "pretrain_gpt.py").touch()
    (fork / "megatron/core/package_info.py").write_text(
        "MAJOR = 0\nMINOR = 18\nPATCH = 2\nPRE_RELEASE = ''\n"
    )
    pair = composed("tp2-gpt2-tiny-2cpu", reference="tp2", megatron_lm=fork)
    assert pair.mode is not None
    assert pair.mode.startswith("Megatron 0.18.2 against Megatron 0.")
    assert pair.strategy.initial_checkpoint == pair.reference.initial_checkpoint
    loaded = [Flags(launch.flags).text("--load") for launch in (pair.strategy, pair.reference)]
    assert loaded[0] == loaded[1]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--num-layers 2", "the model's layers is 2 in the strategy and 4 in its reference"),
        ("--seed 7", "--seed is 7 in the strategy and 1234"),
        ("--bf16", "--bf16 is True in the strategy and False"),
        ("--global-batch-size 24", "--global-batch-size is 24 in the strategy and 6"),
    ],
)
def test_runs_of_different_work_are_refused_with_the_field(
    composed: Composer, flags: str, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        composed("tp2-gpt2-tiny-2cpu", flags=tuple(flags.split()))


def test_other_micro_batches_of_balanced_experts_are_refused(composed: Composer) -> None:
    flags = ("--micro-batch-size", "1")
    with pytest.raises(ValueError, match="balances its experts over each micro batch"):
        composed("baseline-moe-tiny-1cpu", flags=flags)
    assert composed("baseline-moe-tiny-1cpu", flags=flags, extra="--moe-aux-loss-coeff 0").mode


def test_vocabularies_with_different_padding_are_refused(composed: Composer) -> None:
    flag = "--make-vocab-size-divisible-by 1"
    with pytest.raises(
        LaunchError, match="50258 rows in the strategy and to 50257 in its reference"
    ):
        composed("tp2-gpt2-tiny-2cpu", extra=flag)
    assert composed("dp2-gpt2-tiny-2cpu", extra=flag)


def test_other_numbers_of_samples_in_a_packed_sequence_are_refused(composed: Composer) -> None:
    packed, other = "--dataloader-inter-document-masking", ("--micro-batch-size", "1")
    with pytest.raises(LaunchError, match="1 in the strategy and 2 in its reference"):
        composed("baseline-gpt2-tiny-1cpu", flags=other, extra=packed)
    assert composed("tp2-gpt2-tiny-2cpu", extra=packed)
    assert composed("baseline-gpt2-tiny-1cpu", flags=other).mode


@contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def wrong_input(tmp_path: Path, scale: float) -> Callable[[str, Launch], str]:
    """Return a fake training that writes captures in which the strategy has a wrong module input."""
    site = captures.output(slot="input.x")
    values = np.ones((8, 2, 2048), np.float32)

    def train(part: str, launch: Launch) -> str:
        factor = scale if part == "strategy" else 1.0
        tensors: captures.Tensors = [(site, values * np.float32(factor))]
        captures.write(tmp_path / part, [(captures.rank(), tensors)])
        return ""

    return train


def test_full_disk_gives_a_single_sentence(composed: Composer, tmp_path: Path) -> None:
    pair = composed("tp2-gpt2-tiny-2cpu")
    train = wrong_input(tmp_path, 2.0)

    def limited(part: str, launch: Launch) -> str:
        failure = train(part, launch)
        if part == "strategy":
            limit.__enter__()
        return failure

    limit = files_no_larger_than(1000)
    try:
        verdict = train_and_judge(pair, tmp_path, limited).verdict
    finally:
        limit.__exit__(None, None, None)
    assert verdict.verdict is VerifyOutcome.NOT_COMPARABLE
    assert verdict.reason is not None
    assert "could not be read or written (File too large)" in verdict.reason


def test_logs_decide_if_all_tensors_match(composed: Composer, tmp_path: Path) -> None:
    line = " iteration 1/ 500 | consumed samples: 6 | lm loss: {:.6E} | grad norm: 1.825 |\n"
    same = wrong_input(tmp_path, 1.0)

    def train(part: str, launch: Launch) -> str:
        log = tmp_path / f"{part}.txt"
        log.write_text(line.format(21.69 if part == "strategy" else 10.85))
        failure = same(part, launch)
        keep_log(log, tmp_path / part)
        return failure

    verdict = train_and_judge(composed("tp2-gpt2-tiny-2cpu"), tmp_path, train).verdict
    assert (verdict.verdict, verdict.stage) == (VerifyOutcome.DIFFERS, CaptureStage.LOG)
    assert "prints lm loss 2.169000E+01 at iteration 1" in verdict.line


def test_a_training_that_fails_is_quoted_and_nothing_further_is_trained(
    composed: Composer, tmp_path: Path
) -> None:
    asked: list[str] = []

    def train(part: str, launch: Launch) -> str:
        asked.append(part)
        return "ended 'crashed': heads must divide"

    verdict = train_and_judge(composed("tp2-gpt2-tiny-2cpu"), tmp_path, train).verdict
    assert verdict.reason == "The reference ended 'crashed': heads must divide"
    assert (asked, verdict.exit_code) == (["reference"], 2)


def test_ranks_of_megatron_are_forked_from_one_process_that_ends_with_the_verification(
    composed: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    process = mock.Mock(close=lambda: ended.append(True))
    monkeypatch.setattr("parakit.launch.supervise.warm.WarmMegatron", lambda *_: process)
    with WarmPool() as pool:
        both = composed("tp2-gpt2-tiny-2cpu").fork_from_pool(pool)
        assert (both.strategy.warm, both.reference.warm, ended) == (process, process, [])
        native = composed("zero1-gpt2-tiny-2cpu", reference="native").fork_from_pool(pool)
        assert (native.strategy.warm, native.reference.warm) == (process, None)
    assert ended == [True]


def test_replaced_vocabulary_is_reported_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise LaunchError("far enough")

    monkeypatch.setattr("parakit.experiments.verify.command.make_sample", stop)
    file, text = tmp_path / "mine.args", StringIO()
    tiny = ROOT / "examples" / "gpt3" / "models" / "gpt2-tiny.args"
    file.write_text(f"{tiny.read_text()}--vocab-size 4096\n")
    options = Options(model=str(file), runs=tmp_path)
    pair = compose_pair(LaunchPair(parse_target("train-tp2-mine-2cpu", options)))
    with pytest.raises(LaunchError, match="far enough"):
        run_verification(pair, Console(file=text), tmp_path / "v")
    first = text.getvalue().splitlines()[0]
    assert "trained vocabulary is 50,257 instead of 4,096" in first


def test_first_iteration_with_wrong_weights_is_searched(composed: Composer, tmp_path: Path) -> None:
    began, asked = 3, []
    ones, at = np.ones((4, 3), np.float32), captures.place((0, 0, 0))

    def train(part: str, launch: Launch) -> str:
        """Write captures in which the strategy's gradients are wrong at iteration 3 and its weights after it."""
        iteration = int(launch.environment[variables.CAPTURE_ITERATION])
        asked.append(part)
        injected = part.startswith("strategy")
        sites = {
            TensorKey(CaptureStage.LOCAL_GRADIENTS, captures.WEIGHT, "gradient"): iteration
            >= began,
            TensorKey(CaptureStage.WEIGHTS, captures.WEIGHT, START_WEIGHT): iteration > began,
        }
        tensors: captures.Tensors = [
            (site, ones * (1 + (injected and wrong)), at) for site, wrong in sites.items()
        ]
        captures.write(tmp_path / part, [(captures.rank(iteration=iteration), tensors)])
        return ""

    pair = composed("tp2-gpt2-tiny-2cpu", iterations=8)
    verdict = train_and_judge(pair, tmp_path, train).verdict
    assert (verdict.iteration, verdict.stage) == (began, CaptureStage.LOCAL_GRADIENTS)
    # The bisection trains a reference and a strategy per step.
    assert asked[-2:] == ["reference-3", "strategy-3"]
    assert len(asked) == 8
