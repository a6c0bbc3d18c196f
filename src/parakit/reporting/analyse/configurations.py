"""Rows of a report: repeats of what was trained are pooled, failures stay visible; and their labels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.identity import TrainingIdentity, identify_run, identify_training
from parakit.artifacts.run import RunRecord
from parakit.config.offload import offload_flags
from parakit.config.run import RunSpec
from parakit.config.strategy import EXAMPLE_STRATEGIES
from parakit.formatting.units import bit_rate
from parakit.logs import Run
from parakit.reporting.analyse.disturbance import why_disturbed
from parakit.reporting.analyse.statistics import (
    ON_CPU_RANKS,
    ON_GPUS,
    Estimate,
    Scatter,
    estimate_time,
)


@dataclass(frozen=True)
class Configuration:
    """One row of the report: repeats of one configuration, or one run that failed."""

    runs: tuple[Run, ...]
    """Oldest first."""
    estimate: Estimate | None
    failed_before: tuple[Run, ...] = ()
    """Older failures of the same configuration, oldest first."""
    running: tuple[Run, ...] = ()
    """Runs of it that are still on and in none of its figures."""
    superseded: int = 0
    """Older runs of the same configuration by other code, under other versions or on another machine."""
    other_code: int = 0
    """Of those, the runs that are known to be by other code."""

    @property
    def newest(self) -> Run:
        """The run whose losses, memory and provenance are shown."""
        return self.runs[-1]


RowIdentity = tuple[TrainingIdentity, str]
"""What was trained, and on which device. Runs with equal ones are repeats, whatever they are called."""


def build_row_identity_from_parts(
    run: str,
    device: str,
    spec: RunSpec | None,
    record: RunRecord | None,
    printed: Mapping[str, str],
) -> RowIdentity:
    """Of a run, also of one that an earlier report describes.

    Args:
        run: Its name.
        device: As in `results.csv`.
        spec: What was trained, where that is known.
        record: Its `run.json`; None of a foreign log.
        printed: Arguments that a foreign log prints.
    """
    if spec is None:
        return TrainingIdentity(None, otherwise=run), device
    found = identify_run(record).training if record else identify_training(spec, printed)
    return replace(found, spec=spec).repeated(), device


def build_row_identity(run: Run) -> RowIdentity:
    """Of a run that was read."""
    return build_row_identity_from_parts(run.name, run.device, run.spec, run.record, run.arguments)


def group_into_rows(runs: Iterable[Run], all_conditions: bool = False) -> list[Configuration]:
    """Group runs into rows: repeats that the kit made are one, every foreign log is its own.

    Rows are ordered by model, device, ranks and strategy; with a foreign log among them as the runs
    were named.

    Args:
        runs: In the order in which they were named.
        all_conditions: Whether older versions and other machines get rows of their own; else only
            the newest conditions of a configuration are shown and the others are counted.
    """
    named = list(runs)
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in sorted(named, key=lambda run: run.record.created_utc if run.record else ""):
        # Of two foreign logs only somebody can say that they are repeats.
        own = run.name if run.is_foreign else ""
        groups[(run.repeats_name,) if run.repeats_name else (build_row_identity(run), own)].append(
            run
        )
    rows: list[Configuration] = []
    for members in groups.values():
        # Runs that have ended; where none has, the newest that is on is the row's.
        running = [run for run in members if run.is_running]
        ended = [run for run in members if not run.is_running] or [running.pop()]
        by_conditions: dict[tuple[object, ...], list[Run]] = defaultdict(list)
        for run in ended:
            by_conditions[_conditions(run)].append(run)
        newest = by_conditions[_conditions(ended[-1])]
        older = [run for each in by_conditions.values() if each is not newest for run in each]
        for group in by_conditions.values() if all_conditions else [newest]:
            found = _rows(group, () if all_conditions else older)
            if group is newest:
                found[0] = replace(found[0], running=tuple(running))
            rows += found
    if any(run.is_foreign for run in named):
        places = {id(run): place for place, run in enumerate(named)}
        return sorted(rows, key=lambda row: min(places[id(run)] for run in row.runs))
    return sorted(rows, key=_order)


def make_names_distinct(runs: Sequence[Run]) -> list[Run]:
    """Logs of one file name get as much of their folders as tells them apart, else a number."""
    names: dict[str, list[Run]] = defaultdict(list)
    result = []
    for run in runs:
        names[run.name].append(run)
    numbers: Counter[str] = Counter()
    for run in runs:
        same, name = names[run.name], run.name
        numbers[name] += 1
        if len(same) > 1:
            folder = run.path.parent if run.is_foreign else run.path.parent.parent
            alike = sum(other.path.parent == run.path.parent for other in same) > 1
            name = f"{name} ({numbers[name]})" if alike else f"{folder.name}/{name}"
        result.append(replace(run, name=name))
    return result


def estimate_pooled_runs(runs: Sequence[Run]) -> Estimate | None:
    """Return the iteration time of runs together in milliseconds; None if no run has one that counts.

    Runs that other programs slowed down are left out, unless all were.
    """
    counting = [run for run in runs if run.has_measurements]
    undisturbed = [run for run in counting if not why_disturbed(run)]
    samples = [run.window.samples_ms for run in undisturbed or counting]
    return estimate_time(samples, scatter=device_scatter(runs[-1].device)) if samples else None


def device_scatter(device: str) -> Scatter:
    """How runs are known to scatter on a device; of a log that does not name it, as on GPUs."""
    return ON_CPU_RANKS if device == "cpu" else ON_GPUS


def _rows(group: Sequence[Run], older: Sequence[Run]) -> list[Configuration]:
    code = group[-1].record and group[-1].record.code
    codes = [run.record and run.record.code for run in older]
    superseded = (len(older), sum(bool(code and each and each != code) for each in codes))
    end = 1 + max((place for place, run in enumerate(group) if run.has_measurements), default=-1)
    counting = tuple(run for run in group[:end] if run.has_measurements)
    rows = []
    if counting:
        failed = tuple(run for run in group[:end] if not run.has_measurements)
        rows.append(
            Configuration(counting, estimate_pooled_runs(counting), failed, (), *superseded)
        )
    if since := tuple(group[end:]):
        rows.append(Configuration(since[-1:], None, since[:-1], (), *superseded))
    return rows


def _conditions(run: Run) -> tuple[object, ...]:
    if run.record is None:
        return ()
    code, host = identify_run(run.record).code, run.record.host
    # Commits stand for the code in records of before its hash was kept.
    commits = (run.record.kit_commit, code.entry.megatron_commit) if code.code is None else None
    code = replace(code, entry=replace(code.entry, path="", megatron_commit=None))
    return code, commits, host.name, host.driver, host.interconnect


def _order(row: Configuration) -> tuple[object, ...]:
    run, spec = row.newest, row.newest.spec
    place = (
        EXAMPLE_STRATEGIES.index(run.strategy)
        if run.strategy in EXAMPLE_STRATEGIES
        else len(EXAMPLE_STRATEGIES)
    )
    dtype, ranks = (spec.dtype, spec.parallelism.world_size) if spec else ("", 0)
    return run.model or "~", run.device, dtype, place, ranks, run.strategy, run.name


def label_rows(rows: Sequence[Configuration]) -> list[str]:
    """`tp2 ×2`, with what sets it apart from others of that name: version, batch, …, else the run."""
    result = []
    groups: dict[tuple[tuple[str, ...], str], list[int]] = defaultdict(list)
    for place, run in enumerate(row.newest for row in rows):
        spec, label = run.spec, run.repeats_name or run.name
        if spec and not run.repeats_name:
            label = f"{run.strategy} ×{spec.parallelism.world_size}"
            label += f" with PATCH_FILE={spec.patch_file.path}" if spec.patch_file else ""
        result.append(label)
        tables = (run.model, run.device, spec.dtype if spec else "")
        # Logs of other models and devices stand in tables of their own, but in the same sentences.
        groups[() if run.is_foreign else tables, label].append(place)
    for places in groups.values():
        if len(places) > 1:
            suffixes = _suffixes([rows[place].newest for place in places])
            for place, suffix in zip(places, suffixes, strict=True):
                result[place] += f" {suffix}"
    return result


def describe_link(spec: RunSpec) -> str:
    """The limit of the link between the two halves of the ranks, in words."""
    bits = spec.link_bits_per_second
    if bits is None:
        return "unshaped"
    return f"at {bit_rate(bits)}"


def describe_fused_patches(spec: RunSpec | None) -> str:
    """The names of `FUSED=`, or `none`."""
    return (",".join(spec.fused) if spec else "") or "none"


def describe_patch_file(spec: RunSpec | None) -> str:
    """The file of `PATCH_FILE=` and the start of its hash, or `none`."""
    patch_file = spec.patch_file if spec else None
    return f"{patch_file.path} ({patch_file.sha256[:8]})" if patch_file else "none"


def _suffixes(runs: Sequence[Run]) -> list[str]:
    for say in _DISTINCTIONS:
        found = [say(run) for run in runs]
        if len(set(found)) == len(found) and all(found):
            return found
    varying = [say for say in _DISTINCTIONS if len({say(run) for run in runs}) > 1]
    joined = [" ".join(filter(None, (say(run) for say in varying))) for run in runs]
    distinct = len(set(joined)) == len(joined) and all(joined)
    return joined if distinct else [run.name for run in runs]


def _describe_spec(say: Callable[[RunSpec], str]) -> Callable[[Run], str]:
    return lambda run: say(run.spec) if run.spec else ""


_DISTINCTIONS: tuple[Callable[[Run], str], ...] = (
    _describe_spec(lambda spec: f"batch {spec.batch}"),
    _describe_spec(lambda spec: f"seq {spec.shape.seq_length}"),
    lambda run: run.megatron.split(" ")[0],
    _describe_spec(lambda spec: spec.backend),
    lambda run: describe_link(run.record.spec) if run.record else "",
    lambda run: f"patches {describe_fused_patches(run.spec)}",
    lambda run: f"patch file {describe_patch_file(run.spec)}",
    _describe_spec(lambda spec: f"recompute {spec.recompute}"),
    _describe_spec(lambda spec: " ".join(offload_flags(spec.offload))),
    lambda run: run.status.status.value,
    lambda run: run.record.host.name if run.record else "",
)
