"""Compare the times of two rows, and list the differences between their runs.

`compare_speed` gives the ratios of times with verdicts. It withholds a verdict, and says why, if the devices
differ, if other programs slowed a run down or if the work per iteration is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from parakit.artifacts.identity import essential_arguments
from parakit.artifacts.run import RunRecord
from parakit.config.flag_table import argument_names, flags_with_role
from parakit.config.offload import offload_flags
from parakit.config.run import RunSpec
from parakit.logs import ModelDifference, Run
from parakit.reporting.analyse.arguments import find_differing_arguments
from parakit.reporting.analyse.configurations import (
    Configuration,
    describe_fused_patches,
    describe_link,
    describe_patch_file,
)
from parakit.reporting.analyse.disturbance import has_more_ranks_than_cores, why_disturbed
from parakit.reporting.analyse.must_agree import (
    DAMAGED_FILE,
    describe_differences,
    describe_unstated_flags,
)
from parakit.reporting.analyse.statistics import TimeComparison, compare_times


@dataclass(frozen=True)
class WorkMismatch:
    """Property or argument in which two runs differ."""

    what: str
    reference: str
    other: str
    part_of_strategy: bool = False
    """True if the difference follows from the strategy (ranks, padding for TP) and is no flaw."""


@dataclass(frozen=True)
class SpeedComparison:
    """Times of a row compared with its reference."""

    reference: str
    """Name of the reference's row."""
    other: str
    per_iteration: TimeComparison | None
    """Time per iteration over the reference's; None if the iterations hold different work."""
    per_token: TimeComparison | None
    """Time per token over the reference's, with all devices; per sample if a log prints no sequence length."""
    per_device_token: TimeComparison | None
    """Device time per token, on which the verdict rests if the numbers of devices differ; else None."""
    per_device: float | None
    """Tokens/s/device over the reference's: 1 is perfect scaling."""
    differences: tuple[WorkMismatch, ...]
    caution: str = ""
    """Assumption of the comparison, or the reason why there is none."""
    model_doubt: str = ""
    """Text that the models differ or may differ, with the flags; empty if they are the same."""
    device_is_assumed: bool = False
    """True if neither log names its device, so that the same one is assumed."""

    @property
    def judged_time(self) -> TimeComparison | None:
        """Comparison on which the verdict rests: per device if the numbers of devices differ, else per token."""
        return self.per_device_token or self.per_token

    def replace_judged(self, adjusted: TimeComparison) -> SpeedComparison:
        """Return the comparison with its judged times replaced by an adjusted verdict."""
        if self.per_device_token:
            return replace(self, per_device_token=adjusted)
        per_iteration = adjusted if self.per_iteration else None
        return replace(self, per_token=adjusted, per_iteration=per_iteration)


def compare_speed(reference: Configuration, other: Configuration) -> SpeedComparison:
    """Compare the times of two rows. Times per iteration are compared only if both rows do the same work."""
    reference_run, run = reference.newest, other.newest
    model_differences = reference_run.stated_model.differences(run.stated_model)
    work, caution = _find_comparable_work(reference, other)
    comparison = SpeedComparison(
        reference=reference_run.name,
        other=run.name,
        per_iteration=None,
        per_token=None,
        per_device_token=None,
        per_device=None,
        differences=tuple(list_differences(reference_run, run)),
        caution=caution,
        model_doubt=_describe_model_doubt(reference_run, run, model_differences),
        device_is_assumed=work is not None and not reference_run.device and not run.device,
    )
    if reference.estimate is None or other.estimate is None or work is None:
        return comparison
    work_ratio = work.reference / work.other
    per_token = compare_times(reference.estimate, other.estimate, work_ratio)
    comparison = replace(comparison, per_token=per_token)
    num_reference_devices, num_devices = reference_run.num_devices, run.num_devices
    if num_reference_devices and num_devices and num_reference_devices != num_devices:
        device_weight = work_ratio * num_devices / num_reference_devices
        per_device_token = compare_times(reference.estimate, other.estimate, device_weight)
        comparison = replace(comparison, per_device_token=per_device_token)
    elif work.reference == work.other and not model_differences:
        comparison = replace(comparison, per_iteration=per_token)
    if reference_run.spec and run.spec:
        reference_ranks = reference_run.spec.parallelism.world_size
        scale = reference_ranks / run.spec.parallelism.world_size
        comparison = replace(comparison, per_device=scale / per_token.ratio)
    return comparison


