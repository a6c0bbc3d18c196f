"""One's own readings: runs that were measured here, as rows with the columns of the public ones.

`make report` writes `readings/mine.csv`, a row for each configuration. What the public columns do not
say is in two more, `flags` and `fused`: what trained it. `OwnRuns` are those on one kind of device,
predicted with the constants of what is asked: what they were missed by corrects the next prediction.
"""

from __future__ import annotations

import csv
import io
import platform
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import exp, log, log2
from pathlib import Path

from parakit.artifacts.io import lock_file, write_atomically
from parakit.config.flag_table import flags_planned_as
from parakit.config.flags import merge_flags, pick_flags
from parakit.config.hardware import Device
from parakit.config.model import SHAPE_FLAGS
from parakit.config.run import RunSpec, flags_from_spec, spec_from_flags
from parakit.costs import UnevenSplitError, total_parameters
from parakit.planner.readings.reading_to_spec import RefusedError, convert_measurement
from parakit.planner.readings.residual import Residual, compute_residual
from parakit.planner.readings.table import (
    COLUMNS,
    OWN_COLUMNS,
    MeasurementsError,
    read_measurements,
    read_rows,
)
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.rates import NoPeakError

SOURCE = "mine"
_COLUMNS = (*COLUMNS, *OWN_COLUMNS)

_LOCK_SECONDS = 10.0
MeasurementRow = dict[str, str]


def build_measurement_row(
    spec: RunSpec, argv: Sequence[str], device: Device, run: str, seconds: float
) -> MeasurementRow:
    """A measured run as a row of the file.

    Args:
        spec: What was trained.
        argv: Megatron's flags, all of them.
        device: What each rank ran on.
        run: The run folder's name.
        seconds: Of an iteration, the median.

    Raises:
        RefusedError: The flags that a row keeps do not give the same run again.
    """
    split, shape = spec.parallelism, spec.shape
    told = SHAPE_FLAGS | flags_planned_as("counted")
    flags = merge_flags(pick_flags(argv, told), flags_from_spec(spec))
    again = spec_from_flags(flags, split.world_size, spec.device, spec.model)
    if _measured(replace(again, fused=spec.fused)) != _measured(spec):
        raise RefusedError(f"{run}: its flags alone do not say what was trained")
    known: dict[str, object] = {
        "source": SOURCE,
        "url_or_path": f"{platform.node()}:{run}",
        "model": spec.model,
        "params_b": f"{total_parameters(shape) / 1e9:.4g}",
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "ffn": f"{shape.expert_ffn_hidden}/expert" if shape.experts else shape.ffn_hidden,
        "seq": shape.seq_length,
        "vocab": shape.vocabulary,
        "gpu": device.key,
        "gpus": split.world_size,
        "tp": split.tensor,
        "pp": split.pipeline,
        "vpp": split.virtual_stages if split.virtual_stages > 1 else "",
        "cp": split.context,
        "dp": split.data,
        "ep": split.expert if shape.experts else "",
        "mbs": spec.batch.micro_batch_size,
        "gbs": spec.batch.global_batch_size,
        "dtype": spec.dtype,
        "recompute": spec.recompute,
        "metric": "step_time_s",
        "value": f"{seconds:.6g}",
        "notes": "",
        "flags": shlex.join(flags),
        "fused": ",".join(spec.fused),
    }
    return {name: str(known[name]) for name in _COLUMNS}


def add_rows(path: Path, rows: Iterable[MeasurementRow]) -> int:
    """Add rows to a file, each in place of the one that it measures again; others stay as they are.

    Returns:
        How many configurations the file did not have.

    Raises:
        OSError: The folder cannot be written, or another process kept the file for ten seconds.
        MeasurementsError: The file is there and no table of readings; it stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f".{path.name}.lock")):
        columns, old = _table(path)
        kept = {_configuration(row): row for row in old}
        before = len(kept)
        kept |= {_configuration(row): row for row in rows}
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())
        write_atomically(path, text.getvalue())
    return len(kept) - before


@dataclass(frozen=True)
class OwnRuns:
    """One's own readings on one kind of device, beside their predictions."""

    residuals: tuple[Residual, ...] = ()

    def bias(self, spec: RunSpec) -> float:
        """Logarithm of predicted over true time that they let one expect of a run.

        The best linear estimate from their own, which have a part that all runs here share and one
        that runs have the more in common the more alike they are (kriging, or a Gaussian process):
        0 without any, one's own error where the same was measured, the mean far away from all.
        """
        return self._expected(spec, self.residuals)

    def remaining(self) -> tuple[float, ...]:
        """Errors that are left of each once the others correct it; empty below three."""
        if len(self.residuals) < _ENOUGH:
            return ()
        left = []
        for place, item in enumerate(self.residuals):
            others = (*self.residuals[:place], *self.residuals[place + 1 :])
            rest = log(1 + item.error) - self._expected(item.measured_run.spec, others)
            left.append(exp(rest) - 1)
        return tuple(left)

    def without(self, spec: RunSpec) -> OwnRuns:
        """The same but for the readings of one run: it says nothing of how well it is predicted."""
        own, wanted = self.residuals, _measured(spec)
        return OwnRuns(tuple(run for run in own if _measured(run.measured_run.spec) != wanted))

    def _expected(self, spec: RunSpec, known: Sequence[Residual]) -> float:
        if not known:
            return 0.0
        import numpy as np  # Not in the browser, where nobody has runs of their own.

        specs = [item.measured_run.spec for item in known]
        among = np.array([[_covariance(one, two) for one in specs] for two in specs])
        noisy = among + _NOISE**2 * np.eye(len(specs))
        weights = np.linalg.solve(noisy, [_covariance(spec, each) for each in specs])
        return float(weights @ [log(1 + item.error) for item in known])


