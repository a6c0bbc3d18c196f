"""Write the verdicts of a report as sentences: endings, speed, changes within runs, losses, figures.

The report's page folds these sentences, and `results.json` has them all. If many rows have a verdict of one
kind, the first ones are written, or one sentence stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parakit.artifacts.run import Status
from parakit.config.run import RunSpec
from parakit.formatting.units import joined, number, plural, signed_percent
from parakit.logs import Run
from parakit.reporting.analyse.comparability import (
    DISTURBED,
    IMPOSSIBLE,
    OVERSUBSCRIBED,
    WITHHELD,
    SpeedComparison,
    why_withheld,
)
from parakit.reporting.analyse.disturbance import ranks_and_cores, why_disturbed
from parakit.reporting.analyse.earlier import UNDECIDED
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.must_agree import DAMAGED_FILE, NO_SHAPE
from parakit.reporting.analyse.parity import HELD, LOGS_AGREE, NOT_COMPARABLE
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.results import describe_disagreement
from parakit.reporting.analyse.statistics import (
    TimeComparison,
    TimeVerdict,
    describe_ratio,
    describe_ratio_interval,
    smallest_visible_difference,
)

_MAX_FLAWS = 4
"""Differing arguments that a sentence names; the table of arguments has all."""
MAX_NAMED = 8
"""Rows that a sentence names."""
_MAX_VALUE_LENGTH = 40
_MAX_SENTENCES = 12
"""Sentences of one kind; further rows are counted."""


def write_sentences(report: Report) -> list[str]:
    """Return all verdicts of a report, one sentence each, in the order of the page."""
    if not report.entries:
        return [ending_sentence(report)]
    return [
        ending_sentence(report),
        *_sample_sentences(report),
        *withheld_sentences(report),
        *left_out_sentences(report),
        *_speed_sentences(report),
        *assumed_device_sentences(report),
        *_uncompared_sentences(report),
        *_change_within_run_sentences(report),
        *_power_sentences(report),
        *_doubtful_rate_sentences(report),
        *_disagreement_sentences(report),
        *_parity_sentences(report),
        *published_sentences(report),
        *_planner_sentences(report),
        *change_sentences(report),
    ]


def _change_within_run_sentences(report: Report) -> list[str]:
    """Return a sentence per change of the iteration time within a run, limited by `_limit_sentences`."""
    texts = []
    for entry in report.entries:
        texts += [f"Within {entry.label}, {change.text}." for change in entry.changes_within_run]
    return _limit_sentences(texts, "changes within runs are in the notes of their rows.")


def _doubtful_rate_sentences(report: Report) -> list[str]:
    """Return a sentence per row whose TFLOP/s are doubtful, limited by `_limit_sentences`."""
    texts = [
        f"TFLOP/s of {entry.label} are doubtful: {entry.rates.model_doubt}."
        for entry in report.entries
        if entry.rates.model_doubt and entry.rates.model_tflops_per_device is not None
    ]
    return _limit_sentences(texts, "rows with doubtful TFLOP/s have it in their notes.")


def _disagreement_sentences(report: Report) -> list[str]:
    """Return a sentence per row whose repeats scatter by more than is usual."""
    return [
        f"Repeats of {entry.label} disagree: {describe_disagreement(entry)}."
        for entry in report.entries
        if entry.estimate and entry.estimate.repeats_disagree
    ]


def ending_sentence(report: Report) -> str:
    """Return a sentence on the numbers of runs and rows, and on the runs that did not end well."""
    if not report.entries:
        hint = "train one (make demo), or name logs (LOGS=, or after 'parakit report')"
        return f"There is no run to report on{'' if report.problems else f': {hint}'}."
    rows = [entry.configuration for entry in report.entries]
    num_runs = sum(len(row.runs) + len(row.failed_before) + len(row.running) for row in rows)
    text = f"{plural(num_runs, 'run')} in {plural(len(rows), 'configuration')}"
    endings: list[str] = []
    for entry in report.entries:
        endings += _describe_endings(entry)
    if not endings:
        return f"{text}, all ended well."
    return (
        f"{text}; not all ended well: {'; '.join(_limit_sentences(endings, 'did not end well'))}."
    )


def _sample_sentences(report: Report) -> list[str]:
    """Return sentences on what CPU times mean, and on the number of iterations behind the medians."""
    texts = []
    timed = [entry for entry in report.entries if entry.estimate]
    if any(entry.run.device == "cpu" for entry in timed):
        texts.append(
            "Times on CPU ranks are illustrative: ranks share cores, and no GPU's balance of compute and"
            " communication is in them. Losses, parameters and bytes are exact."
        )
    counts = [entry.estimate.count for entry in timed if entry.estimate]
    if counts:
        smallest, largest = min(counts), max(counts)
        span = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
        texts.append(
            f"Medians rest on {span} iterations per row. 'How it was measured' in report.html and"
            " report.md tells which iterations were left out, and why."
        )
    return texts


def published_sentences(report: Report) -> list[str]:
    """Return a sentence per published quantity that can be compared with a measured one."""
    texts = []
    for entry in report.entries:
        for match in entry.matches:
            if match.verdict != "not comparable":
                published = " and ".join(number(value) for value in match.published)
                texts.append(
                    f"{entry.label}: published {match.quantity} {published} {match.unit}, measured"
                    f" {number(match.measured)} {match.unit}: {match.verdict} (expected"
                    f" {number(match.expected_low)} to {number(match.expected_high)})."
                )
    return texts


def _limit_sentences(texts: list[str], remainder: str) -> list[str]:
    """Return the first texts of one kind, and then how many more there are."""
    more = len(texts) - _MAX_SENTENCES
    return [*texts[:_MAX_SENTENCES], f"{more} more {remainder}"] if more > 0 else texts


def _planner_sentences(report: Report) -> list[str]:
    """Return sentences on the mean and the largest error of the planner's times; empty if no row was predicted."""
    errors = {row.entry.label: row.error for row in report.planned if row.error is not None}
    if not errors:
        return []
    worst = max(errors, key=lambda label: abs(errors[label]))
    mean_error = sum(map(abs, errors.values())) / len(errors)
    return [
        f"The planner's times have an error of {mean_error:.0%} on average over"
        f" {plural(len(errors), 'row')}. The largest is {worst}'s, {signed_percent(errors[worst], 0)}"
        " (positive: predicted too slow)."
    ]


