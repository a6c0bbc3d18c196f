import csv

import pytest
from matplotlib.figure import Figure

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.measurements import (
    CallSummary,
    CommunicationRecord,
    MemoryCategory,
    MemoryRecord,
    RankCommunication,
    RankMemory,
)
from parakit.config.published import Published
from parakit.costs.operations import Operation, Phase, describe_algorithm
from parakit.logs.runs import find_run_folders, load_folder, load_runs
from parakit.reporting.analyse.report import build_report
from parakit.reporting.render.charts import draw_devices
from tests.reporting.factory import log_text, run_record, write_run
from tests.reporting.render.test_build import made, read_csv


def calls(wire_bytes):
    operation = Operation.ALL_REDUCE
    return CallSummary(
        "tp", 2, operation, Phase.FORWARD, "float32", 4, wire_bytes // 4, wire_bytes,
        describe_algorithm(operation), 0.01, 0.02,
    )  # fmt: skip


def memory(rank, weights, activations):
    categories = {MemoryCategory.WEIGHTS: weights, MemoryCategory.ACTIVATIONS: activations}
    return RankMemory(rank, 3, weights + activations, Phase.BACKWARD, "layer", categories, {}, {})


def write_ledgers(folder):
    sent = CommunicationRecord(
        (
            RankCommunication(0, 20, 1, (calls(400), calls(200))),
            RankCommunication(1, 20, 1, (calls(800),)),
        )
    )
    held = MemoryRecord((memory(0, 3 << 20, 1 << 20), memory(1, 3 << 20, 5 << 20)))
    write_record(folder / "comm.json", sent)
    write_record(folder / "memory.json", held)


@pytest.mark.usefixtures("laid_out_charts")
def test_busiest_rank_and_highest_peak_are_the_rows(tmp_path):
    folder = write_run(tmp_path / "runs", run_record("a", "tp2"), log_text([9.0] * 9))
    write_ledgers(folder)
    _, _, report = made(tmp_path)
    row = read_csv(report)["a"]
    assert row["comm_bytes_per_iteration"] == "800"
    assert (row["peak_memory_bytes"], row["peak_memory_rank"]) == (str(8 << 20), "1")
    chart = (report / "memory.svg").read_text()
    assert "rank 1: 8.0 MiB" in chart
    assert "activations" in chart


def test_damaged_ledger_is_a_note_and_the_rest_is_there(tmp_path):
    folder = write_run(tmp_path / "runs", run_record("a", "tp2"), log_text([9.0] * 9))
    write_ledgers(folder)
    (folder / "comm.json").write_text('{"ranks": 3}')
    run = load_folder(folder)
    assert "comm.json cannot be used" in run.notes[0]
    assert run.measurements.peak_memory_bytes_by_rank == {0: 4 << 20, 1: 8 << 20}


def test_samples_give_the_devices_peak_and_survive_cut_lines(tmp_path):
    folder = write_run(tmp_path, run_record("a"), log_text([9.0] * 3))
    with (folder / records.SAMPLES_FILE).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(records.SAMPLE_COLUMNS)
        writer.writerow(["1.0", 0, "gpu", 99, 500, "", 60, 1980, "none"])
        writer.writerow(["2.0", 0, "gpu", 98, 700, 300.5, 61, 1755, "power"])
        writer.writerow(["2.5", "²", "gpu", 97, 900, "", 60, 1980, "none"])
        file.write("3.0,0,gpu,9")
    (series,) = load_folder(folder).samples.series
    assert series.seconds == (1.0, 2.0, 3.0)
    assert series.memory_bytes == (500, 700, None)
    assert series.power_watts == (None, 300.5, None)
    assert (series.peak_memory_bytes, series.throttled) == (700, ("power",))


def test_resident_memory_of_a_cpu_rank_is_no_device_memory(tmp_path):
    folder = write_run(tmp_path / "runs", run_record("a"), log_text([9.0] * 9))
    lines = [
        ",".join(records.SAMPLE_COLUMNS),
        "1.0,0,cpu,99,500000000,,,,",
        "2.0,0,cpu,99,500000000,,,,",
    ]
    (folder / records.SAMPLES_FILE).write_text("\n".join(lines) + "\n")
    _, _, report = made(tmp_path)
    assert read_csv(report)["a"]["device_memory_bytes"] == ""
    assert (report / "devices.svg").exists()


def test_every_reading_of_every_row_is_within_its_picture(tmp_path):
    for name, memory_gib in (("a", 1), ("b", 3), ("c", 2)):
        record = run_record(name)
        record = run_record(name, argv=(*record.argv, "--variant", name))
        folder = write_run(tmp_path, record, log_text([9.0] * 9))
        rows = [f"{second}.0,0,cpu,{99 * memory_gib},{memory_gib << 30},,,," for second in (1, 2)]
        text = "\n".join([",".join(records.SAMPLE_COLUMNS), *rows, ""])
        (folder / records.SAMPLES_FILE).write_text(text)
    runs, problems = load_runs(find_run_folders(tmp_path))
    figure = Figure()
    draw_devices(figure, build_report("r", runs, Published(), problems).entries)
    for axes in figure.axes:
        (line,) = axes.lines
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] >= max(line.get_ydata())
