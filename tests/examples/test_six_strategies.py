import csv
import subprocess
from itertools import pairwise

import pytest

from parakit.artifacts import run as records
from parakit.artifacts.run import Status
from parakit.config.strategy import PUBLISHED_STRATEGIES
from tests.examples.runs import ITERATIONS, Run

WHOLE, HALF_TENSOR = 277_888, 141_824
PARAMETERS = {
    "baseline": {(0, 0): WHOLE},
    "dp2": {(0, 0): WHOLE},
    "tp2": {(0, 0): HALF_TENSOR, (1, 0): HALF_TENSOR},
    "sp2": {(0, 0): HALF_TENSOR, (1, 0): HALF_TENSOR},
    "cp2": {(0, 0): WHOLE},
    # Both stages hold the embedding: the first looks up tokens, the last uses it as output layer.
    "pp2": {(0, 0): 177_792, (0, 1): 173_824},
}
ARGUMENTS = {
    "dp2": {"data_parallel_size": "2"},
    "tp2": {"tensor_model_parallel_size": "2", "sequence_parallel": "False"},
    "sp2": {"tensor_model_parallel_size": "2", "sequence_parallel": "True"},
    "cp2": {"context_parallel_size": "2"},
    "pp2": {"pipeline_model_parallel_size": "2"},
}


@pytest.mark.parametrize("name", PUBLISHED_STRATEGIES)
def test_each_strategy_trains_to_the_last_iteration(six: dict[str, Run], name: str) -> None:
    run = six[name]
    assert (run.status.status, run.status.exit_code) == (Status.OK, 0)
    assert [line.iteration for line in run.log.iterations] == list(range(1, ITERATIONS + 1))
    assert run.log.exit_reason is not None


@pytest.mark.parametrize("name", PUBLISHED_STRATEGIES)
def test_each_rank_holds_its_part_of_the_parameters(six: dict[str, Run], name: str) -> None:
    assert six[name].parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_degrees_are_those_in_the_log_of_megatron(six: dict[str, Run], name: str) -> None:
    seen = six[name].log.arguments
    assert {key: seen[key] for key in ARGUMENTS[name]} == ARGUMENTS[name]
    assert seen["transformer_impl"] == "local"


@pytest.mark.parametrize("name", PUBLISHED_STRATEGIES)
def test_all_strategies_do_the_same_work(six: dict[str, Run], name: str) -> None:
    assert [line.consumed_samples for line in six[name].log.iterations] == [
        8 * iteration for iteration in range(1, ITERATIONS + 1)
    ]


@pytest.mark.parametrize("name", PUBLISHED_STRATEGIES[1:])
def test_losses_equal_those_of_baseline_except_for_the_last_printed_digits(
    six: dict[str, Run], name: str
) -> None:
    for mine, baselines in zip(six[name].losses, six["baseline"].losses, strict=True):
        # Megatron prints seven digits, and every strategy sums in another order.
        assert mine == pytest.approx(baselines, abs=1.1e-5)


def test_training_decreases_the_loss(six: dict[str, Run]) -> None:
    losses = six["baseline"].losses
    assert losses[0] > 6.9
    assert losses[-1] < losses[0] - 0.2


def test_a_pipeline_had_four_micro_batches_and_uneven_stages(six: dict[str, Run]) -> None:
    batch = six["pp2"].record.spec.batch
    assert batch.global_batch_size // batch.micro_batch_size == 4


@pytest.mark.parametrize("name", PUBLISHED_STRATEGIES)
def test_the_run_folder_is_complete(six: dict[str, Run], name: str) -> None:
    run = six[name]
    files = {path.name for path in run.folder.iterdir()}
    assert {
        "run.json",
        "command.sh",
        "log.txt",
        "samples.csv",
        "status.json",
        "tensorboard",
    } <= files
    assert run.record.run == run.folder.name
    assert run.record.spec.parallelism.world_size == len(run.record.host.devices)
    assert run.record.dataset is not None
    assert len(run.record.dataset.sha256 or "") == 64


def test_samples_show_every_rank_in_rising_time(six: dict[str, Run]) -> None:
    with (six["tp2"].folder / records.SAMPLES_FILE).open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == records.SAMPLE_COLUMNS
    assert {row["rank"] for row in rows} == {"0", "1"}
    assert max(int(row["memory_bytes"]) for row in rows) > 100 << 20
    assert all(float(a["seconds"]) <= float(b["seconds"]) for a, b in pairwise(rows))


def test_command_sh_is_valid_shell_and_names_no_secret(six: dict[str, Run]) -> None:
    script = six["dp2"].folder / records.COMMAND_FILE
    subprocess.run(("bash", "-n", str(script)), check=True)
    assert "WANDB_API_KEY" not in script.read_text()