def change_sentences(report: Report) -> list[str]:
    """Return one sentence on the rows that changed or are undecided since an earlier report.

    Rows that are the same as before are not named. The list is empty without an earlier report.
    """
    if not report.baseline:
        return []
    changes: list[str] = []
    for change in report.changes:
        # With STRICT=1 a change fails the report: a regression, an unexpected improvement, a missing row.
        if change.fails_strict or change.kind == UNDECIDED:
            changes.append(f"{change.row}: {change.kind}, {change.text}")
    return [f"Against {report.baseline}: {'; '.join(changes) or 'nothing changed'}."]


def group_compared_rows(report: Report) -> list[list[Entry]]:
    """Return groups of timed rows that are compared with one another, the largest group first.

    The first row of a group is the reference. A row that is compared with no other row is a group by itself.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in report.entries:
        # Rows that are compared have a time per token relative to their reference. So a timed row without such
        # a time is a reference, or is compared with no row.
        has_reference = entry.per_token is not None
        if entry.estimate is not None and not has_reference:
            groups[entry.run.name] = [entry]
    for entry in report.entries:
        if entry.speed is not None and entry.per_token is not None:
            groups[entry.speed.reference].append(entry)
    return sorted(groups.values(), key=len, reverse=True)


def token_ratio(entry: Entry) -> float:
    """Return a row's time per token over its reference's; 1 if it is compared with no other."""
    return entry.per_token.ratio if entry.per_token else 1.0


def judged_ratio(entry: Entry) -> float:
    """Return the ratio on which a row's verdict rests; 1 if it is compared with no other."""
    return entry.judged_time.ratio if entry.judged_time else 1.0


