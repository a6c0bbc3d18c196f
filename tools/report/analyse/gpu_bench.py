"""`make bench-gpu`'s runs as rows: repeats of a setting under equal conditions, over what was timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.records.gpu_bench import FOLDER, Ceilings, read_ceilings, timed_iterations
from tools.records.run import Status
from tools.report.analyse.configurations import identity_of_run
from tools.report.analyse.entry import Entry
from tools.report.analyse.rows import rows_of_runs
from tools.report.read.kernels import split_of
from tools.report.read.runs import Run, find_run_folders, load_runs
from tools.report.read.window import Window
from tools.spec.flags import Flags
from tools.spec.run import DeviceKind

FEWEST = 0.8
"""Share of the timed iterations that must count: fp16 skips an update now and then."""


@dataclass(frozen=True)
class BenchRow:
    """A setting and its runs; a note where there is none that counts."""

    name: str
    dtype: str
    fused: tuple[str, ...]
    entry: Entry | None = None
    kernels_ms: Mapping[str, float] = field(default_factory=dict)
    """An iteration's by group of kernels; empty where no trace was made."""
    note: str = ""
    """What went wrong, also after the timed iterations, which count nevertheless."""


@dataclass(frozen=True)
class Bench:
    """What a folder of runs holds of it."""

    rows: tuple[BenchRow, ...]
    """In the order in which their first runs were made."""
    ceilings: Ceilings | None = None


def read_bench(runs: Path) -> Bench | None:
    """The bench below a folder of runs; None if there is none.

    Raises:
        OSError: A folder cannot be read.
        msgspec.DecodeError: The ceilings are not JSON of their shape.
    """
    ceilings, root = read_ceilings(runs), runs / FOLDER
    folders = [folder for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []
    found = [(folder.name, load_runs(find_run_folders(folder))[0]) for folder in folders]
    settings = sorted(((name, each) for name, each in found if each), key=_first)
    if not settings:
        return None
    newest = max((run for _, each in settings for run in each), key=lambda run: run.name)
    kept = [
        (name, [run for run in each if _alike(run, each[-1], newest)]) for name, each in settings
    ]
    rows = (_row(name, list(map(_timed, each))) for name, each in kept if each)
    return Bench(tuple(rows), ceilings)


def _first(setting: tuple[str, Sequence[Run]]) -> str:
    return setting[1][0].name


def _alike(run: Run, last: Run, newest: Run) -> bool:
    """Whether it trained what its setting's last run did, where the bench's newest run was made."""
    return identity_of_run(run) == identity_of_run(last) and _conditions(run) == _conditions(newest)


def _conditions(run: Run) -> tuple[object, ...]:
    """As a run that stands for one not made: software, image and devices."""
    record = run.record
    return (record.software, record.image, record.host.devices) if record else ()


def _timed(run: Run) -> Run:
    """With the timed iterations as its window; a run that fell over after them counts."""
    assert run.record is not None
    wanted = timed_iterations(run.record.argv, run.record.exit_interval)
    found = {
        each.iteration: each.elapsed_ms
        for each in run.log.iterations
        if each.iteration in wanted and not each.skipped_iterations and each.elapsed_ms is not None
    }
    note = "" if run.status.status is Status.OK else f"{run.status.status}: {run.status.reason}"
    if len(found) < FEWEST * len(wanted):
        few = f"{run.name} has {len(found)} of {len(wanted)} timed iterations that were not skipped"
        return replace(run, window=Window(), notes=(note or few,))
    status = run.status if not note else replace(run.status, status=Status.INCOMPLETE)
    window = Window(tuple(found.values()), tuple(found), run.window.global_batch_size)
    return replace(run, window=window, status=status, notes=(note,) if note else ())


def _row(name: str, runs: Sequence[Run]) -> BenchRow:
    counting = [run for run in runs if run.counts]
    spec = runs[-1].spec
    assert spec is not None
    row = BenchRow(name, spec.dtype, spec.fused)
    if not counting:
        return replace(row, note=runs[-1].notes[0])
    (entry,) = rows_of_runs([counting[::-1]])
    kernels, problem = _kernels(counting)
    notes = (*(note for run in counting for note in run.notes), problem)
    return replace(row, entry=entry, kernels_ms=kernels, note="; ".join(filter(None, notes)))


def _kernels(runs: Sequence[Run]) -> tuple[Mapping[str, float], str]:
    """Of the newest run that has a split, and the newest's problem."""
    problem = ""
    for run in reversed(runs):
        if run.record is None or not Flags(run.record.argv).has("--profile"):
            continue
        on_gpu = run.spec is not None and run.spec.device is DeviceKind.GPU
        found, said = split_of(run.path, on_gpu)
        problem = problem or said
        if found:
            return found, problem
    return {}, problem
