"""The answer first: what is fastest, by how much, and what the others pay for, never across models."""

import re
from pathlib import Path

import pytest

from parakit.config.published import load_published
from parakit.costs.operations import Phase
from parakit.logs.runs import load_runs
from parakit.reporting.analyse.report import build_report
from parakit.reporting.explain.explanation import explain
from parakit.reporting.render.headline import build_bar_groups, write_headline
from parakit.reporting.render.plots import build_plots
from tests.reporting.analyse.test_foreign_logs import SIZED, log
from tests.reporting.explain.test_explain import seconds
from tests.reporting.factory import log_text, run_record, write_run
from tests.reporting.ledger_factory import write_times
from tests.reporting.render.test_build import made

WORK = {Phase.FORWARD: 0.03, Phase.BACKWARD: 0.06, Phase.OPTIMIZER: 0.01}


def reported(paths: list[Path]):
    return build_report("r", load_runs(paths)[0], load_published())


def test_the_headline_names_the_fastest_and_what_the_others_pay_for(tmp_path: Path) -> None:
    times_by_strategy = {"baseline": (100.0, 0.0), "tp2": (140.0, 0.09), "dp2": (60.0, 0.01)}
    paths = []
    for name, (ms, sync) in times_by_strategy.items():
        folder = write_run(tmp_path, run_record(f"run-{name}", name), log_text([ms] * 30))
        phases = {phase: value / (1 if name == "baseline" else 2) for phase, value in WORK.items()}
        ranks = range(1 if name == "baseline" else 2)
        write_times(folder, *(seconds(r, phases | {Phase.GRADIENT_SYNC: sync}) for r in ranks))
        paths.append(folder)
    report = reported(paths)
    text = write_headline(report, explain(report).paid)
    assert text.startswith(
        "dp2 ×2 is the fastest of 3 rows: 60.00 ms per iteration, 40% less time per token"
    )
    assert re.search(r"The largest cost of tp2 ×2 \(90\.0 ms\) is gradient sync\. A cost is", text)
    (group,) = build_bar_groups(report)
    assert [bar.verdict for bar in group.bars] == ["reference", "faster", "slower"]


def test_a_row_that_noise_may_put_first_is_named_beside_the_fastest(tmp_path: Path) -> None:
    times = {"baseline": 100.0, "tp2": 61.0, "dp2": 60.0}
    paths = [
        write_run(tmp_path, run_record(f"run-{name}", name), log_text([ms] * 30))
        for name, ms in times.items()
    ]
    text = write_headline(reported(paths))
    assert text.startswith("dp2 ×2 is the fastest of 3 rows: 60.00")
    assert "tp2 ×2 is within noise of dp2 ×2." in text


def test_models_have_a_headline_and_a_figure_each(tmp_path: Path) -> None:
    paths = [
        log(tmp_path / f"{name}.log", ms, SIZED.format(layers=layers, length=1024))
        for name, ms, layers in (("a", 1.0, 12), ("b", 2.0, 12), ("c", 50.0, 48), ("d", 40.0, 48))
    ]
    report = reported(paths)
    assert write_headline(report).split(". ")[1].startswith("d.log is the fastest of 2 rows")
    assert [group.title for group in build_bar_groups(report)] == [
        "Time per iteration, 12x1024",
        "Time per iteration, 48x1024",
    ]
    times = build_plots(report)[0]
    assert times.unit == "of its median"
    assert [series.y[1] for series in times.series] == pytest.approx([1.0] * 4, abs=0.01)


def test_curves_that_coincide_are_one(tmp_path: Path) -> None:
    losses = [9 - n / 10 for n in range(30)]
    other = [loss + (n > 15) for n, loss in enumerate(losses)]
    paths = [
        log(tmp_path / f"{n}.log", losses=item) for n, item in enumerate((losses, losses, other))
    ]
    (plot,) = (plot for plot in build_plots(reported(paths)) if plot.name == "losses")
    assert [bool(re.search(r"\(1 other coincides\)$", s.label)) for s in plot.series] == [
        True,
        False,
    ]


def test_a_long_value_is_cut_and_paths_are_counted(tmp_path: Path) -> None:
    more = "  {} ................................. /data/{}\n"
    paths = []
    for name in ("a", "b"):
        arguments = SIZED.format(layers=12, length=1024)
        extra_arguments = "".join(more.format(f"extra_{n}_path", name * 80) for n in range(12))
        paths.append(
            log(
                tmp_path / f"{name}.log",
                1.0,
                arguments.replace("--- end", f"{extra_arguments}--- end"),
            )
        )
    _, text, folder = made(tmp_path, 100, paths=paths)
    assert "not the same: 12 paths" in text
    page = (folder / "report.html").read_text()
    assert f'<details class="long"><summary>/data/{"a" * 54}</summary>' in page


def test_logs_without_times_have_their_last_losses_in_the_headline() -> None:
    public = Path(__file__).parents[2] / "logs" / "public"
    paths = [public / f"{name}.log" for name in ("llm-foundry", "nemo-automodel")]
    assert write_headline(reported(paths)) == (
        "llm-foundry.log ends with a loss of 10.97 in iteration 3; nemo-automodel.log ends with a loss of 0.6172"
        " in iteration 11. No time of an iteration is printed."
    )
