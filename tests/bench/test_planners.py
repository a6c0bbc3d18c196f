import json
from pathlib import Path

import pytest

from parakit.formatting.table import markdown_table
from parakit.planner.readings.residual import Residual, compute_residuals
from parakit.planner.readings.summary import MEMORY, metric_kind
from parakit.planner.readings.table import read_measurements
from tests.bench.planners import (
    CALCULON,
    SIMUMAX,
    SIMUMAX_ROWS,
    Planner,
    asked,
    calculon_job,
    compared,
    published,
    simumax_job,
    stated_rate,
    table,
)
from tests.planner.papers import paper_runs

PLANNED_MEMORY = {"dense": 0.02, "mixtures": 0.05}


@pytest.fixture(scope="module")
def rows() -> tuple[Residual, ...]:
    return compute_residuals(read_measurements(SIMUMAX_ROWS)[0]).predicted


@pytest.mark.parametrize(("architecture", "wanted"), PLANNED_MEMORY.items())
def test_memory_that_simumax_measured_is_predicted(
    rows: tuple[Residual, ...], architecture: str, wanted: float
) -> None:
    errors = [
        abs(row.error)
        for row in rows
        if metric_kind(row.measurement.metric) == MEMORY
        and bool(row.measured_run.spec.shape.experts) is (architecture == "mixtures")
    ]
    assert len(errors) == {"dense": 15, "mixtures": 4}[architecture]
    assert max(errors) < wanted / 2


def checkout(folder: Path, package: str, code: str) -> Path:
    """Write a checkout of a planner whose answers are computed by `code`."""
    for name, text in {
        "calculon/__init__.py": "",
        "simumax/__init__.py": "",
        package: code,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_other_planner_runs_in_its_own_process_and_is_compared_on_rows_it_answers(
    tmp_path: Path, rows: tuple[Residual, ...]
) -> None:
    answers = (
        "def ask(job):\n"
        "    if job['strategy']['tp_size'] == 8:\n"
        "        raise ValueError('no')\n"
        "    print('chatter')\n"
        "    return 1.0, 2.0 ** 30\n"
    )
    checkout(tmp_path, "simumax/__init__.py", "")
    planner = Planner("Fixed", "import json, sys\n" + answers, simumax_job)
    comparisons = list(compared(rows, {planner: tmp_path}))
    timed = [line for line in comparisons if line.kind == "time, MooreThreads/SimuMax B200, dense"]
    assert [(len(line.errors), line.rows) for line in timed] == [(25, 31)]
    lines = markdown_table(table(comparisons)).splitlines()
    assert len(lines) == 2 + 4
    assert "| Fixed | 25 of 31 |" in "".join(lines)


def test_refusal_of_checkout_without_the_planner_names_the_environment_folder(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ValueError, match=r"Calculon does not run in .*No module.*\.venv/bin/python"
    ):
        asked(CALCULON, tmp_path, [])


def test_calculon_gets_only_rows_that_it_can_express(rows: tuple[Residual, ...]) -> None:
    jobs = [job for run in paper_runs() if (job := calculon_job(run))]
    assert len(jobs) == 8
    assert {job["exe"]["activation_recompute"] for job in jobs} == {"full", "attn_only"}
    assert {job["exe"]["tensor_par_comm_type"] for job in jobs} == {"ar", "rs_ag"}
    # Gated MLPs, and another device.
    assert not any(calculon_job(row.measured_run) for row in rows)


def test_simumax_gets_all_its_own_rows_and_no_a100_rows(
    rows: tuple[Residual, ...],
) -> None:
    jobs = [simumax_job(row.measured_run) for row in rows]
    assert all(jobs)
    assert not any(simumax_job(run) for run in paper_runs())
    mixture = next(job for job in jobs if job and "expert_num" in job["model"])
    assert (mixture["model"]["dense_layers"], mixture["model"]["attention_type"]) == (1, "mla")
    assert SIMUMAX.job is simumax_job


def test_calibration_text_is_read_from_a_measured_rate_of_simumax(tmp_path: Path) -> None:
    named = "b=1, m=4096, k=8192, n=57344, layout=TN, accumulate=False, out_dtype=bf16"
    matmul = {"tflops": 2250.0, "accurate_efficient_factor": {named: 0.4}}
    file = tmp_path / "configs" / "system" / "b200_bf16_ceperm.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"accelerator": {"op": {"matmul": matmul}}}))
    assert stated_rate(tmp_path) == "900 TFLOP/s on 4096x57344x8192"


def test_rows_of_a_file_are_compared_without_the_published_ones() -> None:
    assert len(published(SIMUMAX_ROWS)) == len(read_measurements(SIMUMAX_ROWS)[0])
