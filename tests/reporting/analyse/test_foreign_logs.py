"""Logs named by hand: rows of their own in the order named, compared with the first, never pooled."""

import json

import pytest

from parakit.config.hardware import device_by_key
from parakit.reporting.command import named_logs
from tests.charts import charts_without_layout  # noqa: F401
from tests.reporting.factory import iteration_line, log_text, run_record, write_run
from tests.reporting.read.test_runs import ARGUMENTS
from tests.reporting.render.test_build import made, read_csv

QUIET = [100.0 + n % 3 / 10 for n in range(30)]


def log(path, ms=1.0, arguments=ARGUMENTS, losses=None, extra="", batch=64):
    """A foreign log whose iterations take so much of 100 ms."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        iteration_line(n, ms * t, losses[n - 1] if losses else 9.0, global_batch=batch, extra=extra)
        for n, t in enumerate(QUIET, 1)
    ]
    path.write_text(arguments + "\n".join([*lines, "[exiting program at iteration 30]", ""]))
    return path


def rows_of(folder):
    return json.loads((folder / "results.json").read_text())["rows"]


def test_only_log_of_a_report_is_named_by_its_file(tmp_path):
    _, text, folder = made(tmp_path, paths=(log(tmp_path / "my-long-run.log"),))
    assert "my-long-run" in text
    assert [row["label"] for row in rows_of(folder)] == ["my-long-run.log"]


def test_logs_are_named_by_their_files_if_the_strategy_of_one_is_unknown(tmp_path):
    known = log(tmp_path / "known.log"), log(tmp_path / "other.log", ms=2.0, arguments="")
    _, _, folder = made(tmp_path, paths=known)
    assert [row["label"] for row in rows_of(folder)] == ["known.log", "other.log"]


def given(**changes):
    """The arguments with others."""
    lines = [line for line in ARGUMENTS.splitlines() if line.split()[0] not in changes]
    more = [f"  {name} ".ljust(51, ".") + f" {value}" for name, value in changes.items()]
    return "\n".join([lines[0], *more, *lines[1:], ""])


def test_a_slower_copy_of_a_log_is_a_row_of_its_own_below_the_first(tmp_path):
    paths = log(tmp_path / "z.log"), log(tmp_path / "a.log", 1.1)
    _, text, folder = made(tmp_path, 200, paths=paths)
    assert list(read_csv(folder)) == ["z.log", "a.log"]
    assert "tp2 ×2 a.log takes 10% more time per iteration than tp2 ×2 z.log" in text.replace(
        "sp2", "tp2"
    )


def test_logs_of_one_file_name_are_told_apart_by_their_folders(tmp_path):
    paths = [log(tmp_path / item / "log.txt", ms) for item, ms in (("one", 1.0), ("two", 1.2))]
    _, _, folder = made(tmp_path, paths=(*paths, paths[0]))
    assert list(read_csv(folder)) == ["log.txt (1)", "two/log.txt", "log.txt (3)"]


def test_a_pair_shows_the_arguments_that_differ(tmp_path):
    paths = log(tmp_path / "a.log"), log(tmp_path / "b.log", 1.1, given(lr="0.5"))
    _, text, folder = made(tmp_path, 300, paths=paths)
    assert "not the same: --lr (not given | 0.5)" in text
    assert rows_of(folder)[1]["speed"]["differences"] == [
        {"what": "--lr", "reference": "not given", "other": "0.5", "part_of_strategy": False}
    ]


def test_repeats_of_the_kit_are_pooled_and_a_disagreement_is_a_sentence(tmp_path):
    for name, ms in (("a", 1.0), ("b", 1.5)):
        write_run(tmp_path / "runs", run_record(name), log_text([ms * t for t in QUIET]))
    _, text, folder = made(tmp_path, 300)
    (row,) = read_csv(folder).values()
    assert "2 runs pooled; repeats disagree: their medians are 100.1 to 150.1 ms" in row["notes"]
    assert "Repeats of baseline ×1 disagree" in text


@pytest.mark.parametrize("rates", [("0.1", "0.2"), ("0.1", "0.1")])
def test_a_report_against_itself_finds_nothing(tmp_path, rates):
    paths = [log(tmp_path / f"{n}.log", 1 + n, given(lr=rate)) for n, rate in enumerate(rates)]
    for n, rate in enumerate(rates):
        argv = (*run_record(f"r{n}").argv, "--lr", rate)
        record = run_record(f"r{n}", argv=argv, kit_commit=f"commit-{n}")
        paths.append(write_run(tmp_path / "runs", record, log_text([(3 + n) * t for t in QUIET])))
    made(tmp_path, name="old", paths=paths)
    code, text, _ = made(
        tmp_path, 300, name="new", paths=paths, baseline=tmp_path / "reports" / "old", strict=True
    )
    assert "nothing changed" in text
    assert code == 0


def test_without_arguments_the_iteration_lines_suffice_for_speed(tmp_path):
    paths = log(tmp_path / "a.log", 1.0, ""), log(tmp_path / "b.log", 1.2, "")
    _, text, _ = made(tmp_path, 300, paths=paths)
    assert "b.log takes 20% more time per iteration than a.log" in text
    assert (
        "a.log and b.log print no model and no sequence length, so equal ones are assumed" in text
    )


def test_logs_that_name_no_model_and_have_other_batches_are_not_compared(tmp_path):
    paths = [log(tmp_path / f"{name}.log", 1.0, "") for name in "abc"]
    paths[1].write_text(paths[1].read_text().replace("batch size:    64", "batch size:    32"))
    _, text, folder = made(tmp_path, 300, paths=paths)
    compared = [row["speed"] and row["speed"]["reference"] for row in rows_of(folder)]
    assert compared == [None, None, "a.log"]
    assert "b.log is compared with no other log" in text


SIZED = """--- arguments ---
  num_layers ...................................... {layers}
  hidden_size ..................................... 1024
  seq_length ...................................... {length}