def join_first_names(names: Sequence[str]) -> str:
    """Return the first MAX_NAMED names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _power_sentences(report: Report) -> list[str]:
    """Return sentences on how far verdicts and intervals can be trusted.

    They state how many comparisons hold together, which scatter is assumed without repeats, and how small a
    visible difference is.
    """
    texts = []
    estimates = [
        entry.estimate
        for entry in report.entries
        if entry.estimate and entry.estimate.standard_error is not None
    ]
    sizes = [str(len(group) - 1) for group in group_compared_rows(report) if len(group) > 2]
    if sizes:
        texts.append(
            f"All verdicts of {joined(sizes)} comparisons with one reference are right together with"
            " 95% probability (Holm's method). An interval has 95% probability for its own pair of rows alone."
        )
    scatters = [e.scatter for e in estimates if e.degrees_of_freedom is None]
    for scatter in dict.fromkeys(scatters):
        freedom = scatter.degrees_of_freedom
        with_one_run = smallest_visible_difference(1, scatter.assumed, freedom)
        with_three_runs = smallest_visible_difference(3, scatter.typical, freedom)
        texts.append(
            f"One or two runs cannot show how much runs scatter, so {scatter.assumed:.1%} is assumed"
            f" ({scatter.source}). With one run each, a difference below {with_one_run:.1%} cannot be"
            f" seen. With three runs each that scatter by {scatter.typical:.1%}, a difference below"
            f" {with_three_runs:.1%} cannot be seen."
        )
    return texts


def withheld_sentences(report: Report) -> list[str]:
    """Return sentences on the rows whose speed is not compared although they have a time; empty if there are none.

    One sentence names all rows that other programs disturbed, and others name all rows with more ranks than
    cores and all rows of damaged files. Each row with an impossible speed has a sentence of its own.
    """
    disturbed, oversubscribed, damaged = [], [], []
    for entry in report.entries:
        reason = why_withheld(entry.configuration)
        if reason == DISTURBED:
            disturbed.append(f"{entry.label} ({why_disturbed(entry.run)})")
        elif reason == DAMAGED_FILE:
            damaged.append(entry.label)
        elif reason == OVERSUBSCRIBED:
            known = ranks_and_cores(entry.run)
            if known:
                ranks, cores = known
                counts = f"{plural(ranks, 'rank')} on {plural(cores, 'core')}"
                oversubscribed.append(f"{entry.label} ({counts})")
    texts = []
    if disturbed:
        texts.append(
            f"No speed is compared with {join_first_names(disturbed)}: other programs used the cores."
            " Close them and run again."
        )
    if oversubscribed:
        texts.append(
            f"No speed is compared with {join_first_names(oversubscribed)}: with more ranks than cores,"
            " times say nothing about speed."
        )
    if damaged:
        texts.append(f"No speed is compared with {join_first_names(damaged)}: {DAMAGED_FILE}.")
    # Each of these sentences states the row's speed, so that rows cannot share one.
    texts += [
        speed_sentence(entry, report)
        for entry in report.entries
        if entry.speed and IMPOSSIBLE in entry.speed.caution
    ]
    return texts


def left_out_sentences(report: Report) -> list[str]:
    """Return a sentence per row on runs that its time leaves out, because other programs slowed them down.

    A row of which all runs were slowed down has no sentence here (`withheld_sentences`).
    """
    texts = []
    for entry in report.entries:
        runs = [run for run in entry.configuration.runs if run.has_measurements]
        reasons = [reason for reason in map(why_disturbed, runs) if reason]
        if reasons and len(reasons) < len(runs):
            texts.append(
                f"The time of {entry.label} leaves out {len(reasons)} of {plural(len(runs), 'run')},"
                f" which other programs slowed down ({reasons[0]})."
            )
    return texts


def _speed_sentences(report: Report) -> list[str]:
    """Return one sentence per row with its verdict on speed; empty if no rows are compared.

    If there would be more than _MAX_SENTENCES, there is one sentence per reference and verdict instead, with the range
    of the ratios. A last sentence then names the table with each row's verdict.
    """
    texts = []
    for entry in report.entries:
        # A row with an impossible speed has a sentence of its own (`withheld_sentences`).
        if entry.speed and IMPOSSIBLE not in entry.speed.caution:
            text = speed_sentence(entry, report)
            if text:
                texts.append(text)
    if len(texts) <= _MAX_SENTENCES:
        return texts
    summaries = _summarize_speeds(report)
    return [*summaries, "Each row's own verdict and interval are under 'Compared in speed'."]


def _summarize_speeds(report: Report) -> list[str]:
    """Return one sentence per reference and verdict, with the range of the ratios and the names of the rows."""
    groups: dict[tuple[str, TimeVerdict, bool], list[Entry]] = {}
    for entry in report.entries:
        if entry.speed and entry.per_token:
            judged_time = entry.speed.judged_time or entry.per_token
            is_per_device = entry.speed.per_device_token is not None
            key = entry.speed.reference, judged_time.verdict, is_per_device
            groups.setdefault(key, []).append(entry)
    labels = {entry.run.name: entry.label for entry in report.entries}
    summaries = []
    for (reference, verdict, is_per_device), members in groups.items():
        ratios = sorted(judged_ratio(entry) for entry in members)
        unit = "device time per token" if is_per_device else "time per token"
        span = describe_ratio(ratios[0])
        if len(ratios) > 1:
            span = describe_ratio_interval(ratios[0], ratios[-1])
        names = join_first_names([entry.label for entry in members])
        summaries.append(
            f"{plural(len(members), 'row')}: {verdict.against(labels[reference])}, {span} {unit}"
            f" ({names})."
        )
    return summaries


def _uncompared_sentences(report: Report) -> list[str]:
    """Return one sentence on the logs that cannot be compared with any other log; empty if there are no such logs."""
    timed_logs = [entry for entry in report.entries if entry.run.is_foreign and entry.estimate]
    references = {entry.speed.reference for entry in report.entries if entry.speed}
    uncompared = []
    for entry in timed_logs:
        is_compared = entry.speed is not None or entry.run.name in references
        if not is_compared:
            uncompared.append(entry)
    if len(timed_logs) < 2 or not uncompared:
        return []
    verb, whose = ("is", "its") if len(uncompared) == 1 else ("are", "their")
    names = join_first_names([entry.label for entry in uncompared])
    return [
        f"{names} {verb} compared with no other log: no other log has {whose} model and device"
        " (or an equal batch, if the logs name no model)."
    ]


def describe_time_ratio(comparison: TimeComparison, unit: str, reference: str) -> str:
    """Return a phrase such as `takes 35% less time per token than tp2 (95% interval: 23% to 45% less)`.

    Args:
        comparison: The row's time over the reference's.
        unit: Kind of time, such as `time per token`.
        reference: Label of the reference.
    """
    return f"takes {_compare_amounts(comparison.ratio, unit, reference)}{_describe_interval(comparison)}"


def _compare_amounts(ratio: float, unit: str, reference: str) -> str:
    """Return `35% less time per token than tp2`, or `2.3 times the time per token of tp2`."""
    if ratio >= 2:
        return f"{describe_ratio(ratio)} the {unit} of {reference}"
    return f"{describe_ratio(ratio)} {unit} than {reference}"


def _describe_interval(comparison: TimeComparison) -> str:
    """Return the ratio's 95% interval in brackets; empty if it is unknown."""
    if not comparison.low or not comparison.high:
        return ""
    interval = describe_ratio_interval(comparison.low, comparison.high)
    return f" (95% interval: {interval})"