@dataclass(frozen=True)
class _WorkPerIteration:
    """Tokens per iteration of two runs, or samples per iteration if a log prints no sequence length."""

    reference: int
    other: int


def _find_comparable_work(
    reference: Configuration, other: Configuration
) -> tuple[_WorkPerIteration | None, str]:
    """Return the work per iteration of two rows whose times can be compared, and a caution on what is assumed.

    The first value is None if the times cannot be compared, and then the caution is the reason.
    """
    withheld = why_withheld(reference) or why_withheld(other)
    if withheld:
        return None, withheld
    work, caution = _work_per_iteration(reference.newest, other.newest)
    if work is None:
        return None, caution
    device_difference = _why_devices_differ(reference.newest, other.newest)
    if device_difference:
        return None, device_difference
    return work, caution


def why_withheld(row: Configuration) -> str:
    """Return why the times of a row say nothing about its strategy; empty if they do."""
    if row.estimate is None:
        return ""
    if any(run.has_damaged_file for run in row.runs):
        return DAMAGED_FILE
    if has_more_ranks_than_cores(row.newest):
        return OVERSUBSCRIBED
    return DISTURBED if all(map(why_disturbed, row.runs)) else ""


def why_impossible(reference: Configuration, other: Configuration, speed: SpeedComparison) -> str:
    """Return why a ratio of two times is impossible; empty if the ratio is possible or if the data cannot decide it.

    With N times as many devices the same work takes at least 1/N of the time. If the whole interval of the ratio
    is below 1/N, something slowed the run on fewer devices down.
    """
    if reference.newest.is_foreign or other.newest.is_foreign:
        return ""
    reference_spec, spec = reference.newest.spec, other.newest.spec
    if reference_spec is None or spec is None or reference_spec.batch != spec.batch:
        return ""
    if any(not difference.part_of_strategy for difference in speed.differences):
        return ""
    ratio = speed.per_iteration
    if ratio is None or ratio.low is None or ratio.high is None:
        return ""
    times_as_many = spec.parallelism.world_size / reference_spec.parallelism.world_size
    bound = 1 / times_as_many
    if times_as_many > 1 and ratio.high < bound:
        slowed_side, kind_of_bound = "reference", "least"
    elif times_as_many < 1 and ratio.low > bound:
        slowed_side, kind_of_bound = "row", "most"
    else:
        return ""
    return (
        f"×{ratio.ratio:.3f} the time on {times_as_many:g} times as many ranks {IMPOSSIBLE}"
        f" (×{bound:.3f} is the {kind_of_bound}), so other programs slowed its {slowed_side}"
        " down; close them and run both again"
    )


def _why_devices_differ(reference: Run, other: Run) -> str:
    """Return why the speeds of two runs cannot be compared because of their devices; empty if they can be.

    The reasons are different devices, a device that only one run names, and a number of devices that only one run
    states. Two runs of which neither names a device can be compared.
    """
    if reference.device and other.device and reference.device != other.device:
        return f"their devices differ ({reference.device} | {other.device})"
    with_device = [run for run in (reference, other) if run.device]
    if len(with_device) == 1:
        named = with_device[0]
        return (
            f"only {named.name} names its device ({named.device});"
            " --device (make: DEVICE=) states it for all logs"
        )
    with_count = [run for run in (reference, other) if run.num_devices]
    if len(with_count) == 1:
        stated = with_count[0]
        return f"only {stated.name} states its number of devices ({stated.num_devices})"
    return ""


def _describe_model_doubt(
    reference: Run, other: Run, differences: Sequence[ModelDifference]
) -> str:
    """Return a clause on known differences between two models.

    If there are none, the clause is about flags that a log does not state and that may differ. It is empty if
    there are no such flags.
    """
    known = [difference for difference in differences if difference.is_known]
    if known:
        return f"their models differ in {describe_differences(known)}"
    unstated = describe_unstated_flags(reference, other, differences)
    return f"their models may differ: {unstated}" if unstated else ""