--- end of arguments ---
"""


def test_logs_are_compared_with_those_of_their_model_only(tmp_path):
    paths = (
        log(tmp_path / "silent.log", 1.0, ""),
        log(tmp_path / "large.log", 9.0, SIZED.format(layers=48, length=1024)),
        log(tmp_path / "small.log", 1.0, SIZED.format(layers=12, length=1024)),
        log(tmp_path / "small-2.log", 1.3, SIZED.format(layers=12, length=1024)),
        log(tmp_path / "small-3.log", 2.0, SIZED.format(layers=12, length=2048)),
    )
    _, text, folder = made(tmp_path, 300, paths=paths)
    speeds = {row["run"]: row["speed"] for row in rows_of(folder)}
    compared = {run: speed["reference"] for run, speed in speeds.items() if speed}
    assert compared == dict.fromkeys(("small-2.log", "small-3.log"), "small.log")
    # Sequences that differ are never taken to be equal.
    assert "small-3.log is within noise of small.log: 0.0% " in text
    assert (
        "silent.log, large.log are compared with no other log: no other log has their model" in text
    )


def test_what_is_missing_for_a_verdict_is_said(tmp_path):
    paths = log(tmp_path / "a.log", 1.0, ""), log(tmp_path / "b.log", 1.2, "")
    for path in paths:
        path.write_text(path.read_text().replace("global batch size:    64 |", ""))
    _, text, _ = made(tmp_path, 300, paths=paths)
    assert "b.log against a.log: no verdict on speed, a.log and b.log print no global batch" in text


def test_logs_that_are_said_to_be_repeats_are_a_row_and_show_their_scatter(tmp_path):
    paths = [log(tmp_path / f"{n}.log", 1 + n / 500) for n in range(3)]
    other_rows = [log(tmp_path / f"other-{n}.log", 1.03 + n / 500) for n in range(3)]
    arguments = [
        f"{name}={','.join(map(str, item))}" for name, item in (("tp2", paths), ("x", other_rows))
    ]
    named = dict(repeat for word in arguments for repeat in named_logs(word))
    _, text, folder = made(tmp_path, 300, paths=tuple(named), repeats=named)
    assert [(row["label"], len(row["runs"])) for row in rows_of(folder)] == [("tp2", 3), ("x", 3)]
    # 3% is below what one log a side can show.
    assert "x takes 3.0% more time per iteration than tp2" in text
    assert named_logs(str(paths[0])) == [(paths[0], "")]
    odd = log(tmp_path / "a=b.log")
    assert named_logs(str(odd)) == [(odd, "")]
    assert named_logs(str(tmp_path / "[0-2].log")) == [(path, "") for path in paths]
    none = tmp_path / "none*.log"
    assert named_logs(str(none)) == [(none, "")]


def test_the_device_that_is_given_makes_an_mfu(tmp_path):
    path = log(tmp_path / "a.log", arguments=given(vocab_size="50257"))
    _, _, folder = made(tmp_path, paths=(path,))
    assert read_csv(folder)["a.log"]["mfu"] == ""
    _, _, folder = made(tmp_path, paths=(path,), device=device_by_key("h100"))
    row = read_csv(folder)["a.log"]
    assert row["device"] == "NVIDIA H100 80GB HBM3"
    assert float(row["mfu"]) > 0


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("| 0  NVIDIA H100 80GB HBM3   On |", "NVIDIA H100 80GB HBM3"),
        ("> device: NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA H200 and NVIDIA H100 80GB HBM3", ""),
        ("NVIDIA H200NVL", ""),
        ("| 0  NVIDIA A40   On | 535.104", "NVIDIA A40"),
        ("device_name: NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("kind='TPU v5p', process", "TPU v5p"),
        ("NVIDIA-SMI 575.57.08   Driver Version: 575.57.08", ""),
    ],
)
def test_a_device_that_the_log_names_is_taken_from_it(tmp_path, line, device):
    path = log(tmp_path / "a.log", 1.0, f"{line}\n{ARGUMENTS}")
    _, _, folder = made(tmp_path, paths=(path,))
    assert read_csv(folder)["a.log"]["device"] == device


def test_the_vocabulary_is_the_tokenizers_and_without_one_no_flops_are_counted(tmp_path):
    padded = "> padded vocab (size: 128256) with 0 dummy tokens (new size: 128256)\n"
    known, unknown = given(vocab_size="None") + padded, given(vocab_size="None")
    paths = [log(tmp_path / f"{n}.log", arguments=item) for n, item in enumerate((known, unknown))]
    _, _, folder = made(tmp_path, paths=tuple(paths))
    rows = read_csv(folder)
    with_it, without = rows["0.log"], rows["1.log"]
    assert without["model_tflops_per_device"] == without["parameters_total"] == ""
    assert "the log does not state the vocabulary" in without["notes"]
    assert without["tokens_per_second"] == with_it["tokens_per_second"] != ""
    # 36 layers of 1,280 and, tied, 128,256 tokens: GPT-2's 774 million have 50,432 where TP is 2.
    assert int(with_it["parameters_total"]) == 774_254_080 + 1280 * (128_256 - 50_432)


def test_two_logs_in_eight_bits_are_not_said_to_be_broken(tmp_path):
    losses = [9.0 - n / 100 for n in range(30)]
    paths = []
    for name, more, formats in (("a", 0.0, "e4m3"), ("b", 0.01, "e4m3"), ("c", 0.01, "None")):
        arguments = given(fp8=formats, fp8_recipe="tensorwise")
        shifted = [loss + more for loss in losses]
        paths.append(log(tmp_path / f"{name}.log", arguments=arguments, losses=shifted))
    _, _, folder = made(tmp_path, paths=tuple(paths))
    rows = read_csv(folder)
    assert (rows["b.log"]["parity"], rows["c.log"]["parity"]) == ("not comparable",) * 2
    assert "products are of 8 bits or fewer" in rows["b.log"]["notes"]
    assert "loss not comparable: different precision" in rows["c.log"]["notes"]


def test_a_total_that_a_rank_contradicts_is_empty(tmp_path):
    line = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {}\n"
    rows = {}
    for name, count in (("a", 387_921_920), ("b", 387_922_432)):
        path = log(
            tmp_path / f"{name}.log", arguments=given(vocab_size="50257") + line.format(count)
        )
        _, _, folder = made(tmp_path, paths=(path,))
        rows[name] = read_csv(folder)[f"{name}.log"]
    assert rows["a"]["parameters_total"] == "774254080"
    assert rows["b"]["parameters_total"] == ""
    assert (
        "a rank prints 387,922,432 and the model of the arguments has 387,921,920"
        in rows["b"]["notes"]
    )


def test_logs_that_cannot_be_compared_are_named_with_their_times(tmp_path):
    other = given(num_layers="4")
    paths = log(tmp_path / "a.log"), log(tmp_path / "b.log", 2.0, other)
    _, text, _ = made(tmp_path, 300, paths=paths)
    assert "None of 2 rows can be compared with another. An iteration takes 100.1 ms (" in text


def test_printed_tflops_stand_beside_the_kits_own_count(tmp_path):
    extra = " throughput per GPU (TFLOP/s/GPU): 400.0 |"
    known = given(vocab_size="50257")
    _, _, folder = made(tmp_path, paths=(log(tmp_path / "a.log", arguments=known, extra=extra),))
    (row,) = rows_of(folder)
    assert row["rates"]["printed_tflops_per_device"] == 400.0
    ours = row["model_tflops_per_device"]
    assert row["rates"]["printed_over_counted"] == pytest.approx(400 / ours, rel=1e-2)
    assert "Printed TFLOP/s" in (folder / "report.html").read_text()


PIPELINE = given(tensor_model_parallel_size="1", pipeline_model_parallel_size="2")
LOSSES = [10.0 - n / 10 for n in range(30)]


def parities(tmp_path, other, arguments=ARGUMENTS):
    paths = (
        log(tmp_path / "a.log", losses=LOSSES),
        log(tmp_path / "b.log", losses=other, arguments=arguments),
    )
    _, _, folder = made(tmp_path, paths=paths)
    return [row["parity"] for row in rows_of(folder)], rows_of(folder)[1]["parity_detail"]


def test_logs_of_one_seed_that_agree_hold_parity(tmp_path):
    verdicts, detail = parities(tmp_path, [loss * (1 + 1.6e-5) for loss in LOSSES])
    assert verdicts == ["reference", "held"]
    assert detail["max_difference"] == pytest.approx(1.6e-4, rel=0.1)


def test_logs_of_another_layout_that_agree_hold_it_too(tmp_path):
    verdicts, _ = parities(tmp_path, LOSSES, PIPELINE)
    assert verdicts == ["reference", "held"]


def test_logs_of_another_layout_that_do_not_agree_are_not_comparable(tmp_path):
    other = [loss * 1.01 for loss in LOSSES]
    verdicts, detail = parities(tmp_path, other, PIPELINE)
    assert verdicts[1] == "not comparable"
    assert detail["reason"].endswith("and the losses differ by up to 0.0099")


def test_logs_of_one_layout_that_do_not_agree_are_broken(tmp_path):
    verdicts, _ = parities(tmp_path, [*LOSSES[:20], *(loss + 0.1 for loss in LOSSES[20:])])
    assert verdicts == ["reference", "broken@21"]


def test_logs_of_other_seeds_are_not_comparable(tmp_path):
    verdicts, detail = parities(tmp_path, LOSSES, given(seed="7"))
    assert (verdicts[1], detail["reason"]) == ("not comparable", "different seed")
