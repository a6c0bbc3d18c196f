from dataclasses import replace
from pathlib import Path

from parakit.config.published import load_published
from parakit.logs.runs import Run, load_folder
from parakit.reporting.analyse.comparability import SHARED, compare_speed
from parakit.reporting.analyse.configurations import group_into_rows
from parakit.reporting.analyse.report import build_report
from parakit.reporting.analyse.results import write_row_notes
from tests.reporting.factory import log_text, run_record, write_run


def loaded(folder: Path, name: str, fused: str = "", **changes: object) -> Run:
    record = run_record(name, **changes)  # type: ignore[arg-type]
    environment = {**record.environment, **({"KIT_FUSED": fused} if fused else {})}
    record = replace(record, environment=environment)
    return load_folder(write_run(folder, record, log_text([100.0] * 30)))


def test_runs_with_other_patches_are_not_pooled_and_say_which(tmp_path: Path) -> None:
    runs = [loaded(tmp_path, "a"), loaded(tmp_path, "b", "norm,adamw"), loaded(tmp_path, "c")]
    rows = build_report("r", runs, load_published()).entries
    assert sorted(len(entry.configuration.runs) for entry in rows) == [1, 2]
    notes = {len(entry.configuration.runs): write_row_notes(entry) for entry in rows}
    assert "patches: norm, adamw" in notes[1]
    assert "patches" not in notes[2]


def test_the_times_of_ranks_that_shared_a_gpu_are_compared_with_nothing(tmp_path: Path) -> None:
    runs = [loaded(tmp_path, "a"), loaded(tmp_path, "b", strategy="tp2", shares_gpu=True)]
    alone, shared = group_into_rows(runs)
    speed = compare_speed(alone, shared)
    assert speed.per_token is None
    assert ("ranks on one GPU", "False", "True") in {
        (d.what, d.reference, d.other) for d in speed.differences
    }
    entries = build_report("r", runs, load_published()).entries
    assert [SHARED in write_row_notes(entry) for entry in entries] == [False, True]
