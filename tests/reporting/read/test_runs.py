import json
import math
import os
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from parakit.artifacts.io import lock_file
from parakit.artifacts.run import Status
from parakit.logs import runs as runs_module
from parakit.logs.runs import find_run_folders, load_folder, load_log, load_runs
from parakit.reporting.analyse.configurations import group_into_rows
from parakit.reporting.analyse.rates import Rates, compute_rates
from parakit.reporting.build import BuildOptions, build
from tests.reporting.factory import iteration_line, log_text, run_record, write_run

ARGUMENTS = """------------------------ arguments ------------------------
  add_bias_linear ................................. True
  bf16 ............................................ True
  context_parallel_size ........................... 1
  data_parallel_size .............................. 1
  global_batch_size ............................... 64
  group_query_attention ........................... False
  hidden_dropout .................................. 0.1
  hidden_size ..................................... 1280
  kv_channels ..................................... 80
  max_position_embeddings ......................... 1024
  micro_batch_size ................................ 64
  num_attention_heads ............................. 16
  num_layers ...................................... 36
  num_query_groups ................................ 1
  optimizer ....................................... adam
  pipeline_model_parallel_size .................... 1
  seed ............................................ 1234
  seq_length ...................................... 1024
  sequence_parallel ............................... True
  swiglu .......................................... False
  tensor_model_parallel_size ...................... 2
  world_size ...................................... 2
-------------------- end of arguments ---------------------
"""


def test_a_run_folder_gives_setup_status_and_reason(tmp_path):
    run = load_folder(write_run(tmp_path, run_record("a", "tp2"), log_text([9.0, 8.0])))
    assert (run.name, run.status.status, run.notes) == ("a", Status.OK, ())
    assert run.spec is not None
    assert run.strategy == "tp2"
    assert run.spec.padded_vocabulary == 50432
    assert run.spec.tokens_per_iteration == 512


def test_folder_without_log_is_no_log(tmp_path):
    run = load_folder(write_run(tmp_path, run_record("a"), None, None))
    assert run.status.status is Status.NO_LOG
    assert not run.has_measurements


def test_a_stale_folder_without_status_is_classified_by_its_log(tmp_path):
    run = load_folder(write_run(tmp_path, run_record("a"), iteration_line(3), None))
    assert run.status.status is Status.INCOMPLETE
    assert "no status.json" in run.notes


