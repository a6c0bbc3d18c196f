"""The user's own measurements: rows with the columns of the public file, and the corrections that follow.

`make report` writes `readings/mine.csv`, a row per configuration. Two more columns, `flags` and `fused`, say what was
trained where the public columns do not. `OwnRuns` are the measurements on one kind of device with their predictions;
the errors of these predictions correct the next prediction.
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
    """Return the row that records a measured run in the file of the user's measurements.

    Args:
        spec: The run that was trained.
        argv: All flags of Megatron.
        device: Device of each rank.
        run: Name of the run folder.
        seconds: Median seconds per iteration.

    Raises:
        RefusedError: The flags that a row keeps describe another run than `spec`.
    """
    split, shape = spec.parallelism, spec.shape
    kept_flags = SHAPE_FLAGS | flags_planned_as("counted")
    flags = merge_flags(pick_flags(argv, kept_flags), flags_from_spec(spec))
    described = spec_from_flags(flags, split.world_size, spec.device, spec.model)
    if _drop_unmeasured(replace(described, fused=spec.fused)) != _drop_unmeasured(spec):
        raise RefusedError(f"{run}: its flags alone do not say what was trained")
    values: dict[str, object] = {
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
    return {name: str(values[name]) for name in _COLUMNS}


def add_rows(path: Path, rows: Iterable[MeasurementRow]) -> int:
    """Add rows to a file of measurements. A new row replaces an old row of the same configuration.

    The file and its folder are created if they do not exist.

    Returns:
        The number of configurations that are new in the file.

    Raises:
        OSError: The folder cannot be written, or another process has locked the file for ten seconds.
        MeasurementsError: The file exists and is no table of measurements. It is not changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_path(path.with_name(f".{path.name}.lock")):
        columns, old_rows = _read_own_rows(path)
        rows_by_configuration = {_configuration_key(row): row for row in old_rows}
        num_before = len(rows_by_configuration)
        rows_by_configuration |= {_configuration_key(row): row for row in rows}
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows_by_configuration.values())
        write_atomically(path, text.getvalue())
    return len(rows_by_configuration) - num_before


@dataclass(frozen=True)
class OwnRuns:
    """The user's own measurements on one kind of device, with their predictions."""

    residuals: tuple[Residual, ...] = ()

    def bias(self, spec: RunSpec) -> float:
        """Estimate the error of a run's predicted time: the logarithm of predicted time divided by true time.

        The estimate is 0 without measurements. It is the best linear estimate from the logarithms of the
        measurements' errors (kriging, or a Gaussian process). If the same run was measured, the estimate is close to
        the measured error. If no similar run was measured, the estimate is close to the mean of all errors.
        """
        return self._estimate_bias(spec, self.residuals)

    def remaining(self) -> tuple[float, ...]:
        """Return the error that each measurement still has after the other measurements have corrected its prediction.

        The result is empty for fewer than `_FEWEST_RUNS` measurements.
        """
        if len(self.residuals) < _FEWEST_RUNS:
            return ()
        errors = []
        for index, item in enumerate(self.residuals):
            other_residuals = (*self.residuals[:index], *self.residuals[index + 1 :])
            bias = self._estimate_bias(item.measured_run.spec, other_residuals)
            errors.append(exp(log(1 + item.error) - bias) - 1)
        return tuple(errors)

    def without(self, spec: RunSpec) -> OwnRuns:
        """Return these measurements without the measurements of the run `spec`.

        With the result, a prediction of `spec` can be tested against its own measurement.
        """
        left_out = _drop_unmeasured(spec)
        return OwnRuns(
            tuple(
                item
                for item in self.residuals
                if _drop_unmeasured(item.measured_run.spec) != left_out
            )
        )

    def _estimate_bias(self, spec: RunSpec, known: Sequence[Residual]) -> float:
        """Estimate the logarithm of predicted over true time of a run from the errors of the `known` measurements."""
        if not known:
            return 0.0
        # The planner in the browser has no NumPy; nobody has runs of their own there.
        import numpy as np

        specs = [item.measured_run.spec for item in known]
        covariances = np.array([[_covariance(a, b) for a in specs] for b in specs])
        noisy = covariances + _NOISE**2 * np.eye(len(specs))
        weights = np.linalg.solve(noisy, [_covariance(spec, other) for other in specs])
        return float(weights @ [log(1 + item.error) for item in known])