def _work_per_iteration(reference: Run, other: Run) -> tuple[_WorkPerIteration | None, str]:
    """Return the tokens per iteration of two runs, and a caution on what is assumed.

    If a log prints no sequence length, the numbers are samples per iteration. The first value is None if
    the work is unknown, and then the caution is the reason.
    """
    runs = (reference, other)
    if any(run.spec and run.spec.shares_gpu for run in runs):
        return None, SHARED
    if reference.spec and other.spec:
        work = _WorkPerIteration(
            reference.spec.tokens_per_iteration, other.spec.tokens_per_iteration
        )
        return work, ""
    batch, other_batch = reference.global_batch_size, other.global_batch_size
    if not batch or not other_batch:
        return None, _describe_missing(runs, {"global batch size": [batch, other_batch]})
    caution = _describe_assumptions(runs)
    if reference.seq_length and other.seq_length:
        tokens = batch * reference.seq_length
        return _WorkPerIteration(tokens, other_batch * other.seq_length), caution
    return _WorkPerIteration(batch, other_batch), caution


def _describe_assumptions(runs: tuple[Run, Run]) -> str:
    """Return what a comparison of two runs assumes, because a log does not state it; empty if nothing is assumed."""
    cautions: list[str] = []
    values_by_quantity: dict[str, Sequence[object]] = {
        "model": [run.model_or_size for run in runs],
        "sequence length": [run.seq_length for run in runs],
    }
    missing = _describe_missing(runs, values_by_quantity)
    if missing:
        cautions.append(f"{missing}, so equal ones are assumed")
    if not any(run.num_devices for run in runs):
        cautions.append("neither states its number of devices, so the same is assumed")
    return "; ".join(cautions)


def _describe_missing(runs: Sequence[Run], values: Mapping[str, Sequence[object]]) -> str:
    """Return a text on the quantities that runs do not print, such as `a.log prints no sequence length`.

    The text is empty if every run prints every quantity.

    Args:
        runs: The runs.
        values: Value per run of each quantity, by the quantity's name.
    """
    quantities_by_runs: dict[tuple[str, ...], list[str]] = {}
    for quantity, values_of_runs in values.items():
        names = tuple(
            run.name for run, value in zip(runs, values_of_runs, strict=True) if not value
        )
        if names:
            quantities_by_runs.setdefault(names, []).append(f"no {quantity}")
    clauses = []
    for names, quantities in quantities_by_runs.items():
        verb = "prints" if len(names) == 1 else "print"
        clauses.append(f"{' and '.join(names)} {verb} {' and '.join(quantities)}")
    return "; ".join(clauses)


def list_differences(reference: Run, other: Run) -> list[WorkMismatch]:
    """Return the differences between two runs that may explain why their times differ.

    Flags of the model come first, then conditions such as the batch. If one of the runs is a foreign log, the
    printed arguments that differ and are not listed yet come last. Differences that belong to the strategy, such as
    the number of devices, are marked (`part_of_strategy`).
    """
    mismatches = [
        WorkMismatch(difference.flag, difference.reference, difference.other)
        for difference in reference.stated_model.differences(other.stated_model)
        if difference.is_known and difference.flag != "--hidden-dropout"
    ]
    flags_of_model = argument_names(mismatch.what for mismatch in mismatches)
    other_conditions = _list_conditions(other)
    for name, value in _list_conditions(reference).items():
        if value != other_conditions[name]:
            is_strategy = name in _CONDITIONS_OF_STRATEGY
            mismatches.append(WorkMismatch(name, value, other_conditions[name], is_strategy))
    if reference.is_foreign or other.is_foreign:
        mismatches += _compare_printed_arguments(reference, other, flags_of_model)
    return mismatches


def _compare_printed_arguments(
    reference: Run, other: Run, flags_of_model: AbstractSet[str]
) -> Iterator[WorkMismatch]:
    """Yield the printed arguments that differ; yield nothing if one of the two logs prints no arguments.

    Args:
        reference: The reference's run.
        other: The run that is compared.
        flags_of_model: Names of arguments that are listed as flags of the model already.
    """
    lists = [essential_arguments(run.arguments) for run in (reference, other)]
    if not all(lists):
        return
    for name, values in find_differing_arguments(lists).items():
        if name in _LISTED_OTHERWISE or name in flags_of_model:
            continue
        flag = f"--{name.replace('_', '-')}"
        reference_value, other_value = (value or "not given" for value in values)
        yield WorkMismatch(flag, reference_value, other_value, name in _ARGUMENTS_OF_STRATEGY)


