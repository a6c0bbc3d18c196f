"""`explain` and `trace` on the command line: questions to runs, answered in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tools.records.run import TRACE_FILE
from tools.report.analyse.published import load_published
from tools.report.analyse.report_data import build_report
from tools.report.explain.explanation import explain
from tools.report.explain.explanation_text import print_explanation
from tools.report.explain.timelines import NoTraceError, find_run, write_timeline
from tools.report.read.runs import find_run_folders, load_runs


def explain_runs(paths: Sequence[Path], root: Path, console: Console) -> int:
    """Explain the named runs, or all below `root`; 1 if there is none."""
    runs, problems = load_runs(paths or find_run_folders(root))
    for problem in problems:
        console.print(problem, markup=False)
    if not runs:
        console.print(f"There is no run in {root}; make demo trains six.", markup=False)
        return 1
    report = build_report("explain", runs, load_published(), all_conditions=bool(paths))
    print_explanation(explain(report), console)
    return 0


def trace_run(wanted: str | None, root: Path, console: Console) -> int:
    """Draw the traced iteration of a run and say where picture and trace are; 1 if it has none."""
    try:
        run = find_run(wanted, root)
        picture, text = write_timeline(run)
    except NoTraceError as error:
        console.print(str(error), markup=False)
        return 1
    console.print(text, markup=False)
    console.print(f"Picture: {picture}", markup=False, soft_wrap=True)
    console.print(
        f"Trace:   {run.path / TRACE_FILE} (open in ui.perfetto.dev or chrome://tracing)",
        markup=False,
        soft_wrap=True,
    )
    return 0