_ENOUGH = 3
_SHARED, _ALIKE, _NOISE = 0.3, 0.15, 0.05
"""Standard deviations of the logarithm: of what all runs of a machine share, of what alike ones do,
and of one measurement. README, "One's own runs", has what they do on published measurements."""
_REACH = 4.0
"""Doublings over which likeness falls to a third."""


def load_own_runs(path: Path | None, cluster: Cluster) -> OwnRuns:
    """The rows of a file on the cluster's kind of device, predicted with its constants and cores.

    CPU ranks count on this machine alone, whose cores they were. A file that is not there has none.

    Raises:
        MeasurementsError: The file is no table of measurements.
    """
    if path is None or not path.is_file():
        return OwnRuns()
    found = []
    for measurement in read_measurements(path)[0]:
        timed = measurement.metric in ("step_time_s", "tokens_per_s_per_gpu")
        here = measurement.where.startswith(f"{platform.node()}:")
        if not timed or (cluster.device.key == "cpu" and not here):
            continue
        try:
            measured_run = convert_measurement(measurement)
            if measured_run.cluster.device.key != cluster.device.key:
                continue
            measured_here = replace(
                measured_run.cluster, calibration=cluster.calibration, cores=cluster.cores
            )
            found.append(compute_residual(replace(measured_run, cluster=measured_here)))
        except (RefusedError, UnevenSplitError, NoPeakError):
            continue
    return OwnRuns(tuple(found))


def _measured(spec: RunSpec) -> RunSpec:
    """What a row keeps of a run: no seed, no patch file."""
    return replace(spec, seed=0, patch_file=None)


def _covariance(one: RunSpec, two: RunSpec) -> float:
    """By doublings over all that differs; a choice that is another counts as one."""
    (sizes, choices), (others, other_choices) = _features(one), _features(two)
    unlike = sum(abs(log2(a / b)) for a, b in zip(sizes, others, strict=True))
    unlike += sum(a != b for a, b in zip(choices, other_choices, strict=True))
    return _SHARED**2 + _ALIKE**2 * exp(-unlike / _REACH)


def _features(spec: RunSpec) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """Sizes and choices of a run."""
    split, shape = spec.parallelism, spec.shape
    degrees = (split.tensor, split.pipeline, split.virtual_stages, split.context, split.expert)
    sizes = (spec.batch.micro_batch_size, shape.seq_length)
    numbers = (spec.dtype, spec.fused_attention, spec.fp8_recipe, spec.fused)
    choices = (split.sharding, split.sequence_parallel, spec.recompute, *numbers)
    return (total_parameters(shape), split.world_size, *degrees, *sizes), choices


def _configuration(row: MeasurementRow) -> tuple[str, ...]:
    """What makes a row another one: all but what it measured, and in which run."""
    said = (row.get(name) or "" for name in _COLUMNS if name not in ("url_or_path", "value"))
    return (row.get("url_or_path", "").partition(":")[0], *said)


def _table(path: Path) -> tuple[list[str], list[MeasurementRow]]:
    """Columns and rows of a file; those of an empty one where it is not there."""
    if not path.is_file():
        return list(_COLUMNS), []
    try:
        columns, rows = read_rows(path)
    except MeasurementsError as error:
        raise MeasurementsError(
            f"{path} is no table of measurements; name another file with READINGS= ({error})"
        ) from None
    more = [name for name in OWN_COLUMNS if name not in columns]
    return [*columns, *more], [row for _, row in rows]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                lock_file(file)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        yield