_LISTED_OTHERWISE = frozenset(
    {
        *("optimizer", "fp16", "bf16", "params_dtype", "hidden_dropout"),
        *("group_query_attention", "num_query_groups"),
    }
)
"""Arguments that a condition, or a flag of the model, stands for."""
_ARGUMENTS_OF_STRATEGY = argument_names(flags_with_role("parallelism")) | {
    *("world_size", "data_parallel_size", "transformer_pipeline_model_parallel_size"),
    "virtual_pipeline_model_parallel_size",
    *("padded_vocab_size", "make_vocab_size_divisible_by"),
}
_CONDITIONS_OF_STRATEGY = ("devices", "padded vocabulary")


_CONDITIONS = (
    "devices",
    "tokens per iteration",
    "sequence length",
    "padded vocabulary",
    "data",
    "dropout",
    "precision",
    "optimizer",
    "recomputation",
    "offload",
    "Adam's state",
    "Megatron",
    "code",
    "host",
    "link between the ranks",
    "patches",
    "patch file",
    "ranks on one GPU",
)
"""Names of the properties that two compared runs should share, in the order in which differences are listed."""


def _list_conditions(run: Run) -> dict[str, str]:
    """Return the properties that two compared runs should share, by name. An unknown property is `unknown`."""
    values = _list_run_conditions(run)
    if run.spec is not None:
        values |= _list_spec_conditions(run.spec)
    if run.record is not None:
        values |= _list_record_conditions(run.record)
    values_in_order = {name: values.get(name) for name in _CONDITIONS}
    return {
        name: "unknown" if value is None else str(value) for name, value in values_in_order.items()
    }


def _list_run_conditions(run: Run) -> dict[str, object]:
    """Return the properties of a run that do not need its record or its configuration."""
    return {
        "data": run.dataset_name,
        "Adam's state": describe_adam_state(run),
        "Megatron": run.megatron or None,
        "patches": describe_fused_patches(run.spec),
        "patch file": describe_patch_file(run.spec),
        # A run without a configuration is on a rank per GPU, as far as anybody knows.
        "ranks on one GPU": False,
    }


def _list_spec_conditions(spec: RunSpec) -> dict[str, object]:
    """Return the properties of a run that its configuration states."""
    return {
        "devices": spec.parallelism.world_size,
        "tokens per iteration": spec.tokens_per_iteration,
        "sequence length": spec.shape.seq_length,
        "padded vocabulary": spec.padded_vocabulary or None,
        "dropout": spec.dropout,
        "precision": spec.dtype,
        "optimizer": spec.optimizer,
        "recomputation": spec.recompute,
        "offload": " ".join(offload_flags(spec.offload)),
        "ranks on one GPU": spec.shares_gpu,
    }


def _list_record_conditions(record: RunRecord) -> dict[str, object]:
    """Return the properties of a run that only `run.json` states."""
    return {
        "code": record.code,
        "host": record.host.name,
        "link between the ranks": describe_link(record.spec),
    }


SHARED = (
    "its ranks shared one GPU: memory and losses are true, times say nothing about the strategy"
)

OVERSUBSCRIBED = "more ranks than cores, so times say nothing about speed"
DISTURBED = "other programs used the cores, so times say nothing about speed"
SLOWED_REFERENCE = "its reference took longer than is possible"
IMPOSSIBLE = "is impossible"
WITHHELD = (SHARED, OVERSUBSCRIBED, DISTURBED, DAMAGED_FILE, SLOWED_REFERENCE)
"""Reasons for no verdict that the report states once for all rows."""


def describe_adam_state(run: Run) -> str | None:
    """Return a text on whether Adam's moments exist in memory; None if no line states the number of skipped steps.

    fp16 skips its first steps, and Adam allocates its moments in the first step that is not skipped.
    """
    lines = run.log.iterations
    if not lines.known("skipped_iterations").any():
        return None
    existed = (lines.values("skipped_iterations") == 0).any()
    return "existed" if existed else "never existed (every step was skipped)"


def describe_conditions(runs: Iterable[Run]) -> list[str]:
    """Return a sentence on the machines of the runs and the kit's commits, as a list of one text.

    The list is empty if no run has a run folder.
    """
    records = [run.record for run in runs if run.record]
    if not records:
        return []
    machines = {
        f"{record.host.cores} cores of {record.host.cpu}, {record.spec.dtype}" for record in records
    }
    commits = {(record.kit_commit or "no commit")[:12] for record in records}
    return [f"Measured on {'; '.join(sorted(machines))}, kit at {', '.join(sorted(commits))}."]
