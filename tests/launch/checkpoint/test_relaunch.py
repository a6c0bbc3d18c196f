from dataclasses import replace
from pathlib import Path

import pytest

from parakit.artifacts.run import DatasetIdentity, HostRecord, MegatronEntry, RunRecord
from parakit.config.flags import Flags
from parakit.config.model import load_model
from parakit.config.run import Backend, DeviceKind, spec_from_model
from parakit.config.strategy import (
    Batch,
    Parallelism,
    Sharding,
    StrategyError,
    count_devices,
    parse_strategy,
)
from parakit.launch.checkpoints import resume_if_saved
from parakit.launch.compose import Launch, ResumePoint
from parakit.launch.flags import saving_flags
from parakit.launch.job import parse_target
from parakit.launch.options import Options, Saving, options_from_texts
from parakit.launch.preflight import saving_problems
from parakit.launch.resume import compose_resumed_launch
from parakit.launch.train import compose_job
from tests.launch.checkpoint.conftest import Write
from tests.reporting.factory import changed

FROM = ResumePoint("20260101T000000Z-tp2-gpt2-tiny-2cpu", Path("/runs/a/checkpoints"), 8)


def composed(strategy: str, **options: object) -> Launch:
    target = parse_target(f"train-{strategy}-gpt2-tiny-2cpu")
    asked = replace(Options(iterations=12, saving=Saving(4)), **options)  # type: ignore[arg-type]
    return compose_job(target.with_options(asked))


def record_of(launch: Launch) -> RunRecord:
    return RunRecord(
        run=FROM.run,
        created_utc="2026-01-01T00:00:00Z",
        spec=launch.spec,
        exit_interval=launch.iterations,
        argv=launch.arguments("runs/a"),
        command=(),
        environment=launch.environment,
        entry=launch.entry,
        host=HostRecord("here", "cpu", 2, 1),
        software={},
        dataset=DatasetIdentity(launch.data),
        start_checkpoint=launch.initial_checkpoint.name if launch.initial_checkpoint else None,
        save_every=launch.saving.every if launch.saving else None,
    )


def test_saving_is_megatrons_distributed_format_into_the_runs_folder() -> None:
    flags = Flags(composed("tp2").arguments("runs/a"))
    assert flags.integer("--save-interval", 0) == 4
    assert flags.text("--save") == "runs/a/checkpoints"
    assert flags.text("--ckpt-format") == "torch_dist"
    assert flags.has("--finetune")  # It still begins with the shared weights.


def test_a_run_that_saves_nothing_has_no_flag_of_it() -> None:
    assert not Flags(composed("tp2", saving=None).arguments("runs/a")).has("--save")


def test_resume_has_the_same_command_except_for_its_checkpoint() -> None:
    first = composed("tp2")
    again = compose_resumed_launch(record_of(first), FROM, None, Options())
    flags = Flags(again.arguments("runs/a"))
    assert flags.text("--load") == "/runs/a/checkpoints"
    assert flags.integer("--ckpt-step", 0) == 8
    began = {"--finetune", "--no-load-optim", "--no-load-rng", "--load", "--ckpt-step"}
    first_arguments, resumed_arguments = (
        {word for word in launch.arguments("runs/a") if word.startswith("--")} - began
        for launch in (first, again)
    )
    assert first_arguments == resumed_arguments
    assert (again.spec.batch, again.saving, again.spec.seed) == (
        first.spec.batch,
        first.saving,
        first.spec.seed,
    )


def test_resuming_twice_loads_one_checkpoint() -> None:
    once = compose_resumed_launch(record_of(composed("tp2")), FROM, None, Options())
    record = replace(record_of(once), argv=once.arguments("runs/a"))
    later = replace(FROM, iteration=10)
    twice = compose_resumed_launch(record, later, None, Options()).arguments("runs/a")
    assert [
        twice[index + 1] for index, argument in enumerate(twice) if argument == "--ckpt-step"
    ] == ["10"]


