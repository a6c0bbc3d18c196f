"""Write the report's short summary: at most six sentences, the most important first.

The headline (`headline.py`) says which strategy is fastest. The summary adds whether all strategies train
the same model, what the times are worth, and which runs did not end well. All verdicts with their intervals
are in `sentences.py`.
"""

from __future__ import annotations

from parakit.artifacts.run import Status
from parakit.formatting.units import plural
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.statistics import smallest_visible_difference
from parakit.reporting.render.sentences import (
    assumed_device_sentences,
    broken_parity_sentences,
    change_sentences,
    ending_sentence,
    held_parity_sentence,
    join_first_names,
    left_out_sentences,
    published_sentences,
    unjudged_parity_sentences,
    withheld_sentences,
)

MAX_SENTENCES = 6

CPU_SENTENCE = (
    "Times on CPU ranks say nothing about GPUs, because ranks share cores; losses, parameters and bytes"
    " are exact."
)


def summary_sentences(report: Report) -> list[str]:
    """Return at most MAX_SENTENCES sentences on a report, without its headline."""
    if not report.entries:
        return [ending_sentence(report)]
    texts = [same_model_sentence(report), worth_sentence(report), ending_sentence(report)]
    texts += withheld_sentences(report)
    texts += left_out_sentences(report)
    texts += assumed_device_sentences(report)
    texts += change_sentences(report)
    texts += published_sentences(report)
    return [text for text in texts if text][:MAX_SENTENCES]


def terminal_sentences(report: Report, headline: str) -> list[str]:
    """Return the sentences that the terminal prints below the tables.

    They are the headline, whether all rows train the same model, what the times are worth, and warnings. Runs
    that did not end well, and an earlier report, each add a sentence.
    """
    if not report.entries:
        return [ending_sentence(report)]
    texts = [headline, same_model_sentence(report), worth_sentence(report)]
    texts += [text for text in withheld_sentences(report) if text not in headline]
    texts += left_out_sentences(report)
    texts += assumed_device_sentences(report)
    if _has_bad_ending(report):
        texts.append(ending_sentence(report))
    if report.baseline:
        texts += change_sentences(report)
    return list(dict.fromkeys(text for text in texts if text))


def _has_bad_ending(report: Report) -> bool:
    """Return True if a run failed, was stopped or is still running."""
    for entry in report.entries:
        row = entry.configuration
        if row.failed_before or row.running or entry.run.status.status is not Status.OK:
            return True
    return False


def same_model_sentence(report: Report) -> str:
    """Return a sentence on whether all strategies train the same model; empty if no losses can be reported on."""
    broken = broken_parity_sentences(report)
    if len(broken) == 1:
        return broken[0]
    if broken:
        labels = [entry.label for entry in report.entries if entry.parity.is_broken]
        return f"{join_first_names(labels)} do not train the same model as their references."
    held = held_parity_sentence(report)
    if held:
        return held
    return next(iter(unjudged_parity_sentences(report)), "")


def worth_sentence(report: Report) -> str:
    """Return a sentence on what the times of a report are worth.

    It is empty if nothing was timed, or if enough repeats show the scatter of the times.
    """
    timed = [entry for entry in report.entries if entry.estimate]
    if any(entry.run.device == "cpu" for entry in timed):
        return CPU_SENTENCE
    for entry in timed:
        estimate = entry.estimate
        # From three runs on, the runs' own scatter stands in the intervals, and nothing is assumed.
        if estimate and estimate.standard_error and estimate.degrees_of_freedom is None:
            scatter = estimate.scatter
            least = smallest_visible_difference(
                estimate.runs, scatter.assumed, scatter.degrees_of_freedom
            )
            return (
                f"With {plural(estimate.runs, 'run')} per row, a difference in time below {least:.1%}"
                " cannot be seen."
            )
    return ""