def test_folder_of_another_version_of_the_kit_still_counts_by_its_log(tmp_path):
    folder = write_run(tmp_path, run_record("a"), ARGUMENTS + log_text([9.0, 8.0]))
    (folder / "run.json").write_text(json.dumps({"schema": 0, "name": "old"}))
    run = load_folder(folder)
    assert run.record is None
    assert run.has_measurements
    assert "not of this version of the kit" in run.notes[0]
    assert "its schema is 0" in run.notes[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_damaged_run_json_is_a_note_not_an_error(tmp_path, content):
    folder = write_run(tmp_path, run_record("a"), log_text([9.0, 8.0]))
    (folder / "run.json").write_text(content, encoding="latin-1")
    assert "run.json is not of this version" in load_folder(folder).notes[0]


def test_interrupted_run_with_iterations_counts(tmp_path):
    folder = write_run(tmp_path, run_record("a"), log_text([9.0, 8.0]), Status.INTERRUPTED)
    assert load_folder(folder).has_measurements


def test_crashed_run_does_not_count(tmp_path):
    folder = write_run(tmp_path, run_record("a"), log_text([9.0, 8.0]), Status.CRASHED)
    assert not load_folder(folder).has_measurements


def test_foreign_log_is_understood_from_its_printed_arguments(tmp_path):
    path = tmp_path / "foreign.log"
    path.write_text(ARGUMENTS + log_text([9.0, 8.0, 8.0]).replace("size:     8", "size:    64"))
    (run,) = load_log(path)
    spec = run.spec
    assert spec is not None
    assert (run.model, run.strategy, spec.parallelism.world_size) == ("gpt2-large", "sp2", 2)
    assert (spec.dtype, spec.dropout, spec.seed) == ("bf16", 0.1, 1234)
    assert spec.tokens_per_iteration == 64 * 1024
    assert spec.shape.query_groups == 16
    assert run.device == ""


def test_unreadable_path_is_a_sentence_and_the_rest_still_loads(tmp_path):
    good = tmp_path / "good.log"
    good.write_text(log_text([1.0, 1.0]))
    runs, problems = load_runs([tmp_path / "nowhere.log", good])
    assert len(runs) == 1
    assert "nowhere.log cannot be read: No such file" in problems[0]


def test_only_run_folders_are_found(tmp_path):
    write_run(tmp_path, run_record("b"), "x")
    write_run(tmp_path, run_record("a"), None, None)
    write_run(tmp_path, run_record(".start"), "x")
    (tmp_path / "stray.txt").write_text("x")
    assert [folder.name for folder in find_run_folders(tmp_path)] == ["a", "b"]
    assert find_run_folders(tmp_path / "none") == []


def test_curves_come_from_tensorboard_where_the_log_has_none(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    folder = write_run(tmp_path, run_record("a"), "nothing here\n", None)
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step in range(1, 5):
            writer.add_scalar("lm loss", 10.0 - step, step)
            writer.add_scalar("iteration-time", 0.1 * step, step)
            writer.add_scalar("batch-size", (8, math.nan, math.inf, 1e30)[step - 1], step)
    run = load_folder(folder)
    assert [(i.iteration, i.lm_loss) for i in run.log.iterations] == [
        (1, 9),
        (2, 8),
        (3, 7),
        (4, 6),
    ]
    assert run.log.iterations[3].elapsed_ms == pytest.approx(400.0)
    assert [i.global_batch_size for i in run.log.iterations] == [8, None, None, None]
    assert any("TensorBoard" in note for note in run.notes)


def rows_of(tmp_path, *records_and_status, all_conditions=False):
    folders = [
        write_run(tmp_path, record, log_text([9.0] + [8.0] * 7), status)
        for record, status in records_and_status
    ]
    return group_into_rows(load_runs(folders)[0], all_conditions)


def test_repeats_are_pooled_also_over_seeds_and_lengths(tmp_path):
    again = run_record("b", seed=7, argv=(*run_record("b").argv, "--exit-interval", "50"))
    (row,) = rows_of(tmp_path, (run_record("a"), Status.OK), (again, Status.OK))
    assert [run.name for run in row.runs] == ["a", "b"]
    assert row.estimate is not None
    assert (row.estimate.runs, row.estimate.count) == (2, 14)


def test_another_flag_is_another_configuration(tmp_path):
    other = run_record("b", argv=(*run_record("b").argv, "--attention-backend", "flash"))
    assert len(rows_of(tmp_path, (run_record("a"), Status.OK), (other, Status.OK))) == 2


def test_old_failure_is_counted_and_a_new_one_is_a_row(tmp_path):
    entries = rows_of(
        tmp_path,
        (run_record("a"), Status.CRASHED),
        (run_record("b"), Status.OK),
        (run_record("c"), Status.OUT_OF_MEMORY),
    )
    assert [(row.newest.name, len(row.failed_before)) for row in entries] == [("b", 1), ("c", 0)]


def test_a_run_that_is_still_on_neither_splits_its_row_nor_is_in_its_figures(tmp_path):
    new = replace(run_record("b"), kit_commit="new")
    path = write_run(tmp_path, new, iteration_line(7, 1.0), Status.INCOMPLETE)
    (path / "samples.csv").write_text("seconds\n")
    rows_of(tmp_path, (replace(run_record("a"), kit_commit="old"), Status.OK))
    with_it = group_into_rows(load_runs([tmp_path / "a", path])[0])
    assert [(row.newest.name, len(row.running), row.superseded) for row in with_it] == [("a", 1, 0)]
    (alone,) = group_into_rows(load_runs([path])[0])
    assert (alone.newest.status.status, alone.running) == (Status.RUNNING, ())


def test_a_run_is_on_while_a_process_holds_its_log(tmp_path):
    folder = write_run(tmp_path, run_record("a"), iteration_line(7), Status.INCOMPLETE)
    with (folder / "log.txt").open("ab") as log:
        lock_file(log)
        status = load_folder(folder).status
    assert (status.status, status.reason) == (Status.RUNNING, "iteration 7 of 25")
    assert load_folder(folder).status.status is Status.INCOMPLETE


def test_older_versions_are_superseded_unless_asked_for(tmp_path):
    old = replace(run_record("a"), kit_commit="old")
    new = replace(run_record("b"), kit_commit="new")
    (row,) = rows_of(tmp_path / "1", (old, Status.OK), (new, Status.OK))
    assert (row.newest.name, row.superseded) == ("b", 1)
    both = rows_of(tmp_path / "2", (old, Status.OK), (new, Status.OK), all_conditions=True)
    assert len(both) == 2


def foreign(tmp_path, arguments: str, text: str = ""):
    path = tmp_path / "foreign.log"
    path.write_text(arguments + (text or log_text([9.0, 8.0, 8.0])))
    (run,) = load_log(path)
    return run


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("world_size ...................................... 2", "world_size ... 0"),
        ("world_size ...................................... 2", "world_size ... 3"),
        ("data_parallel_size .............................. 1", "data_parallel_size ... 7"),
        (
            "tensor_model_parallel_size ...................... 2",
            "tensor_model_parallel_size ... -2",
        ),
        ("tensor_model_parallel_size ...................... 2", "x ... 1"),
        ("seq_length ...................................... 1024", "seq_length ... -51"),
        ("seq_length ...................................... 1024", "seq_length ... 1e308"),
        ("hidden_size ..................................... 1280", "hidden_size ... " + "9" * 5000),
        ("num_attention_heads ............................. 16", "num_attention_heads ... 0"),
        ("micro_batch_size ................................ 64", "micro_batch_size ... -1"),
        ("hidden_dropout .................................. 0.1", "hidden_dropout ... 1e308"),
    ],
)
def test_arguments_that_contradict_or_cannot_be_define_no_model(tmp_path, old, new):
    assert old in ARGUMENTS
    run = foreign(tmp_path, ARGUMENTS.replace(old, new))
    assert run.spec is None
    assert run.strategy == ""