@pytest.mark.parametrize("strategy", ["pp2", "cp2", "dp2", "sp2", "baseline"])
def test_resume_with_another_strategy_keeps_batch_and_vocabulary(
    strategy: str,
) -> None:
    launch = compose_resumed_launch(record_of(composed("tp2")), FROM, strategy, Options())
    fresh = parse_target(f"train-{strategy}-gpt2-tiny-{1 if strategy == 'baseline' else 2}cpu")
    flags, fresh_flags = Flags(launch.flags), fresh.flags
    assert {word for word in fresh_flags if word.startswith("--")} <= set(launch.flags)
    assert flags.has("--tensor-model-parallel-size") == (
        "--tensor-model-parallel-size" in fresh_flags
    )
    assert launch.spec.batch.global_batch_size == composed("tp2").spec.batch.global_batch_size
    assert (
        launch.spec.batch.global_batch_size
        % (launch.spec.batch.micro_batch_size * launch.spec.parallelism.data)
        == 0
    )
    rows = flags.integer("--make-vocab-size-divisible-by", 0) * launch.spec.parallelism.tensor
    assert rows == 128


def test_a_reached_end_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="set ITERS= above 8"):
        compose_resumed_launch(record_of(composed("tp2", iterations=8)), FROM, None, Options())
    assert (
        compose_resumed_launch(
            record_of(composed("tp2")), FROM, None, Options(iterations=40)
        ).iterations
        == 40
    )


def test_beyond_its_samples_a_run_is_resumed_only_where_that_is_asked_for() -> None:
    record = record_of(composed("tp2"))
    with pytest.raises(
        ValueError, match=r'has samples for --train-iters 500, .* "?EXTRA="--train-iters 600"'
    ):
        compose_resumed_launch(record, FROM, None, Options(iterations=600))
    longer = Options(iterations=600, extra=("--train-iters", "600"))
    assert (
        Flags(compose_resumed_launch(record, FROM, None, longer).flags).text("--train-iters")
        == "600"
    )


def test_sharded_optimizer_states_go_back_into_sharded_ones_only() -> None:
    with pytest.raises(ValueError, match="different formats"):
        compose_resumed_launch(record_of(composed("zero1")), FROM, "tp2", Options())
    with pytest.raises(StrategyError, match="Unknown strategy"):
        compose_resumed_launch(record_of(composed("tp2")), FROM, "xx2", Options())


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_what_cannot_be_resumed_is_not_saved_and_says_so_by_name(strategy: str) -> None:
    [problem] = problems(strategy)
    assert problem.startswith(f"{strategy} cannot be resumed yet")
    assert problems("zero1") == []
    [problem] = problems("dp2", backend=Backend.NATIVE)
    assert "BACKEND=native" in problem


def test_asynchronous_saving_is_for_gpus() -> None:
    beside = Saving(4, asynchronous=True)
    [problem] = problems("tp2", beside)
    assert problem.startswith("ASYNC_SAVE=1 needs GPUs")
    assert problems("tp2", beside, device=DeviceKind.GPU) == []


def problems(
    strategy: str,
    saving: Saving = Saving(4),  # noqa: B008 - frozen
    backend: Backend = Backend.MEGATRON,
    device: DeviceKind = DeviceKind.CPU,
) -> list[str]:
    spec = spec_from_model(load_model("gpt2-tiny"), parse_strategy(strategy, 2), Batch(1, 2))
    asked = replace(spec, strategy=strategy, backend=backend, device=device)
    return list(saving_problems(saving, asked))


def test_the_sharded_optimizer_is_saved_so_that_it_reshards_where_megatron_can() -> None:
    zero1 = Parallelism(data=2, sharding=Sharding.ZERO1)
    flag = "--dist-ckpt-optim-fully-reshardable"
    assert flag in saving_flags(Saving(4), zero1, MegatronEntry("e", "0.19.0"))
    assert flag not in saving_flags(Saving(4), zero1, MegatronEntry("e", "0.15.0rc2"))
    assert "--async-save" in saving_flags(
        Saving(4, asynchronous=True), zero1, MegatronEntry("e", "0.19.0")
    )


