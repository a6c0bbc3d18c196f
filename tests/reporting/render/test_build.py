import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from time import time

import pytest
from rich.console import Console

from parakit.artifacts.io import write_record
from parakit.artifacts.run import CodeHashes, HostRecord, Status, StatusRecord
from parakit.config.files import ROOT
from parakit.config.published import load_published
from parakit.config.run import DeviceKind
from parakit.config.strategy import PUBLISHED_STRATEGIES, Batch
from parakit.logs.runs import find_run_folders, load_runs
from parakit.reporting.analyse.report import build_report
from parakit.reporting.analyse.results import RESULTS
from parakit.reporting.build import BuildOptions, build
from parakit.reporting.render.files import print_report
from tests.reporting.factory import iteration_line, log_text, run_record, write_run

CONTRACT = (
    "run,status,backend,strategy,model,device,world_size,dp,tp,sp,pp,vpp,cp,ep,zero_stage,"
    "micro_batch_size,global_batch_size,seq_length,dtype,iterations,iteration_ms_median,"
    "iteration_ms_ci_low,iteration_ms_ci_high,tokens_per_second,tokens_per_second_per_device,"
    "model_tflops_per_device,mfu,peak_tflops,peak_memory_bytes,peak_memory_rank,"
    "device_memory_bytes,comm_bytes_per_iteration,parameters_total,parameters_max_rank,"
    "final_loss,parity,notes"
)


def demo(root, count=25):
    for index, strategy in enumerate(PUBLISHED_STRATEGIES):
        times = [400.0, 250.0, *(90.0 + 5 * index + k % 4 for k in range(count - 2))]
        write_run(root, run_record(f"run-{strategy}", strategy), log_text(times, micro=True))


def made(tmp_path, width=100, **options):
    """Build a report of tmp_path/runs; return exit code, printed text with all verdicts, and folder."""
    defaults = {"name": "r", "runs_root": tmp_path / "runs", "reports_root": tmp_path / "reports"}
    output = io.StringIO()
    code = build(
        BuildOptions(**(defaults | options)), Console(file=output, width=width, highlight=False)
    )
    folder = tmp_path / "reports" / (options.get("name") or "r")
    return code, f"{output.getvalue()}\n{all_verdicts(folder)}", folder


def all_verdicts(folder):
    """Return the sentences of a report, of which the terminal prints a few."""
    if not (folder / "results.json").is_file():
        return ""
    return "\n".join(json.loads((folder / "results.json").read_text())["sentences"])


def read_csv(folder):
    with (folder / "results.csv").open(newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_columns_are_the_contract():
    assert ",".join(column.name for column in RESULTS) == CONTRACT


@pytest.fixture(scope="module")
def demo_report(tmp_path_factory):
    """Return what `made` returns for the demo. The charts are laid out, and no test changes the files."""
    path = tmp_path_factory.mktemp("demo")
    demo(path / "runs")
    return made(path)


def test_demo_ends_in_six_rows_with_parity_and_every_file(demo_report):
    code, text, folder = demo_report
    assert code == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("report.md", "report.html", "results.csv", "results.json"),
        *("iteration-time.svg", "loss.svg"),
    }
    rows = read_csv(folder)
    assert [row["parity"] for row in rows.values()] == ["reference", *["held"] * 5]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert all(strategy in text for strategy in PUBLISHED_STRATEGIES)
    assert (folder.parent / "latest").resolve() == folder.resolve()


@pytest.mark.parametrize("text", [None, "nothing of a trainer\n"])
def test_logs_that_cannot_be_read_write_no_report_and_leave_latest_alone(tmp_path, text):
    demo(tmp_path / "runs")
    _, _, before = made(tmp_path, name="good")
    path = tmp_path / "a.log"
    if text is not None:
        path.write_text(text)
    code, output, folder = made(tmp_path, 300, name="empty", paths=(path,))
    assert code == 1
    assert "a.log" in output
    assert "No report was written." in output
    assert not folder.exists()
    assert (tmp_path / "reports" / "latest").resolve() == before.resolve()


