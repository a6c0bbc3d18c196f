"""Table of a chapter's runs: published figures beside measured ones."""

from __future__ import annotations

from collections.abc import Sequence

from parakit.config.run import DeviceKind
from parakit.experiments.engine import Output, Study
from parakit.experiments.runner import CellResult
from parakit.experiments.tutorial.chapters import read_chapters
from parakit.experiments.tutorial.predict import UNITS, describe_run
from parakit.experiments.tutorial.rows import OUT_OF_MEMORY, find_row, printed_gigabytes_to_bytes
from parakit.formatting.table import markdown_rows
from parakit.formatting.units import DASH, megabytes
from parakit.reporting import Entry, build_entries_from_folders

_HEADER = ("run", "it was", "published ms", "measured ms", "published memory", "measured memory")
_SENT = "sent per rank"


def write_results(study: Study) -> int:
    """Write the report of a chapter's runs and the table with the published figures; return 0 if all ended well."""
    study.write_report()
    study.write_comparison(render_results(study.experiment.report, study.results, study))
    return int(not study.is_complete)


def render_results(title: str, results: Sequence[CellResult], study: Study) -> str:
    """Return the page of a chapter: its table and, on CPU ranks, what small runs show and what they cannot show."""
    entries = build_entries_from_folders([result.folders for result in results])
    lines = [_result_cells(result, entry) for result, entry in zip(results, entries, strict=True)]
    parts = [f"# {title}", markdown_rows([*_HEADER, _SENT], lines)]
    is_small = study.experiment.cells[0].job.device is DeviceKind.CPU
    if not is_small:
        return "\n\n".join((*parts, UNITS))
    names = {find_row(result.cell.label).chapter for result in results}
    for chapter in read_chapters():
        if chapter.name in names:
            parts += [f"CPU ranks show {chapter.cpu_shows}", f"They cannot {chapter.cpu_cannot}"]
    return "\n\n".join(parts)


def _result_cells(result: CellResult, entry: Entry | None) -> list[str]:
    """Return the cells of a run's line; measured ones are dashes if the run did not end well."""
    row = find_row(result.cell.label)
    published_time = f"{row.step_ms:,.0f}" if row.step_ms else DASH
    published_memory = f"{row.memory_gb:g}" if row.memory_gb else OUT_OF_MEMORY
    time = memory = sent = DASH
    if entry is not None:
        time = f"{entry.time_ms:,.0f}" if entry.time_ms else DASH
        memory = _format_memory(entry, result)
        sent = megabytes(entry.sent_bytes)
    return [row.id, describe_run(row), published_time, time, published_memory, memory, sent]


def _format_memory(entry: Entry, result: CellResult) -> str:
    """Return the memory of the peak rank: on GPUs as the tables print it, on CPU ranks the counted MB."""
    if result.cell.job.device is DeviceKind.CPU:
        return megabytes(entry.peak_bytes)
    return (
        f"{entry.device_bytes / printed_gigabytes_to_bytes(1):.1f}" if entry.device_bytes else DASH
    )


OUTPUT = Output(write_results, finishes_if_interrupted=True)
