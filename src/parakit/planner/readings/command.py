"""The command `validate`: predict every published measurement, and print tables of the errors."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
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
from parakit.planner.readings.blind import group_blind_by_kind, predict_blind_measurements
from parakit.planner.readings.facts import assumed_facts
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
from parakit.planner.readings.table import (
    MEASUREMENTS_FILE,
    MeasurementsError,
    PublishedMeasurement,
    read_measurements,
)

_NUM_LARGEST = 15
_NUM_SHOWN_LINES = 6


def validate(readings: Path | None, leave_out: str | None, json: bool, fit: bool) -> None:
    """Print the errors of the predictions for the measurements in a file, or fit the constants anew.

    For the kit's own file, `errors.csv`, the page and the picture are written too, unless `leave_out` or `json` is
    set.

    Args:
        readings: File of measurements. None means the kit's own file.
        leave_out: Source whose measurements the constants were fitted without. None means that each measurement is
            predicted with constants that were fitted without its own source.
        json: True prints JSON.
        fit: True fits the constants, which takes minutes, and prints no errors.

    Raises:
        MeasurementsError: The file has no measurements, or there is no such source.
    """
    if fit:
        from tests.planner.readings.fit import refit

        refit()
        return
    path = readings or MEASUREMENTS_FILE
    is_file_of_user = path != MEASUREMENTS_FILE
    measurements, unreadable = read_measurements(path)
    if leave_out is not None:
        # The constants were fitted without a public source, also if they are tried on another file.
        public = read_measurements()[0] if is_file_of_user else ()
        leave_out = _find_source(leave_out, {item.source for item in (*measurements, *public)})
    calibrate = (partial(load_device_calibration, ROOT / "runs"),) if is_file_of_user else ()
    predicted = compute_residuals(measurements, unreadable, leave_out, *calibrate)
    errors = collect_errors(predicted)
    if is_file_of_user:
        errors = errors.merge(load_public_errors())
    blind = {} if is_file_of_user else group_blind_by_kind(predict_blind_measurements())
    if json:
        print(dumps(encode_summary(predicted, errors, blind), indent=1))
        return
    console = wide_console()
    if is_file_of_user:
        _print_assumed_facts(measurements, console)
    _print_errors(predicted, errors, blind, console)
    if readings is None and leave_out is None and FOLDER.is_dir():
        write_atomically(ERRORS_FILE, errors.to_csv())
        page, picture = write_page(predicted, errors)
        console.print(
            f"{relative_to_root(page)} and {relative_to_root(picture)} show every measurement."
        )


def validate_arguments(parser: ArgumentParser) -> None:
    """Add the options of `validate` that no variable of make sets."""
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, minutes")


def _find_source(name: str, sources: set[str]) -> str:
    """Return the source with this name, or the only source whose name contains `name` in upper or lower case.

    Raises:
        MeasurementsError: No source or several sources contain the name. The message lists them.
    """
    matches = [source for source in sorted(sources) if name.lower() in source.lower()]
    if name in sources:
        return name
    if len(matches) == 1:
        return matches[0]
    near = ", ".join(matches or sorted(sources))
    raise MeasurementsError(f"There is no one source '{name}' to leave out; name one of {near}.")


def _print_errors(
    residuals: Residuals,
    errors: PredictionErrors,
    blind: Mapping[str, ErrorGroup],
    console: Console,
) -> None:
    """Print tables of errors and intervals, the time that the planner's choices lose, and the rows that cannot be
    predicted.

    Args:
        residuals: The measurements with their predictions.
        errors: Errors from which intervals are made.
        blind: Errors of blind measurements by kind of run; empty for a file of the user.
        console: The terminal.
    """
    if residuals.predicted:
        console.print(_MEANING, highlight=False)
    kinds = [*group_by_kind(residuals), *group_by_split(residuals)]
    tables = [
        _build_group_table("By source", group_by_source(residuals)),
        _build_group_table("By GPU", group_by_gpu(residuals)),
        _build_kind_table(kinds, blind),
    ]
    for table in tables:
        if table.rows:
            console.print(rich_table(table, console.width))
    _print_blind_kinds(
        {name: blind[name] for name in blind.keys() - {kind.name for kind in kinds}}, console
    )
    if residuals.predicted:
        largest = largest_residuals(residuals, _NUM_LARGEST)
        console.print(readable_table(_build_largest_table(largest), console.width))
        coverages = tuple(group_by_coverage(residuals, errors))
        console.print(rich_table(Table(_COVERAGE_COLUMNS, coverages), console.width))
    choices = evaluate_choices(residuals)
    _print_regrets(choices, evaluate_choices(residuals, across_releases=True), console)
    _print_refused(residuals, console)


_COVERAGE_COLUMNS = (
    Column[IntervalCoverage]("Inside their intervals", lambda c: c.name, right=False, wraps=True),
    Column[IntervalCoverage]("n", lambda c: c.readings),
    Column[IntervalCoverage]("of 80%", lambda c: c.shares[0.80], percent),
    Column[IntervalCoverage]("of 95%", lambda c: c.shares[0.95], percent),
    Column[IntervalCoverage]("by others 80%", lambda c: c.elsewhere[0.80], percent),
    Column[IntervalCoverage]("by others 95%", lambda c: c.elsewhere[0.95], percent),
)


def _print_refused(residuals: Residuals, console: Console) -> None:
    """Print the number of predicted measurements. List the other measurements by source, with reasons and rows."""
    total = len(residuals.predicted) + len(residuals.refused)
    ending = " Not predicted:" if residuals.refused else ""
    console.print(f"{len(residuals.predicted)} of {total} measurements are predicted.{ending}")
    for source, reason, lines in group_refusals(residuals.refused):
        shown = ", ".join(map(str, lines[:_NUM_SHOWN_LINES]))
        more = ", …" if len(lines) > _NUM_SHOWN_LINES else ""
        say(console, f"  {len(lines):3}  {source}: {reason} (row {shown}{more})")


def _print_regrets(
    choices: list[StrategyChoice], across_releases: list[StrategyChoice], console: Console
) -> None:
    """Print how much slower the planner's choices of strategies are than the fastest measured strategies.

    Nothing is printed without choices.

    Args:
        choices: Choices among measurements with the same release of the software.
        across_releases: Choices among measurements whose release may differ.
        console: The terminal.
    """
    regrets = [choice.regret for choice in choices]
    if not regrets:
        return
    sentences = [
        f"Of {len(regrets)} groups of measurements that differ in strategy alone, what a plan takes "
        f"loses {_format_regrets(regrets)} over the fastest measured one."
    ]
    decidable = [choice.regret for choice in choices if choice.decidable]
    if decidable and len(decidable) < len(regrets):
        sentences.append(
            f"In {len(regrets) - len(decidable)} of them that is less than repeated runs of one strategy "
            f"differ by; over the other {len(decidable)} it is {_format_regrets(decidable)}."
        )
    all_regrets = [choice.regret for choice in across_releases]
    if len(all_regrets) > len(regrets):
        sentences.append(
            f"With {len(all_regrets) - len(regrets)} more groups whose strategies were run by different "
            f"releases of the software it is {_format_regrets(all_regrets)}."
        )
    for sentence in (*sentences, "By source:"):
        console.print(sentence, soft_wrap=True)
    for source in sorted({choice.chosen.measurement.source for choice in choices}):
        of_source = [choice for choice in choices if choice.chosen.measurement.source == source]
        say(console, _describe_regrets(source, of_source))


def _describe_regrets(source: str, choices: list[StrategyChoice]) -> str:
    """Return a line on one source: the average and the worst time that the planner's choices lose.

    If strategies were measured repeatedly, the line also states by how much these times differ.
    """
    regrets = [choice.regret for choice in choices]
    line = f"  {len(regrets):3}  {source}: {mean(regrets):.1%}, at worst {max(regrets):.1%}"
    spreads = [spread for choice in choices for spread in choice.repeat_spreads]
    if spreads:
        line += (
            f"; repeated times of one strategy differ by {median(spreads):.1%} in the median of "
            f"{len(spreads)}, {max(spreads):.1%} at most"
        )
    return line


def _format_regrets(regrets: list[float]) -> str:
    """Return the average and the worst lost time as a phrase, such as `1.2% on average and 5.0% at worst`."""
    return f"{mean(regrets):.1%} on average and {max(regrets):.1%} at worst"


def _build_group_table(title: str, groups: list[ErrorGroup]) -> Table[ErrorGroup]:
    """Return a table with one row per group of errors.

    The table fits into 80 columns. `_MEANING` explains its headings.
    """
    names = ("median", "mean", "bias", "p90", "≤10%", "≤15%")
    figures = (
        replace(column, name=name) for column, name in zip(ERROR_COLUMNS, names, strict=True)
    )
    name_column = Column[ErrorGroup](title, lambda group: group.name, right=False, wraps=True)

    def count(group: ErrorGroup) -> str:
        """Return the number of predicted measurements. If others are not predicted, add the number of all."""
        predicted = len(group.errors)
        return str(predicted) if predicted == group.readings else f"{predicted}/{group.readings}"

    return Table((name_column, Column[ErrorGroup]("n", count), *figures), tuple(groups))


def _build_kind_table(
    groups: list[ErrorGroup], blind: Mapping[str, ErrorGroup]
) -> Table[ErrorGroup]:
    """Return the table of errors by kind of run. Its last column has the mean error of blind rows, and their number."""
    table = _build_group_table("By kind of run", groups)
    if not blind:
        return table
    column = Column[ErrorGroup]("blind", lambda group: describe_blind_error(blind.get(group.name)))
    return replace(table, columns=(*table.columns, column))


def describe_blind_error(group: ErrorGroup | None) -> str:
    """Return the mean error of blind rows and their number, such as `10.5% (11)`; empty without rows."""
    return f"{percent(group.figures['mean_abs_error'])} ({len(group.errors)})" if group else ""


def _print_blind_kinds(blind: Mapping[str, ErrorGroup], console: Console) -> None:
    """Print a sentence with the errors of blind rows of other kinds; nothing without such rows."""
    if blind:
        kinds = [f"{name} {describe_blind_error(group)}" for name, group in sorted(blind.items())]
        console.print(f"Blind rows of other kinds: {'; '.join(kinds)}.", highlight=False)


def _print_assumed_facts(measurements: Iterable[PublishedMeasurement], console: Console) -> None:
    """Print the facts that rows of unknown sources leave out, with the values that were assumed."""
    assumed = assumed_facts(measurements)
    if not assumed:
        return
    facts = [f"{name} {_format_fact(value)}" for name, value in sorted(assumed.items())]
    console.print(
        f"Some rows state no flags and have no known source. Assumed for them: {', '.join(facts)}. A column with "
        "the name of a fact states it.",
        highlight=False,
    )


def _format_fact(value: object) -> str:
    """Return a fact as a cell states it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "none"


def _build_largest_table(items: list[Residual]) -> TextTable:
    """Return a table with one row per measurement: run, published and predicted figure, error and main components."""
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
    "memory, less 1. Median, mean and p90 (nine of ten are below) are of its size; bias is the median "
    "with its sign. ≤10% and ≤15% are the fractions of measurements with an error up to that. Blind is "
    "the mean error of rows that were predicted before they could influence the planner, with their number."
)