def test_numbers_of_a_row_follow_from_its_log(demo_report):
    _, _, folder = demo_report
    row = read_csv(folder)["run-tp2"]
    assert float(row["iteration_ms_median"]) == 101.0
    assert float(row["tokens_per_second"]) == pytest.approx(8 * 64 / 0.101)
    assert float(row["tokens_per_second_per_device"]) == pytest.approx(8 * 64 / 0.101 / 2)
    assert float(row["final_loss"]) == pytest.approx(10.56)
    assert (row["tp"], row["sp"], row["dp"], row["zero_stage"]) == ("2", "0", "1", "0")
    assert (row["parameters_max_rank"], row["iterations"]) == ("3423424", "25")


def test_what_is_not_known_is_empty(demo_report):
    _, _, folder = demo_report
    row = read_csv(folder)["run-cp2"]
    for name in ("mfu", "peak_tflops", "peak_memory_bytes", "device_memory_bytes"):
        assert row[name] == "", name


def test_table_fits_every_terminal(tmp_path):
    demo(tmp_path / "runs")
    runs, _ = load_runs(find_run_folders(tmp_path / "runs"))
    report = build_report("r", runs, load_published())
    for width in (60, 80, 120, 200):
        output = io.StringIO()
        print_report(
            report, "dp2 is the fastest.", Console(file=output, width=width, highlight=False)
        )
        lines = output.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in output.getvalue()
        assert sum("101.0" in line and "held" in line for line in lines) == 1


def test_the_narrowest_table_shows_what_did_not_end_well(tmp_path):
    demo(tmp_path / "runs")
    write_record(tmp_path / "runs/run-pp2/status.json", StatusRecord(Status.INTERRUPTED, None))
    _, text, _ = made(tmp_path, 60)
    assert any(re.match(r"\s*pp2 .*interrupted", line) for line in text.splitlines())


def test_no_runs_is_a_sentence_and_an_exit_code(tmp_path):
    code, text, folder = made(tmp_path)
    assert code == 1
    assert "There is no run to report on" in text
    assert "There is no run to report on" in (folder / "report.html").read_text()
    assert (folder / "results.csv").read_text().strip() == CONTRACT


def test_only_failed_runs_are_rows_with_reasons(tmp_path):
    error = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no heads\n'
    )
    write_run(tmp_path / "runs", run_record("a"), error, None)
    write_run(tmp_path / "runs", run_record("b", "tp2"), None, None)
    code, text, folder = made(tmp_path, 200)
    assert code == 0
    rows = read_csv(folder)
    assert (rows["a"]["status"], rows["b"]["status"]) == ("crashed", "no_log")
    assert "ValueError: no heads" in rows["a"]["notes"]
    assert "ValueError: no heads" in text


def test_runs_of_different_models_are_not_compared(tmp_path):
    demo(tmp_path / "runs")
    other = run_record("z", "tp2", model="gpt3-64m")
    write_run(tmp_path / "runs", other, log_text([50.0] * 25))
    _, text, folder = made(tmp_path, 200)
    assert "gpt3-64m · cpu" in text
    row = next(
        r for r in json.loads((folder / "results.json").read_text())["rows"] if r["run"] == "z"
    )
    assert (row["speed"], row["parity"]) == (None, None)


def test_foreign_log_that_is_not_megatrons_does_not_spoil_the_rest(tmp_path):
    stray, good = tmp_path / "stray.log", tmp_path / "good.log"
    stray.write_text("make: *** no rule\n")
    good.write_text(log_text([9.0, 8.0, 8.0]))
    code, text, folder = made(tmp_path, 200, paths=(stray, good, tmp_path / "missing.log"))
    assert code == 0
    assert "stray.log holds no line of Megatron's" in text
    assert "missing.log cannot be read" in text
    assert {r["status"] for r in read_csv(folder).values()} == {"no_log", "ok"}
    assert "missing.log cannot be read" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("laid_out_charts")
