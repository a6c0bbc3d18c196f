"""Mixtures of experts, from the target's name to what is refused before anything starts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.config.errors import LaunchError
from parakit.config.flags import Flags
from parakit.config.run import DeviceKind
from parakit.config.strategy import EXPERT_STRATEGIES, count_devices, parse_strategy, strategy_flags
from parakit.launch.compose import Launch
from parakit.launch.data import DEFAULT_DATA
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.runtime import Runtime
from parakit.launch.train import compose_job, list_differences

Composer = Callable[..., Launch]
CHECKOUT_OF_THE_COMMIT = "MAJOR = 0\nMINOR = 15\nPATCH = 0\nPRE_RELEASE = 'rc2'\n"


@pytest.fixture
def composed(sample_prefix: Path, tmp_path: Path) -> Composer:
    def compose_named(
        name: str, extra: str = "", runtime: Runtime | None = None, **changes: object
    ) -> Launch:
        options = Options(data=str(sample_prefix), runs=tmp_path / "runs", extra=(*extra.split(),))
        target = parse_target(name)
        options = replace(options, **changes)  # type: ignore[arg-type]
        return compose_job(target.with_options(options), runtime)

    return compose_named


def refusal(launch: Launch, runs: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        check_launch(launch)
    return str(caught.value)


@pytest.mark.parametrize("strategy", EXPERT_STRATEGIES)
def test_scripts_pass_the_flags_of_the_grammar(strategy: str) -> None:
    target = parse_target(f"train-{strategy}-moe-tiny-{count_devices(strategy)}cpu")
    script = target.script
    assert script == f"examples/moe/train_{strategy}.sh"
    flags = strategy_flags(parse_strategy(strategy, count_devices(strategy)))
    assert target.read_script_flags() == flags


def test_data_parallel_copies_share_what_expert_parallelism_leaves() -> None:
    split = parse_strategy("ep2dp2", 4)
    assert (split.data, split.expert, split.expert_data) == (4, 2, 2)
    assert parse_strategy("tp2ep2", 4).expert_data == 1


@pytest.mark.parametrize(
    ("target", "extra", "message"),
    [
        ("train-ep3-moe-tiny-3cpu", "", "moe-tiny has 8 experts, which EP 3 does not divide"),
        ("train-tp2-moe-tiny-2cpu", "", "Experts under TP 2 need --sequence-parallel; use sp2."),
        (
            "train-ep2-moe-tiny-2cpu",
            "--moe-router-topk 9",
            "each token to 9 of 8 experts; use a --moe-router-topk of 1 to 8.",
        ),
        ("train-ep2-gpt2-tiny-2cpu", "", "EP 2 needs experts and gpt2-tiny is dense"),
        (
            "train-ep2-moe-tiny-2cpu",
            "--moe-expert-capacity-factor 1.5",
            "--moe-expert-capacity-factor 1.5 drops tokens.*from 4 on no token.*SHARED_START=0",
        ),
        (
            "train-ep2-moe-tiny-2cpu",
            "--moe-grouped-gemm",
            "--moe-grouped-gemm needs Transformer Engine, which does not work here; leave it out",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_rule(
    composed: Composer, tmp_path: Path, target: str, extra: str, message: str
) -> None:
    launch = composed(target, extra)
    with pytest.raises(LaunchError, match=message):
        check_launch(launch)
    assert not (tmp_path / "runs").exists()


def test_a_capacity_that_drops_nothing_or_a_start_of_its_own_is_allowed(
    composed: Composer, tmp_path: Path
) -> None:
    factor = "--moe-expert-capacity-factor"
    check_launch(composed("train-ep2-moe-tiny-2cpu", f"{factor} 4"))
    own_start = composed("train-ep2-moe-tiny-2cpu", f"{factor} 1.5", shared_start=False)
    check_launch(own_start)


def test_fp16_with_expert_parallelism_is_refused_by_the_commits_that_do(
    composed: Composer, tmp_path: Path
) -> None:
    folder = tmp_path / "megatron-lm"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(CHECKOUT_OF_THE_COMMIT)
    old = composed("train-ep2-moe-tiny-2cpu", "--fp16", megatron_lm=folder)
    assert "EP refuses fp16 (up to 0.15" in refusal(old, tmp_path / "runs")
    check_launch(composed("train-ep2-moe-tiny-2cpu", "--fp16"))


def test_experts_are_multiplied_together_where_transformer_engine_is() -> None:
    target = parse_target("train-ep2-blueberry-79m-2gpu")
    flags = [
        compose_job(target, runtime).flags
        for runtime in (Runtime(transformer_engine=True), Runtime())
    ]
    assert ["--moe-grouped-gemm" in arguments for arguments in flags] == [True, False]
    assert all("--bf16" in arguments for arguments in flags)


def test_a_model_takes_the_vocabulary_of_the_kits_own_data_and_says_so(composed: Composer) -> None:
    own_data = DEFAULT_DATA[DeviceKind.CPU]
    launch = composed("train-ep2-blueberry-79m-2cpu", data=own_data)
    assert Flags(launch.flags).integer("--vocab-size", 0) == 50257
    (vocabulary,) = list_differences(launch)
    assert "trained vocabulary is 50,257 instead of 49,152" in vocabulary
    assert "79,502,208 parameters, 442,368 more than 79,059,840" in vocabulary
    elsewhere = composed("train-ep2-blueberry-79m-2cpu")
    assert elsewhere.model.shape.vocabulary == 49152
    assert elsewhere.initial_checkpoint != launch.initial_checkpoint
    assert "vocabulary" not in str(
        list_differences(composed("train-ep2-moe-tiny-2cpu", data=own_data))
    )


def test_a_flag_that_the_kit_does_not_know_is_said_before_training(composed: Composer) -> None:
    known, unknown = (
        list_differences(composed("train-baseline-moe-tiny-1cpu", extra=extra))
        for extra in ("--window-size 16,0", "--app-tag-run-name 1 --adlr-autoresume-interval=2")
    )
    assert known == ()
    assert unknown == (
        "This kit does not know --app-tag-run-name, --adlr-autoresume-interval: Megatron gets the flags "
        "as they are, and no plan or report counts them.",
    )
