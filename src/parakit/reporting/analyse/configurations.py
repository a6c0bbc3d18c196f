"""Group runs into the rows of a report, and label the rows.

Runs of one identity under the same conditions are repeats and share a row. Identity is the trained
configuration, the device and the data. Conditions are code, Megatron, software and host. Failed runs stay
visible: they are counted in a row, or have a row of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.identity import (
    TrainingIdentity,
    essential_arguments,
    identify_run,
    identify_training,
)
from parakit.artifacts.run import RunRecord
from parakit.config.offload import offload_flags
from parakit.config.run import RunSpec
from parakit.config.strategy import EXAMPLE_STRATEGIES
from parakit.formatting.units import bit_rate
from parakit.logs import Run
from parakit.reporting.analyse.arguments import find_differing_arguments
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
    """Row of the report: repeats of one configuration, or one run that failed."""

    runs: tuple[Run, ...]
    """Runs whose times count, or the failed run; oldest first."""
    estimate: Estimate | None
    """Milliseconds per iteration over the runs; None if none has a usable time."""
    failed_before: tuple[Run, ...] = ()
    """Failed runs of the same configuration before the row's runs, oldest first."""
    running: tuple[Run, ...] = ()
    """Runs of the same configuration that are not finished; no figure of the row uses them."""
    superseded: int = 0
    """Number of older runs of the same configuration under other conditions, which are not shown."""
    other_code: int = 0
    """Number of superseded runs that are known to be by other code."""

    @property
    def newest(self) -> Run:
        """Newest run of the row, whose losses, memory and provenance the report shows."""
        return self.runs[-1]


RowIdentity = tuple[TrainingIdentity, str]
"""Trained configuration and device; runs with equal identities are repeats, whatever their names are."""


def build_row_identity_from_parts(
    run: str,
    device: str,
    spec: RunSpec | None,
    record: RunRecord | None,
    printed: Mapping[str, str],
) -> RowIdentity:
    """Return the identity by which runs are pooled in a row and rows of two reports are matched.

    Args:
        run: Name of the run; it is the identity of a run without a known configuration.
        device: Device as in `results.csv`.
        spec: Trained configuration; None if it is unknown.
        record: Contents of `run.json`; None for a foreign log.
        printed: Arguments that a foreign log prints.
    """
    if spec is None:
        return TrainingIdentity(None, otherwise=run), device
    identity = identify_run(record).training if record else identify_training(spec, printed)
    return replace(identity, spec=spec).repeated(), device


def build_row_identity(run: Run) -> RowIdentity:
    """Return the configuration and device by which a run is grouped with its repeats."""
    return build_row_identity_from_parts(run.name, run.device, run.spec, run.record, run.arguments)


def group_into_rows(runs: Iterable[Run], all_conditions: bool = False) -> list[Configuration]:
    """Group runs into rows. Repeats among the kit's runs share a row, and each foreign log has a row of its own.

    Rows are ordered by model, device, ranks and strategy. If a foreign log is among the runs, rows are in the
    order of `runs` instead.

    Args:
        runs: Runs in the order in which the user named them.
        all_conditions: True gives runs under older conditions rows of their own. Otherwise only the newest
            conditions of a configuration are shown, and the other runs are counted.
    """
    named_runs = list(runs)
    rows: list[Configuration] = []
    for members in _group_repeats(named_runs):
        rows += _build_rows(members, all_conditions)
    if any(run.is_foreign for run in named_runs):
        positions = {id(run): position for position, run in enumerate(named_runs)}
        return sorted(rows, key=lambda row: min(positions[id(run)] for run in row.runs))
    return sorted(rows, key=_row_order)


def _group_repeats(runs: Sequence[Run]) -> list[list[Run]]:
    """Return groups of runs that repeat one another, each from the oldest to the newest run.

    Runs of the kit are repeats if they trained the same configuration on the same kind of device. Logs of other
    trainers are repeats only if the user has given them one name (`repeats_name`). Any other such log is a
    group by itself.
    """
    groups: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.record.created_utc if run.record else ""):
        if run.repeats_name:
            groups[(run.repeats_name,)].append(run)
        else:
            # The name keeps foreign logs with equal configurations apart.
            foreign_name = run.name if run.is_foreign else ""
            groups[build_row_identity(run), foreign_name].append(run)
    return list(groups.values())


def _build_rows(members: Sequence[Run], all_conditions: bool) -> list[Configuration]:
    """Return the rows of the report for runs that repeat one another.

    Args:
        members: The runs, from the oldest to the newest.
        all_conditions: True returns rows for all conditions, such as versions of the code. False returns rows for
            the newest conditions only, and counts the runs under older ones.
    """
    running = [run for run in members if run.is_running]
    ended = [run for run in members if not run.is_running]
    if not ended:
        # If no run has ended, the newest running one is the row's run.
        ended.append(running.pop())
    runs_by_conditions: dict[tuple[object, ...], list[Run]] = defaultdict(list)
    for run in ended:
        runs_by_conditions[_conditions_key(run)].append(run)
    newest_key = _conditions_key(ended[-1])
    older_runs = [run for run in ended if _conditions_key(run) != newest_key]
    rows: list[Configuration] = []
    for key, runs in runs_by_conditions.items():
        is_newest = key == newest_key
        if not is_newest and not all_conditions:
            continue
        new_rows = _split_by_success(runs, older=() if all_conditions else older_runs)
        if is_newest:
            new_rows[0] = replace(new_rows[0], running=tuple(running))
        rows += new_rows
    return rows