def test_text_of_logs_is_escaped_everywhere(tmp_path):
    error = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
        "ValueError: <script>alert(1)</script> | **x** =cmd()\n"
    )
    write_run(tmp_path / "runs", run_record("a", "tp2"), error, None)
    write_run(tmp_path / "runs", run_record("$x_<b>$"), log_text([9.0] * 9))
    _, _, folder = made(tmp_path)
    page = (folder / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    markdown = (folder / "report.md").read_text()
    assert "<script>" not in markdown
    assert r"\*\*x\*\*" in markdown
    assert r"\|" in markdown


def test_page_asks_nothing_of_anybody(demo_report):
    _, _, folder = demo_report
    page = (folder / "report.html").read_text()
    for loader in ('src="http', "src='http", "@import", "url(http", "fetch(", '<link rel="style'):
        assert loader not in page


def test_baseline_finds_regressions_and_improvements_and_strict_fails(tmp_path):
    demo(tmp_path / "runs")
    made(tmp_path, name="old")
    old = tmp_path / "reports" / "old"
    code, text, _ = made(tmp_path, 300, name="same", baseline=old, strict=True)
    assert code == 0
    assert "nothing changed" in text
    for strategy, factor in (("tp2", 1.5), ("cp2", 0.5)):
        log = tmp_path / "runs" / f"run-{strategy}" / "log.txt"
        index = 90.0 + 5 * PUBLISHED_STRATEGIES.index(strategy)
        log.write_text(
            log_text([400.0, 250.0, *((index + k % 4) * factor for k in range(23))], micro=True)
        )
    code, text, folder = made(tmp_path, 300, name="new", baseline=old, strict=True)
    assert code == 1
    changes = {
        c["row"]: c["kind"] for c in json.loads((folder / "results.json").read_text())["changes"]
    }
    assert changes == {
        **dict.fromkeys(("baseline", "dp2", "sp2", "pp2"), "same"),
        "tp2": "regression",
        "cp2": "unexpected improvement",
    }
    assert "tp2: regression" in text
    assert made(tmp_path, name="lenient", baseline=old)[0] == 0


@pytest.mark.parametrize(
    ("old_status", "status", "kind"),
    [
        (Status.OK, Status.OUT_OF_MEMORY, "regression"),
        (Status.OUT_OF_MEMORY, Status.OK, "unexpected improvement"),
        (Status.CRASHED, Status.OUT_OF_MEMORY, "same"),
    ],
)
def test_change_of_status_is_an_improvement_only_if_the_new_run_is_ok(
    old_status, status, kind, tmp_path
):
    record = run_record("run-dp2", "dp2")
    folder = write_run(tmp_path / "runs", record, log_text([400.0, *[100.0] * 20]), old_status)
    made(tmp_path, name="old")
    write_record(folder / "status.json", StatusRecord(status, 0))
    _, _, report = made(tmp_path, name="new", baseline=tmp_path / "reports" / "old")
    changes = json.loads((report / "results.json").read_text())["changes"]
    text = f"status {status}, was {old_status}"
    assert [change["kind"] for change in changes if change["text"] == text] == [kind]


@pytest.mark.parametrize(
    ("factor", "kind", "exit_code"),
    [(1.01, "same", 0), (1.05, "undecided", 3), (1.12, "regression", 1)],
)
def test_a_difference_that_one_run_a_side_cannot_show_is_not_called_nothing(
    factor, kind, exit_code, tmp_path
):
    log = tmp_path / "train.log"
    log.write_text(log_text([200.0 + k % 3 for k in range(40)]))
    made(tmp_path, name="old", paths=(log,))
    log.write_text(log_text([(200.0 + k % 3) * factor for k in range(40)]))
    options = {"name": "new", "paths": (log,), "baseline": tmp_path / "reports/old"}
    code, text, folder = made(tmp_path, 300, **options, strict=True)
    (change,) = json.loads((folder / "results.json").read_text())["changes"]
    assert (change["kind"], code) == (kind, exit_code)
    seen = f"+{factor - 1:.1%}, below the 9.4% that these runs can show"
    assert (seen in change["text"]) == (kind != "regression")
    if kind == "undecided":
        assert "undecided, 211.1 ms, was 201.0 ms" in text
        assert (
            f"Undecided is train.log ({seen}); repeat the runs."
            in (folder / "report.html").read_text()
        )
    assert made(tmp_path, **(options | {"name": "lenient"}))[0] == 0


def test_row_that_vanished_or_broke_is_a_finding(tmp_path):
    demo(tmp_path / "runs")
    made(tmp_path, name="old")
    old = tmp_path / "reports" / "old"
    (tmp_path / "runs" / "run-tp2").rename(tmp_path / "gone")
    broken = tmp_path / "runs" / "run-sp2" / "log.txt"
    broken.write_text(broken.read_text().replace("lm loss: 1.06", "lm loss: 1.07"))
    code, text, _ = made(tmp_path, 300, name="new", baseline=old, strict=True)
    assert code == 1
    assert "tp2: missing" in text
    assert "sp2: regression, parity broken@" in text


@pytest.mark.parametrize("content", [None, "{", "[]", '{"rows": 3}'])
def test_baseline_that_is_no_report_is_refused(tmp_path, content):
    demo(tmp_path / "runs")
    old = tmp_path / "old"
    old.mkdir()
    if content is not None:
        (old / "results.json").write_text(content)
    code, text, folder = made(tmp_path, 200, baseline=old)
    assert code == 2
    assert str(old) in text
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", "../x", "a/b", "latest", ".hidden", "a b"])
def test_name_that_cannot_be_a_folder_is_refused(tmp_path, name):
    demo(tmp_path / "runs")
    code, _, _ = made(tmp_path, name=name or "..")
    assert code == 2
    assert not (tmp_path / "reports").exists()


def test_reports_that_cannot_be_written_are_a_sentence(tmp_path):
    demo(tmp_path / "runs")
    (tmp_path / "reports").write_text("a file")
    code, text, _ = made(tmp_path, 200)
    assert code == 2
    assert "cannot be written" in text


def test_repeats_and_failures_after_them_stay_readable(tmp_path):
    for k in range(12):
        record = run_record(f"2026-{k:02d}", "tp2")
        write_run(
            tmp_path / "runs", record, log_text([99.0] * 9), Status.CRASHED if k == 5 else Status.OK
        )
    _, _, folder = made(tmp_path)
    (row,) = read_csv(folder).values()
    assert row["run"] == "2026-11"
    assert "11 runs pooled; 1 earlier failed" in row["notes"]


def test_terminal_shows_failed_attempts_and_runs_that_are_on_as_the_page_does(tmp_path):
    for name, status in (("a", Status.OUT_OF_MEMORY), ("b", Status.OK), ("c", Status.INCOMPLETE)):
        folder = write_run(tmp_path / "runs", run_record(name), log_text([9.0] * 8), status)
    # Samples of a moment ago, however long the reports take.
    (folder / "samples.csv").write_text("seconds\n")
    soon = time() + 86400
    os.utime(folder / "samples.csv", (soon, soon))
    assert "ok (1 failed, 1 running)" in made(tmp_path, width=60)[1]
    _, printed, folder = made(tmp_path, width=200)
    assert "ok (1 failed, 1 running)" in printed
    text = (
        "3 runs in 1 configuration; not all ended well: an earlier attempt of baseline ×1 (oom); one "
        "more run of baseline ×1 (running: iteration 8 of 25)."
    )
    assert text in printed
    assert "1 earlier failed; 1 running" in (folder / "report.md").read_text()
    assert read_csv(folder)["b"]["status"] == "ok"


def test_a_refused_speedup_names_the_batches(tmp_path):
    batches = {"baseline": Batch(2, 4), "tp2": Batch(4, 8), "dp2": Batch(4, 4)}
    for strategy, batch in batches.items():
        record = run_record(strategy, strategy, batch=batch)
        write_run(tmp_path / "runs", record, log_text([9.0] * 8))
    _, printed, _ = made(tmp_path, width=1000)
    refused = "no speedup per iteration is given, because iterations hold different work"
    assert f"{refused} (batch 2/4 | 4/8)" in printed
    assert "dp2 ×2 is within noise of baseline ×1" in printed


def test_a_gpu_run_is_compared_with_its_published_figures(tmp_path):
    record = run_record(
        "a",
        "tp2",
        model="gpt2-large",
        device=DeviceKind.GPU,
        batch=Batch(64, 64),
        seq_length=1024,
        dtype="fp16",
        dropout=0.1,
        host=HostRecord("h", "c", 2, 1, ("NVIDIA H200",) * 2, driver="580.82.07"),
    )
    folder = write_run(tmp_path / "runs", record, log_text([543.0 + k % 2 for k in range(30)]))
    (folder / "samples.csv").write_text(
        "seconds,rank,device,utilisation_percent,memory_bytes,power_watts,temperature_celsius,"
        "sm_clock_mhz,throttle_reasons\n"
        + "".join(
            f"{s},{r},NVIDIA H200,99,{90142932992 + r},650,60,1980,\n"
            for s in (1, 2)
            for r in (0, 1)
        )
    )
    _, text, report = made(tmp_path, 300)
    row = read_csv(report)["a"]
    assert row["device"] == "NVIDIA H200"
    assert row["device_memory_bytes"] == "90142932993"
    assert "published iteration time 542.8 and 543.6 ms" in text
    assert "reproduced" in text
    assert (report / "devices.svg").exists()


def test_a_report_of_a_hundred_runs_has_them_all_and_loads_no_torch(tmp_path):
    for k in range(100):
        record = run_record(
            f"run-{k:03d}", PUBLISHED_STRATEGIES[k % 6], seed=k, dtype=("fp32", "bf16")[k % 2]
        )
        record = replace(record, argv=(*record.argv, "--variant", str(k)))
        times = [300.0, 200.0, *(90.0 + (7 * k + n) % 5 for n in range(98))]
        write_run(tmp_path / "runs", record, log_text(times, micro=True))
    program = (
        "import sys; from tests.program import run_report as main; code = main(sys.argv[1:]);"
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "build", "--name", "many"),
            *("--runs", tmp_path / "runs", "--reports", tmp_path / "reports"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "False"
    assert len(read_csv(tmp_path / "reports" / "many")) == 100


def test_scrape_prints_the_contracts_json(tmp_path):
    log = tmp_path / "a.log"
    log.write_text(iteration_line(3, 12.5, 9.5) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "parakit", "report", "scrape", log, tmp_path / "no.log", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no.log cannot be read" in done.stderr
    first, second = json.loads(done.stdout)
    assert first["path"] == str(log)
    assert first["status"] == "incomplete"
    assert first["iterations"][0]["elapsed_ms"] == 12.5
    assert first["iterations"][0]["lm_loss"] == 9.5
    assert {"parameters", "memory", "timers", "validation"} <= first.keys()
    assert second["status"] == "no_log"


@pytest.mark.parametrize("last", [{"skipped": 1}, {"loss": float("nan")}, {"loss": None}])
def test_final_loss_is_of_a_whole_step(tmp_path, last):
    lines = [iteration_line(n, 9.0, 10.0 - n) for n in range(1, 5)]
    text = "\n".join([*lines, iteration_line(5, 9.0, **({"loss": 0.0} | last))])
    write_run(tmp_path / "runs", run_record("a"), text)
    _, _, folder = made(tmp_path)
    assert read_csv(folder)["a"]["final_loss"] == "6.0"


def test_averaged_line_is_no_final_loss(tmp_path):
    write_run(tmp_path / "runs", run_record("a"), log_text([9.0, 8.0], [10.0, 9.0], micro=True))
    _, _, folder = made(tmp_path)
    assert read_csv(folder)["a"]["final_loss"] == "10.0"


def test_the_report_says_what_took_a_reference_away_and_that_repeats_differ(tmp_path):
    def losses(last):
        return log_text([90.0] * 8, [10.0] * 7 + [last])

    runs = tmp_path / "runs"
    code, edited = CodeHashes("kit-1"), CodeHashes("kit-2")
    for name, strategy, seed, last, by in (
        ("0", "tp2", 1234, 9.0, edited),
        ("1", "tp2", 1234, 9.0, code),
        ("2", "sp2", 1234, 9.0, code),
        ("3", "sp2", 1234, 9.1, code),
        ("4", "baseline", 7, 8.0, code),
    ):
        write_run(runs, run_record(name, strategy, seed=seed, code=by), losses(last))
    _, text, folder = made(tmp_path, width=1000)
    assert "Losses of tp2 ×2, sp2 ×2 are not compared with baseline: different seed." in text
    assert "sp2 ×2: repeats differ by 100,000 units of the last printed digit" in text
    rows = read_csv(folder)
    assert rows["3"]["parity"] == "broken@8"
    assert "1 older under other code not shown" in rows["1"]["notes"]