def speed_sentence(entry: Entry, report: Report) -> str:
    """Return a sentence with the verdict on a row's speed.

    The sentence is empty if the row is compared with no other row. It is also empty if the speed is withheld, because
    another sentence explains that.
    """
    comparison = entry.speed
    if comparison is None:
        return ""
    reference = next(
        candidate for candidate in report.entries if candidate.run.name == comparison.reference
    )
    judged = comparison.judged_time
    if judged is None:
        if comparison.caution in WITHHELD:
            return ""
        return (
            f"{entry.label} against {reference.label}: no verdict on speed, {comparison.caution}."
        )
    text = _verdict_text(entry, reference, comparison, judged)
    if comparison.caution:
        text += f"; {comparison.caution}"
    has_other_work = comparison.per_iteration is None and not comparison.per_device_token
    if comparison.model_doubt:
        text += f"; {comparison.model_doubt}, so only times per token are compared"
    elif has_other_work:
        text += "; no speedup per iteration is given, because iterations hold different work"
        text += _different_batches(reference.run.spec, entry.run.spec)
    return f"{text}{_describe_flaws(comparison)}."


def _verdict_text(
    entry: Entry, reference: Entry, comparison: SpeedComparison, judged: TimeComparison
) -> str:
    """Return the verdict on a row's time: the ratio to the reference, its interval, and remarks.

    A remark states the smallest visible difference, or that Holm's rule took a verdict back, or that a single run
    cannot decide. With too few samples the text says only that there is no verdict.
    """
    if judged.verdict is TimeVerdict.UNKNOWN:
        return f"{entry.label} against {reference.label}: too few samples for a verdict"
    unit = "time per iteration" if comparison.per_iteration else "time per token"
    if comparison.per_device_token:
        unit = "device time per token"
    if judged.verdict is TimeVerdict.NOISE:
        verdict = "is within noise of"
        if judged.is_undecidable:
            verdict = "cannot be told from"
        text = f"{entry.label} {verdict} {reference.label}: {describe_ratio(judged.ratio)}"
        text += f" {unit}{_describe_interval(judged)}"
    else:
        text = f"{entry.label} {describe_time_ratio(judged, unit, reference.label)}"
    if comparison.per_device_token:
        text += _time_with_all_devices(entry, reference)
    if judged.among:
        text += f"; alone that would be a difference, among {judged.among} comparisons it is none (Holm)"
    elif judged.verdict is TimeVerdict.NOISE and judged.resolution:
        text += f"; {judged.resolution}"
    if judged.is_undecidable:
        text += "; undecidable with a single run on one side: repeat it"
    return text


