"""`python -m parakit validate`: every reading predicted, tables of the errors, what was refused."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from functools import partial
from json import dumps
from pathlib import Path
from statistics import mean, median

from rich.console import Console

from parakit.artifacts.io import write_atomically
from parakit.config.files import ROOT, relative_to_root
from parakit.formatting.table import Column, Table, TextTable, readable_table, rich_table
from parakit.formatting.terminal import say, wide_console
from parakit.formatting.units import percent
from parakit.planner.calibration import load_device_calibration
from parakit.planner.readings.intervals import ERRORS_FILE, PredictionErrors, load_public_errors
from parakit.planner.readings.page import FOLDER, write_page
from parakit.planner.readings.residual import Residual, Residuals, compute_residuals
from parakit.planner.readings.summary import (
    ERROR_COLUMNS,
    ErrorGroup,
    IntervalCoverage,
    StrategyChoice,
    collect_errors,
    describe_largest_parts,
    encode_summary,
    evaluate_choices,
    format_signed_percent,
    group_by_coverage,
    group_by_gpu,
    group_by_kind,
    group_by_source,
    group_by_split,
    group_refusals,
    largest_residuals,
)
from parakit.planner.readings.table import MEASUREMENTS_FILE, MeasurementsError, read_measurements

_WORST = 15
_NAMED_LINES = 6


def validate(readings: Path | None, leave_out: str | None, json: bool, fit: bool) -> None:
    """Print how far measurements are predicted off; or fit the constants anew.

    Raises:
        MeasurementsError: The file has no readings, or no such source.
    """
    if fit:
        from tests.planner.readings.fit import refit

        refit()
        return
    path = readings or MEASUREMENTS_FILE
    found, unreadable = read_measurements(path)
    if leave_out is not None:
        # Constants were fitted without a public source, whichever file they are tried on.
        public = () if path == MEASUREMENTS_FILE else read_measurements()[0]
        leave_out = _source(leave_out, {measurement.source for measurement in (*found, *public)})
    here = () if path == MEASUREMENTS_FILE else (partial(load_device_calibration, ROOT / "runs"),)
    predicted = compute_residuals(found, unreadable, leave_out, *here)
    errors = collect_errors(predicted)
    if path != MEASUREMENTS_FILE:
        errors = errors.merge(load_public_errors())
    if json:
        print(dumps(encode_summary(predicted, errors), indent=1))
        return
    console = wide_console()
    _print(predicted, errors, console)
    if readings is None and leave_out is None and FOLDER.is_dir():
        write_atomically(ERRORS_FILE, errors.to_csv())
        page, picture = write_page(predicted, errors)
        console.print(
            f"{relative_to_root(page)} and {relative_to_root(picture)} show every reading."
        )


def validate_arguments(parser: ArgumentParser) -> None:
    """What no variable says."""
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, minutes")


def _source(name: str, known: set[str]) -> str:
    """The source of a name, or of the only one that holds it."""
    found = [source for source in sorted(known) if name.lower() in source.lower()]
    if name in known or len(found) == 1:
        return name if name in known else found[0]
    near = ", ".join(found or sorted(known))
    raise MeasurementsError(f"There is no one source '{name}' to leave out; name one of {near}.")


def _print(found: Residuals, errors: PredictionErrors, console: Console) -> None:
    if found.predicted:
        console.print(_MEANING, highlight=False)
    kinds = [*group_by_kind(found), *group_by_split(found)]
    tables = (
        ("By source", group_by_source(found)),
        ("By GPU", group_by_gpu(found)),
        ("By kind of run", kinds),
    )
    for title, groups in tables:
        if groups:
            console.print(rich_table(_table(title, groups), console.width))
    if found.predicted:
        console.print(readable_table(_worst_table(largest_residuals(found, _WORST)), console.width))
        columns = (
            Column[IntervalCoverage](
                "Inside their intervals", lambda c: c.name, right=False, wraps=True
            ),
            Column[IntervalCoverage]("n", lambda kind: kind.readings),
            Column[IntervalCoverage]("of 80%", lambda kind: kind.shares[0.80], percent),
            Column[IntervalCoverage]("of 95%", lambda kind: kind.shares[0.95], percent),
            Column[IntervalCoverage]("by others 80%", lambda kind: kind.elsewhere[0.80], percent),
            Column[IntervalCoverage]("by others 95%", lambda kind: kind.elsewhere[0.95], percent),
        )
        console.print(
            rich_table(Table(columns, tuple(group_by_coverage(found, errors))), console.width)
        )
    _print_regrets(evaluate_choices(found), evaluate_choices(found, across_releases=True), console)
    total = len(found.predicted) + len(found.refused)
    rest = " Not predicted:" if found.refused else ""
    console.print(f"{len(found.predicted)} of {total} measurements are predicted.{rest}")
    for source, reason, lines in group_refusals(found.refused):
        named = ", ".join(map(str, lines[:_NAMED_LINES]))
        more = ", …" if len(lines) > _NAMED_LINES else ""
        say(console, f"  {len(lines):3}  {source}: {reason} (row {named}{more})")


def _print_regrets(
    found: list[StrategyChoice], mixed: list[StrategyChoice], console: Console
) -> None:
    regrets = [choice.regret for choice in found]
    if not regrets:
        return
    sentences = [
        f"Of {len(regrets)} groups of measurements that differ in strategy alone, what a plan takes "
        f"loses {_lost(regrets)} over the fastest measured one."
    ]
    known = [choice.regret for choice in found if choice.decidable]
    if known and len(known) < len(regrets):
        sentences.append(
            f"In {len(regrets) - len(known)} of them that is less than repeated runs of one strategy "
            f"differ by; over the other {len(known)} it is {_lost(known)}."
        )
    more = [choice.regret for choice in mixed]
    if len(more) > len(regrets):
        sentences.append(
            f"With {len(more) - len(regrets)} more groups whose strategies were run by different "
            f"releases of the software it is {_lost(more)}."
        )
    for sentence in (*sentences, "By source:"):
        console.print(sentence, soft_wrap=True)
    for source in sorted({choice.chosen.measurement.source for choice in found}):
        of_it = [choice for choice in found if choice.chosen.measurement.source == source]
        own = [choice.regret for choice in of_it]
        sentence = f"  {len(own):3}  {source}: {mean(own):.1%}, at worst {max(own):.1%}"
        if apart := [share for choice in of_it for share in choice.apart]:
            sentence += (
                f"; times of one strategy lie {median(apart):.1%} apart in the median of {len(apart)}, "
                f"{max(apart):.1%} at most"
            )
        say(console, sentence)


def _lost(regrets: list[float]) -> str:
    return f"{mean(regrets):.1%} in the mean and {max(regrets):.1%} at worst"


def _table(title: str, groups: list[ErrorGroup]) -> Table[ErrorGroup]:
    """Narrow enough for 80 columns, with the words of `_MEANING`."""
    names = ("median", "mean", "bias", "p90", "≤10%", "≤15%")
    shares = (replace(each, name=name) for each, name in zip(ERROR_COLUMNS, names, strict=True))
    name = Column[ErrorGroup](title, lambda group: group.name, right=False, wraps=True)

    def counted(group: ErrorGroup) -> str:
        predicted = len(group.errors)
        return str(predicted) if predicted == group.readings else f"{predicted}/{group.readings}"

    return Table((name, Column[ErrorGroup]("n", counted), *shares), tuple(groups))


def _worst_table(items: list[Residual]) -> TextTable:
    """The first cell heads a paragraph where the columns do not fit."""
    header = "measurement, GPUs, strategy, metric, published, predicted, error, mostly"
    lines = tuple(
        (
            f"row {item.measurement.line}, {item.measurement.source}: {item.measurement.model}",
            f"{item.measurement.gpus} {item.measurement.gpu}",
            item.measured_run.spec.name,
            item.measurement.metric,
            f"{item.measurement.value:.4g}",
            f"{item.predicted:.4g}",
            format_signed_percent(item.error),
            describe_largest_parts(item),
        )
        for item in items
    )
    return TextTable("worst", "Worst", tuple(header.split(", ")), lines)


_MEANING = (
    "n is the number of measurements (predicted/all). An error is predicted over published time or "
    "memory, less 1: median, mean and p90 (nine of ten are below) of its size, bias its median with "
    "its sign; ≤10% and ≤15% are the shares missed by no more."
)