def test_variables_say_how_often_how_many_and_how() -> None:
    read = options_from_texts({"SAVE_EVERY": "5", "KEEP": "3", "ASYNC_SAVE": "1"})
    assert read.saving == Saving(5, 3, True)
    assert options_from_texts({"KEEP": "3"}).saving is None
    assert options_from_texts({"HANG_TIMEOUT": "30"}).hang_timeout_seconds == 30
    with pytest.raises(ValueError, match="SAVE_EVERY=0"):
        options_from_texts({"SAVE_EVERY": "0"})


@pytest.mark.parametrize(
    ("text", "devices"), [("baseline", 1), ("tp2pp2dp2", 8), ("dp4-zero1", 4), ("zero1", 3)]
)
def test_a_strategy_names_its_ranks_where_it_has_degrees(text: str, devices: int) -> None:
    assert count_devices(text, 3) == devices


def test_a_model_that_was_changed_resumes_in_its_changed_form() -> None:
    changed = composed("tp2", extra=("--num-layers", "2"))
    again = compose_resumed_launch(record_of(changed), FROM, None, Options())
    assert again.model.shape == changed.model.shape
    assert again.model.shape.layers == 2


def test_a_run_of_an_older_megatron_resumes_with_its_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its `--vocab-size` does not count the end of a document."""
    for module in ("compose", "resume"):
        older = MegatronEntry("e.py", "0.17.1")
        monkeypatch.setattr(f"parakit.launch.{module}.find_entry", lambda *_, older=older: older)
    record = record_of(composed("tp2", data="owt-ds/mine_text_document"))
    resumed = compose_resumed_launch(record, FROM, None, Options())
    assert resumed.model.shape.vocabulary == resumed.spec.shape.vocabulary == 50257


def test_a_shaped_link_stays_unless_another_is_named() -> None:
    record = changed(record_of(composed("dp2")), link_bits_per_second=10**9)
    assert compose_resumed_launch(record, FROM, None, Options()).spec.link_bits_per_second == 10**9
    assert (
        compose_resumed_launch(
            record, FROM, None, Options(link_bits_per_second=5)
        ).spec.link_bits_per_second
        == 5
    )


def test_ranks_that_shared_a_gpu_share_it_again() -> None:
    record = changed(record_of(composed("dp2")), shares_gpu=True)
    assert compose_resumed_launch(record, FROM, None, Options()).spec.shares_gpu


def test_a_requeued_job_resumes_from_its_folders_checkpoint(tmp_path: Path, write: Write) -> None:
    launch = composed("tp2")
    assert resume_if_saved(launch, tmp_path) is launch
    stored = tmp_path / "checkpoints"
    stored.mkdir()
    write(stored, 4)
    again = resume_if_saved(launch, tmp_path)
    assert again.resume_point == ResumePoint(tmp_path.name, stored, 4)
    flags = Flags(again.arguments("runs/a"))
    assert not flags.has("--finetune")
    assert flags.text("--load") == str(stored)
    write(stored, 12)
    with pytest.raises(ValueError, match="already reached iteration 12"):
        resume_if_saved(launch, tmp_path)


def test_a_network_interface_is_of_the_machine_that_the_run_was_on() -> None:
    launch = composed("tp2")
    there = {**launch.environment, "GLOO_SOCKET_IFNAME": "ib7", "TP_SOCKET_IFNAME": "ib7"}
    record = replace(record_of(launch), environment=there)
    assert compose_resumed_launch(record, FROM, None, Options()).environment == launch.environment


def test_batch_is_kept_whole() -> None:
    record = changed(record_of(composed("tp2")), batch=Batch(8, 8))
    assert compose_resumed_launch(record, FROM, "dp2", Options()).spec.batch == Batch(4, 8)