def _time_with_all_devices(entry: Entry, reference: Entry) -> str:
    """Return the ratio of times with all devices of both rows, on which no verdict rests."""
    counts = f"{entry.run.num_devices} devices instead of {reference.run.num_devices}"
    amounts = _compare_amounts(token_ratio(entry), "time per token", reference.label)
    return f"; with {counts} it takes {amounts}"


def assumed_device_sentences(report: Report) -> list[str]:
    """Return a warning that logs without a device's name are compared as if they ran on the same device.

    The list is empty if no such logs are compared.
    """
    compared = [entry for entry in report.entries if entry.speed and entry.speed.device_is_assumed]
    if not compared:
        return []
    logs = {entry.run.name for entry in compared}
    logs |= {entry.speed.reference for entry in compared if entry.speed}
    subject = (
        "Neither log names its device" if len(logs) == 2 else "The logs do not name their device"
    )
    return [f"{subject}; the same one is assumed (--device states it, or DEVICE= under make)."]


def _describe_flaws(comparison: SpeedComparison) -> str:
    """Return a clause on the first differences that do not belong to the strategy, with both values.

    Paths are only counted. The clause is empty if there are no differences.
    """
    flaws = [
        difference
        for difference in comparison.differences
        if not difference.part_of_strategy and difference.what not in comparison.model_doubt
    ]
    # Paths are long and always differ between machines, so they are only counted.
    without_paths = [flaw for flaw in flaws if "/" not in flaw.reference + flaw.other]
    texts = []
    for flaw in without_paths[:_MAX_FLAWS]:
        texts.append(f"{flaw.what} ({_cut(flaw.reference)} | {_cut(flaw.other)})")
    more, num_paths = len(without_paths) - _MAX_FLAWS, len(flaws) - len(without_paths)
    if more > 0:
        texts.append(f"{more} more")
    if num_paths:
        texts.append(plural(num_paths, "path"))
    return f"; not the same: {joined(texts)}" if texts else ""


def _cut(value: str) -> str:
    """Return a value, cut to _MAX_VALUE_LENGTH characters."""
    return value if len(value) <= _MAX_VALUE_LENGTH else f"{value[: _MAX_VALUE_LENGTH - 1]}…"


def _different_batches(reference: RunSpec | None, other: RunSpec | None) -> str:
    """Return, in brackets, the different batches of two runs; empty if they are equal or one of them is unknown."""
    if reference is None or other is None or reference.batch == other.batch:
        return ""
    return f" (batch {reference.batch} | {other.batch})"


def _describe_endings(entry: Entry) -> Iterator[str]:
    """Yield a phrase for each kind of run of a row that did not end well or is still running, with its status."""
    row = entry.configuration
    if entry.run.status.status is not Status.OK:
        yield f"{entry.label} ({_describe_ending(entry.run)})"
    if failed := row.failed_before:
        newest = _describe_ending(failed[-1])
        if len(failed) > 1:
            yield f"{len(failed)} earlier attempts of {entry.label} (the newest: {newest})"
        else:
            yield f"an earlier attempt of {entry.label} ({newest})"
    if row.running:
        yield f"one more run of {entry.label} ({_describe_ending(row.running[-1])})"


def _describe_ending(run: Run) -> str:
    """Return a run's status with its reason, such as `crashed: out of memory on rank 1`."""
    status = run.status.status.replace("_", " ")
    return f"{status}: {run.status.reason.rstrip('.')}" if run.status.reason else status


