"""Runs as rows: a configuration with everything that is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.report.analyse.configurations import Configuration, configurations, pooled
from tools.report.analyse.entry import Entry, device_memory
from tools.report.analyse.parity import Parity, parity_of
from tools.report.analyse.published import figure_for, match_figure, relative_to_baseline
from tools.report.analyse.rates import rates_of
from tools.report.analyse.within_run import changes_within
from tools.report.read.runs import Run, load_runs
from tools.spec.published import Published


def entry_of(label: str, row: Configuration, parity: Parity, published: Published) -> Entry:
    """A configuration's row, not yet compared with others in speed."""
    run, time = row.newest, row.estimate.median if row.estimate else None
    figure = figure_for(run, published)
    return Entry(
        label=label,
        configuration=row,
        rates=rates_of(run, time),
        parity=parity,
        shifts=changes_within(run),
        figure=figure,
        matches=tuple(match_figure(run, figure, time, device_memory(run)) if figure else ()),
        published_ratio=relative_to_baseline(figure, published) if figure else None,
    )


def rows_of(groups: Sequence[Sequence[Path]]) -> list[Entry | None]:
    """A row for each group of run folders, newest first, whatever a report would pool.

    Parity is that of a report of all of them. None where no folder can be read.
    """
    return rows_of_runs([load_runs(folders)[0] for folders in groups])


def rows_of_runs(groups: Sequence[Sequence[Run]]) -> list[Entry | None]:
    """The same of runs that were read."""
    every = configurations([run for runs in groups for run in runs], all_conditions=True)
    verdicts = zip(every, parity_of(every), strict=True)
    parities = {run.name: parity for row, parity in verdicts for run in row.runs}
    return [
        entry_of(
            runs[0].name,
            Configuration(tuple(reversed(runs)), pooled(runs)),
            parities.get(runs[0].name, Parity()),
            Published(),
        )
        if runs
        else None
        for runs in groups
    ]