def make_names_distinct(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with a distinct name for each run that shares its name with another.

    The name of the run's folder is put before the name. If runs of one name are in the same folder, a number is
    appended instead.
    """
    runs_by_name: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        runs_by_name[run.name].append(run)
    renamed = []
    numbers: Counter[str] = Counter()
    for run in runs:
        namesakes, name = runs_by_name[run.name], run.name
        numbers[name] += 1
        if len(namesakes) > 1:
            num_in_same_folder = sum(other.path.parent == run.path.parent for other in namesakes)
            if num_in_same_folder > 1:
                name = f"{name} ({numbers[name]})"
            else:
                # The log of a run of the kit lies in the run's own folder, whose name is the run's name.
                folder = run.path.parent if run.is_foreign else run.path.parent.parent
                name = f"{folder.name}/{name}"
        renamed.append(replace(run, name=name))
    return renamed


def estimate_pooled_runs(runs: Sequence[Run]) -> Estimate | None:
    """Return the milliseconds per iteration over all runs together; None if no run has measured iterations.

    Runs that other programs slowed down are left out, unless all runs were slowed down.
    """
    measured = [run for run in runs if run.has_measurements]
    if not measured:
        return None
    undisturbed = [run for run in measured if not why_disturbed(run)]
    samples = [run.window.samples_ms for run in undisturbed or measured]
    return estimate_time(samples, scatter=device_scatter(runs[-1].device))


def device_scatter(device: str) -> Scatter:
    """Return how repeats scatter on a device; an unnamed device counts as a GPU."""
    return ON_CPU_RANKS if device == "cpu" else ON_GPUS


def _split_by_success(runs: Sequence[Run], older: Sequence[Run]) -> list[Configuration]:
    """Return at most two rows: the runs with usable times, and the failures after the last of these runs.

    Args:
        runs: Runs of one identity under the same conditions, oldest first.
        older: Runs under older conditions, which are counted.
    """
    num_other_code = sum(_is_by_other_code(run, runs[-1]) for run in older)
    success_indexes = [index for index, run in enumerate(runs) if run.has_measurements]
    num_until_success = success_indexes[-1] + 1 if success_indexes else 0
    until_success = runs[:num_until_success]
    failures_after = tuple(runs[num_until_success:])
    rows = []
    if until_success:
        successes = tuple(run for run in until_success if run.has_measurements)
        row = Configuration(
            runs=successes,
            estimate=estimate_pooled_runs(successes),
            failed_before=tuple(run for run in until_success if not run.has_measurements),
            superseded=len(older),
            other_code=num_other_code,
        )
        rows.append(row)
    if failures_after:
        row = Configuration(
            runs=failures_after[-1:],
            estimate=None,
            failed_before=failures_after[:-1],
            superseded=len(older),
            other_code=num_other_code,
        )
        rows.append(row)
    return rows


def _is_by_other_code(run: Run, newest: Run) -> bool:
    """Return True if both runs record their code and the codes differ."""
    if run.record is None or newest.record is None:
        return False
    code, newest_code = run.record.code, newest.record.code
    return bool(code and newest_code and code != newest_code)


def _conditions_key(run: Run) -> tuple[object, ...]:
    """Return a key that is equal for runs with the same code, Megatron, software and host.

    The key is empty for a log without a run folder, because such a log does not record these conditions.
    """
    record = run.record
    if record is None:
        return ()
    code = identify_run(record).code
    # Old records have no hash of the code, so their commits stand for the code.
    has_hash = code.code is not None
    commits = None if has_hash else (record.kit_commit, code.entry.megatron_commit)
    # Equal code may lie in another folder, or belong to another commit.
    entry = replace(code.entry, path="", megatron_commit=None)
    code_in_any_folder = replace(code, entry=entry)
    host = record.host
    return code_in_any_folder, commits, host.name, host.driver, host.interconnect


def _row_order(row: Configuration) -> tuple[object, ...]:
    """Return the sort key of a row: model, device, precision, position of the strategy in the examples, ranks."""
    run, spec = row.newest, row.newest.spec
    position = (
        EXAMPLE_STRATEGIES.index(run.strategy)
        if run.strategy in EXAMPLE_STRATEGIES
        else len(EXAMPLE_STRATEGIES)
    )
    dtype, ranks = (spec.dtype, spec.parallelism.world_size) if spec else ("", 0)
    return run.model or "~", run.device, dtype, position, ranks, run.strategy, run.name


def label_rows(rows: Sequence[Configuration]) -> list[str]:
    """Return a distinct label per row, such as `tp2 ×2`.

    Equal labels are extended by a property that distinguishes the rows, such as version or batch, or else by
    the run's name. Foreign logs have the names of their files, by which their owner knows the runs, if there is
    only one or if the strategy of one is unknown.
    """
    labels = []
    foreign_runs = [row.newest for row in rows if row.newest.is_foreign]
    names_logs = len(foreign_runs) == 1 or any(run.spec is None for run in foreign_runs)
    rows_by_label: dict[tuple[tuple[str, ...], str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        run, spec = row.newest, row.newest.spec
        has_name_of_file = run.is_foreign and names_logs and not run.repeats_name
        label = run.name if has_name_of_file else _plain_label(run)
        labels.append(label)
        # Rows of different tables may share a label, but logs of all models appear in the same sentences.
        table: tuple[str, ...] = ()
        if not run.is_foreign:
            table = (run.model, run.device, spec.dtype if spec else "")
        rows_by_label[table, label].append(index)
    for indexes in rows_by_label.values():
        if len(indexes) == 1:
            continue
        suffixes = _distinguishing_suffixes([rows[index].newest for index in indexes])
        for index, suffix in zip(indexes, suffixes, strict=True):
            labels[index] += f" {suffix}"
    return labels


def _plain_label(run: Run) -> str:
    """Return a run's strategy with its ranks and patch file, or its name if the strategy is unknown."""
    if run.spec is None or run.repeats_name:
        return run.repeats_name or run.name
    label = f"{run.strategy} ×{run.spec.parallelism.world_size}"
    patch_file = run.spec.patch_file
    return f"{label} with PATCH_FILE={patch_file.path}" if patch_file else label


def describe_link(spec: RunSpec) -> str:
    """Return the limit of the link between the two halves of the ranks: `at 1 Gbit/s`, or `unshaped`."""
    rate = spec.link_bits_per_second
    return "unshaped" if rate is None else f"at {bit_rate(rate)}"


def describe_fused_patches(spec: RunSpec | None) -> str:
    """Return the fused patches of `FUSED=`, separated by commas, or `none`."""
    return (",".join(spec.fused) if spec else "") or "none"


def describe_patch_file(spec: RunSpec | None) -> str:
    """Return the file of `PATCH_FILE=` with the start of its hash, or `none`."""
    patch_file = spec.patch_file if spec else None
    return f"{patch_file.path} ({patch_file.sha256[:8]})" if patch_file else "none"


def _distinguishing_suffixes(runs: Sequence[Run]) -> list[str]:
    """Return a text per run that distinguishes the run from the others.

    The text is the first property whose values all differ, or else several properties joined. If properties do
    not distinguish the runs, it lists the arguments that differ (only for runs of the kit), or else it is the
    run's name.
    """
    varying_texts: list[list[str]] = []
    for describe in _DISTINCTIONS:
        texts = [describe(run) for run in runs]
        if _are_distinct(texts):
            return texts
        if len(set(texts)) > 1:
            varying_texts.append(texts)
    joined_texts = []
    for index in range(len(runs)):
        texts_of_run = [texts[index] for texts in varying_texts if texts[index]]
        joined_texts.append(" ".join(texts_of_run))
    if _are_distinct(joined_texts):
        return joined_texts
    argument_texts = _describe_differing_arguments(runs)
    if len(set(argument_texts)) == len(runs):
        return argument_texts
    return [run.name for run in runs]


def _are_distinct(texts: Sequence[str]) -> bool:
    """Return True if no text is empty and no two texts are equal."""
    return all(texts) and len(set(texts)) == len(texts)


_MAX_ARGUMENTS = 3
"""Arguments in a label, beyond which it would be longer than the name of the run's folder."""


def _describe_differing_arguments(runs: Sequence[Run]) -> list[str]:
    """Return a text per run with its values of the arguments that differ, such as `lr 0.001`.

    The list is empty if no arguments differ, if more than _MAX_ARGUMENTS differ, or if one of the runs is a
    foreign log.
    """
    if any(run.is_foreign for run in runs):
        return []
    differing = find_differing_arguments([essential_arguments(run.arguments) for run in runs])
    if not 0 < len(differing) <= _MAX_ARGUMENTS:
        return []
    texts = []
    for index in range(len(runs)):
        arguments = [
            f"{name.replace('_', '-')} {values[index] or 'not given'}"
            for name, values in differing.items()
        ]
        texts.append(", ".join(arguments))
    return texts


def _describe_spec(describe: Callable[[RunSpec], str]) -> Callable[[Run], str]:
    """Return a function that describes a run's configuration; an unknown one gives an empty text."""
    return lambda run: describe(run.spec) if run.spec else ""


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
"""Functions that describe what may distinguish runs of one label, the most telling first."""