def _parity_sentences(report: Report) -> list[str]:
    """Return sentences on the rows whose losses agree, on those that differ, and on those that cannot be judged."""
    held = held_parity_sentence(report)
    texts = [held] if held else []
    texts += broken_parity_sentences(report)
    texts += unjudged_parity_sentences(report)
    texts += _last_loss_sentences(report)
    for entry in report.entries:
        if entry.parity.repeats_differ:
            texts.append(f"{entry.label}: {entry.parity.repeats_differ}.")
    labels_by_reason: dict[str, list[str]] = {}
    for entry in report.entries:
        if entry.parity.without_baseline:
            labels_by_reason.setdefault(entry.parity.without_baseline, []).append(entry.label)
    for reason, labels in labels_by_reason.items():
        texts.append(
            f"Losses of {join_first_names(labels)} are not compared with baseline: {reason}."
        )
    return texts


def _last_loss_sentences(report: Report) -> list[str]:
    """Return one sentence per row that did its reference's work with settings that may change the losses.

    Each sentence states the last loss that both rows have. After a few sentences, one says how many more rows
    there are.
    """
    texts = []
    for entry in report.entries:
        losses = entry.parity.last_losses
        if losses is None:
            continue
        reference = _name_references([entry], report)
        texts.append(
            f"After {plural(losses.iteration, 'iteration')} the loss of {entry.label} is"
            f" {losses.loss:.3f}, against {losses.reference_loss:.3f} of {reference}"
            f" ({entry.parity.reason})."
        )
    return _limit_sentences(texts, "losses of other settings are in results.json.")


def held_parity_sentence(report: Report) -> str:
    """Return a sentence that lists the rows whose losses agree with their references; empty if there are none."""
    held = [entry for entry in report.entries if entry.parity.verdict == HELD]
    if not held:
        return ""
    units = round(max(entry.parity.max_units or 0 for entry in held))
    difference = "no printed loss differs"
    if units:
        difference += f" by more than {plural(units, 'unit')} of its last digit"
    basis = "rounding alone"
    if all(entry.run.is_foreign for entry in held):
        basis = f"{LOGS_AGREE:g} of the loss"
    elif any(entry.parity.repeats for entry in held):
        basis = "the spread of repeats and the rounding"
    verb = "train" if len(held) > 1 else "trains"
    fewest = min(entry.parity.compared for entry in held)
    return (
        f"{join_first_names([entry.label for entry in held])} {verb} the same model as"
        f" {_name_references(held, report)}: over {plural(fewest, 'iteration')} {difference}"
        f" (tolerance: {basis})."
    )


def _name_references(entries: Sequence[Entry], report: Report) -> str:
    """Return the label of the rows' common reference, or `their references` if they have several."""
    references = {entry.parity.reference for entry in entries}
    if len(references) > 1:
        return "their references"
    for entry in report.entries:
        if any(run.name in references for run in entry.configuration.runs):
            return entry.label
    return "the reference"


def broken_parity_sentences(report: Report) -> list[str]:
    """Return a sentence per row whose losses differ from its reference's by more than rounding."""
    return [
        f"{entry.label} does not train the same model as {_name_references([entry], report)}: losses"
        f" differ from iteration {entry.parity.verdict.partition('@')[2]} on"
        f" ({entry.parity.verdict}), by up to {entry.parity.max_difference:.3g}."
        for entry in report.entries
        if entry.parity.is_broken
    ]


def unjudged_parity_sentences(report: Report) -> list[str]:
    """Return sentences on why the losses of foreign logs are not judged, one sentence per reason."""
    labels_without_shape: list[str] = []
    labels_by_reason: dict[str, list[str]] = {}
    for entry in report.entries:
        if not entry.run.is_foreign or entry.parity.verdict != NOT_COMPARABLE:
            continue
        if entry.parity.reason == f"{entry.run.name} {NO_SHAPE}":
            labels_without_shape.append(entry.label)
        else:
            labels_by_reason.setdefault(entry.parity.reason, []).append(entry.label)
    texts = []
    if labels_without_shape:
        is_single = len(labels_without_shape) == 1
        states = NO_SHAPE if is_single else "do not state their models' shapes"
        whose = "its" if is_single else "their"
        names = join_first_names(labels_without_shape)
        texts.append(f"{names} {states}, so {whose} losses are not judged.")
    for reason, labels in labels_by_reason.items():
        texts.append(f"The losses of {join_first_names(labels)} are not judged: {reason}.")
    return _limit_sentences(texts, "reasons are in the notes of their rows.")