_FEWEST_RUNS = 3
_SHARED, _SIMILAR, _NOISE = 0.3, 0.15, 0.05
"""Standard deviations of the error's logarithm: of the part that all runs of a machine share, of the part that similar
runs share, and of one measurement. The README, "One's own runs", shows their effect on published measurements."""
_SIMILARITY_DOUBLINGS = 4.0
"""Doublings between two runs over which their similarity falls to a third."""


def load_own_runs(path: Path | None, cluster: Cluster) -> OwnRuns:
    """Read the user's measured times on the cluster's kind of device, and predict each with the cluster's calibration.

    Iteration times and tokens per second are used, and memory is not. Measurements on CPU ranks are used only if they
    were made on this machine. Rows that cannot be predicted are left out. The result is empty if `path` is None or does
    not exist.

    Raises:
        MeasurementsError: The file is no table of measurements.
    """
    if path is None or not path.is_file():
        return OwnRuns()
    residuals = []
    for measurement in read_measurements(path)[0]:
        is_timed = measurement.metric in ("step_time_s", "tokens_per_s_per_gpu")
        is_from_here = measurement.where.startswith(f"{platform.node()}:")
        if not is_timed or (cluster.device.key == "cpu" and not is_from_here):
            continue
        try:
            run = convert_measurement(measurement)
            if run.cluster.device.key != cluster.device.key:
                continue
            measured_here = replace(
                run.cluster, calibration=cluster.calibration, cores=cluster.cores
            )
            residuals.append(compute_residual(replace(run, cluster=measured_here)))
        except (RefusedError, UnevenSplitError, NoPeakError):
            continue
    return OwnRuns(tuple(residuals))


def _drop_unmeasured(spec: RunSpec) -> RunSpec:
    """Return a run without its seed and patch file, which a row of measurements does not store."""
    return replace(spec, seed=0, patch_file=None)


def _covariance(spec: RunSpec, other: RunSpec) -> float:
    """Return the covariance of the prediction errors of two runs.

    The covariance falls with the differences of the two runs. A factor of 2 between two sizes counts as one
    difference, and so does a setting that is not equal.
    """
    sizes, choices = _features(spec)
    other_sizes, other_choices = _features(other)
    doublings = [
        abs(log2(size / other_size)) for size, other_size in zip(sizes, other_sizes, strict=True)
    ]
    num_other_choices = sum(
        choice != other_choice for choice, other_choice in zip(choices, other_choices, strict=True)
    )
    differences = sum(doublings) + num_other_choices
    return _SHARED**2 + _SIMILAR**2 * exp(-differences / _SIMILARITY_DOUBLINGS)


def _features(spec: RunSpec) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """Return the sizes and the settings of a run by which its similarity to other runs is judged.

    Sizes are above 0, because they are compared by their logarithms. Settings can only be equal or different.
    """
    split, shape = spec.parallelism, spec.shape
    degrees = (split.tensor, split.pipeline, split.virtual_stages, split.context, split.expert)
    sizes = (spec.batch.micro_batch_size, shape.seq_length)
    numerics = (spec.dtype, spec.fused_attention, spec.fp8_recipe, spec.fused)
    choices = (split.sharding, split.sequence_parallel, spec.recompute, *numerics)
    return (total_parameters(shape), split.world_size, *degrees, *sizes), choices


def _configuration_key(row: MeasurementRow) -> tuple[str, ...]:
    """Return a key that is equal for rows that measure the same configuration on the same machine.

    The key has all columns except the measured value and the name of the run folder.
    """
    columns = [name for name in _COLUMNS if name not in ("url_or_path", "value")]
    machine = row.get("url_or_path", "").partition(":")[0]
    return (machine, *(row.get(name) or "" for name in columns))


def _read_own_rows(path: Path) -> tuple[list[str], list[MeasurementRow]]:
    """Return the columns and the rows of a file of the user's own measurements.

    A file that does not exist gives all columns and no rows. Columns that older files lack are added.

    Raises:
        MeasurementsError: The file is no table of measurements.
    """
    if not path.is_file():
        return list(_COLUMNS), []
    try:
        columns, rows = read_rows(path)
    except MeasurementsError as error:
        raise MeasurementsError(
            f"{path} is no table of measurements; name another file with READINGS= ({error})"
        ) from None
    missing = [name for name in OWN_COLUMNS if name not in columns]
    return [*columns, *missing], [row for _, row in rows]


@contextmanager
def _lock_path(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created if it does not exist, for the `with` block.

    Raises:
        BlockingIOError: Another process has held the lock for `_LOCK_SECONDS`.
    """
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
