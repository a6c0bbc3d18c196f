"""Megatron's sample indices of a data set that is replaced under its name."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from parakit.artifacts.run import Status
from parakit.config.flags import Flags
from parakit.config.run import Backend
from parakit.launch import data
from parakit.launch.compose import Launch
from parakit.launch.execute import execute_launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.run_folder import identify_computation
from parakit.launch.supervise.warm import WarmPool
from parakit.launch.train import compose_job
from parakit.logs.runs import load_folder
from tests.small import SMALL, write_documents

SEQUENCE = 8

pytestmark = pytest.mark.filterwarnings("ignore")
"""Megatron's own files warn when they are compiled and imported."""


def composed(prefix: str, runs: Path, name: str = "train-dp2-gpt2-tiny-2cpu") -> Launch:
    return compose_job(parse_target(name).with_options(Options(data=prefix, runs=runs)))


def samples_of(launch: Launch, folder: str | None = None) -> list[list[int]]:
    """The samples that Megatron draws from a launch's data set with the index in `folder`, or in the
    launch's own."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE,
        blend=([launch.data], None),
        split="1,0,0",
        path_to_cache=folder or Flags(launch.arguments()).text("--data-cache-path"),
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=1100, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    wanted = (4, 0, 0)
    train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config).build()
    return [train[number]["tokens"].tolist() for number in range(wanted[0])]


@pytest.mark.parametrize(("before", "after"), [(4, 40), (40, 4)])
def test_a_replaced_data_set_gets_an_index_of_its_own(
    tmp_path: Path, before: int, after: int
) -> None:
    for documents in (before, after):
        prefix = write_documents(tmp_path / "mine", [10 + n % 3 for n in range(documents)])
        launch = composed(prefix, tmp_path / "runs")
        drawn = samples_of(launch)
        assert drawn == samples_of(launch, str(tmp_path / f"fresh-{documents}"))
        assert np.ptp(drawn) > 0


@pytest.mark.ranks
def test_runs_before_and_after_a_data_set_is_replaced_train_on_what_is_there(
    tmp_path: Path,
) -> None:
    def train(runs: Path) -> list[float | None]:
        options = Options(
            data=str(tmp_path / "mine"), runs=runs, extra=SMALL, iterations=2, ledger=False
        )
        job = parse_target("train-baseline-gpt2-tiny-1cpu").with_options(options)
        launch = compose_job(job).fork_from_pool(pool)
        folder, status = execute_launch(launch, runs, Console(quiet=True), "baseline")
        assert status.status is Status.OK, status.reason
        return [iteration.lm_loss for iteration in load_folder(folder).log.iterations]

    with WarmPool() as pool:
        write_documents(tmp_path / "mine", [300] * 40)
        before = train(tmp_path / "runs")
        write_documents(tmp_path / "mine", [200] * 40, first_token=7)
        after = train(tmp_path / "runs")
        assert len(after) == 2
        assert after != before
        assert after == train(tmp_path / "runs-without-an-index")


def test_the_folder_follows_from_where_documents_end_and_not_from_the_tokens_alone(
    tmp_path: Path,
) -> None:
    folders = set()
    for lengths in ([12, 8], [8, 12]):
        prefix = write_documents(tmp_path / "mine", lengths)
        folders.add(Flags(composed(prefix, tmp_path).arguments()).text("--data-cache-path"))
    assert len(folders) == 2


def test_only_indices_of_present_data_sets_are_kept(tmp_path: Path) -> None:
    kept, replaced, gone = (
        write_documents(tmp_path / name, [10 + n, 10]) for n, name in enumerate("abc")
    )
    for prefix in (kept, replaced, gone):
        samples_of(composed(prefix, tmp_path / "runs"))
    folders = {path.name for path in (tmp_path / "runs" / data.SAMPLE_INDICES).iterdir()}
    assert len(folders) == 3
    write_documents(Path(replaced), [30])
    Path(f"{gone}.idx").unlink()
    data.remove_stale_sample_indices(tmp_path / "runs")
    (remaining,) = (tmp_path / "runs" / data.SAMPLE_INDICES).iterdir()
    assert remaining == data.sample_index_folder(tmp_path / "runs", [kept])


def test_the_native_backends_which_keep_no_index_get_no_folder(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "mine", [100])
    job = parse_target("train-dp2-gpt2-tiny-2cpu")
    options = Options(data=prefix, runs=tmp_path, backend=Backend.NATIVE)
    assert "--data-cache-path" not in compose_job(job.with_options(options)).arguments()


def test_a_folder_of_the_users_own_is_kept(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "mine", [100])
    job = parse_target("train-dp2-gpt2-tiny-2cpu")
    options = Options(data=prefix, runs=tmp_path, extra=("--data-cache-path", "/mine"))
    assert compose_job(job.with_options(options)).arguments().count("--data-cache-path") == 1


def test_the_folder_follows_from_the_data_sets_that_extra_names(tmp_path: Path) -> None:
    default, *parts = (
        write_documents(tmp_path / name, [100 + len(name)]) for name in ("a", "bb", "ccc")
    )
    job = parse_target("train-dp2-gpt2-tiny-2cpu")

    def folder(*arguments: str) -> Path:
        options = Options(data=default, runs=tmp_path, extra=("--data-path", *arguments))
        return Path(
            Flags(compose_job(job.with_options(options)).arguments()).text("--data-cache-path")
        )

    assert folder(parts[0]) == data.sample_index_folder(tmp_path, [parts[0]])
    blend = folder("0.3", parts[0], "0.7", parts[1])
    assert blend.name.startswith("blend-")
    write_documents(Path(parts[1]), [50])
    assert folder("0.3", parts[0], "0.7", parts[1]) != blend
    # Megatron describes the parts of a blend alone, which are not what the folder is named after.
    blend.mkdir(parents=True)
    (blend / "x-GPTDataset-train-description.txt").write_text('{"dataset_path": "gone"}')
    data.remove_stale_sample_indices(tmp_path)
    assert blend.is_dir()


def test_another_tool_that_replaces_a_data_set_with_its_counts_gets_an_index_and_a_hash_of_its_own(
    tmp_path: Path,
) -> None:
    folders, hashes = set(), set()
    for lengths, first_token in (([12, 8], 0), ([8, 12], 5)):
        prefix = write_documents(tmp_path / "mine", lengths, first_token)
        launch = composed(prefix, tmp_path)
        folders.add(Flags(launch.arguments()).text("--data-cache-path"))
        hashes.add(identify_computation(launch).dataset)
    assert None not in hashes
    assert (len(folders), len(hashes)) == (2, 2)


def test_a_run_on_other_tokens_is_another_run(sample_prefix: Path, tmp_path: Path) -> None:
    from tests.small import folded

    other = folded(sample_prefix, tmp_path)
    here = identify_computation(composed(str(sample_prefix), tmp_path))
    # Under the same path, as a replaced data set would be.
    moved = identify_computation(composed(str(other), tmp_path))
    assert here.dataset is not None
    assert here.dataset != moved.dataset