def test_another_ranks_line_that_ran_into_an_argument_is_no_part_of_it(tmp_path):
    argument_line = next(
        line for line in ARGUMENTS.splitlines() if "pipeline_model_parallel_size" in line
    )
    run = foreign(
        tmp_path, ARGUMENTS.replace(argument_line, argument_line + "> setting tensorboard ...")
    )
    assert run.spec is not None
    assert run.spec == foreign(tmp_path, ARGUMENTS).spec


def test_a_batch_that_nothing_names_is_not_known(tmp_path):
    unnamed = "\n".join(line for line in ARGUMENTS.splitlines() if "batch_size" not in line) + "\n"
    text = log_text([9.0, 8.0, 8.0]).replace("global batch size:     8", "global batch size:     0")
    run = foreign(tmp_path, unnamed, text)
    assert run.spec is not None
    assert run.global_batch_size is None
    assert compute_rates(run, 100.0) == Rates()


def test_while_the_batch_ramps_up_figures_are_of_the_batch_of_most_iterations(tmp_path):
    ramp = [iteration_line(n, 25.0, global_batch=16) for n in range(1, 11)]
    full = [iteration_line(n, 100.0 + n % 3, global_batch=64) for n in range(11, 41)]
    run = foreign(tmp_path, ARGUMENTS, "\n".join([*ramp, *full, ""]))
    assert run.global_batch_size == 64
    assert run.window.iterations == tuple(range(11, 41))
    assert dict(run.window.dropped) == {
        "first after a start": 1,
        "at another global batch size": 9,
    }
    assert compute_rates(run, 100.0).tokens_per_second == 64 * 1024 / 0.1


def test_a_fault_of_the_reader_costs_one_log_and_not_the_report(tmp_path, monkeypatch):
    good, bad = tmp_path / "good.log", tmp_path / "bad.log"
    good.write_text(log_text([1.0, 1.0]))
    bad.write_text("x")
    real = runs_module.scrape_runs

    def scrape(path):
        if path == bad:
            raise ZeroDivisionError("a fault")
        return real(path)

    monkeypatch.setattr(runs_module, "scrape_runs", scrape)
    runs, problems = load_runs([bad, good])
    assert [run.name for run in runs] == ["good.log"]
    assert "bad.log cannot be read (ZeroDivisionError: a fault)" in problems[0]


@pytest.mark.parametrize(
    "line",
    [
        iteration_line(3).replace("100.0", "1e308"),
        iteration_line(3).replace("lm loss: 1.000000E+01", "lm loss: 1E+308"),
        iteration_line(3).replace("global batch size:     8", "global batch size: " + "9" * 40),
        iteration_line(3).replace("       24", "9" * 30),
        iteration_line(3).replace("100.0", "-5.0"),
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1e308 | max allocated: 1e308 |"
        " reserved: 1e308 | max reserved: 1e308",
    ],
)
def test_numbers_that_nothing_measures_do_not_end_a_report(tmp_path, line):
    path = tmp_path / "a.log"
    path.write_text(ARGUMENTS + log_text([9.0, 8.0]) + line + "\n" + iteration_line(4) + "\n")
    options = BuildOptions(name="x", paths=(path,), reports_root=tmp_path / "reports")
    assert build(options, Console(file=StringIO())) == 0


def test_a_name_of_a_file_brings_no_control_to_the_page(tmp_path):
    path = tmp_path / "a\x1b[31m\u202eb.log"
    path.write_text(log_text([9.0, 8.0]))
    assert [run.name for run in load_log(path)] == ["ab.log"]


def test_a_run_of_the_kit_that_stops_while_its_batch_ramps_up_counts_the_batch_it_reached(tmp_path):
    record = run_record("a", argv=(*run_record("a").argv, "--rampup-batch-size", "2", "2", "100"))
    lines = [iteration_line(n, global_batch=4) for n in range(1, 6)]
    assert load_folder(write_run(tmp_path, record, "\n".join(lines))).global_batch_size == 4
    usual = load_folder(write_run(tmp_path, run_record("b"), "\n".join(lines)))
    assert usual.global_batch_size == 8


def test_a_folder_that_is_a_run_is_its_own_root(tmp_path):
    folder = write_run(tmp_path, run_record("one"), log_text([100.0] * 9))
    assert find_run_folders(folder) == [folder]


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    runs, problems = load_runs([tmp_path / "fifo"])
    assert runs == []
    assert problems == [
        f"{tmp_path / 'fifo'} cannot be read: it is no regular file; it is left out."
    ]
