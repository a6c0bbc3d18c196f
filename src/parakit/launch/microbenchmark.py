"""Run timed kernels and transfers on ranks of this machine and return the rates that they reached.

A caller describes what to time as a `Workload` and reads the result from `Figures`. The callers are
`make calibrate` (`calibrate.py`, the planner's constants), `make doctor` (`link_rates.py`) and
`make bench NAME=gpu` (ceilings). All ranks measure at once, because they also train at once. A single rank
needs no torchrun and no process group.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parakit.cluster import Nodes
from parakit.config.errors import LaunchError
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.run import DeviceKind
from parakit.launch.compose import torchrun_command
from parakit.launch.flags import CPU_RANK_ENVIRONMENT

TIMEOUT_SECONDS = 120.0

_RANK_MODULE = "parakit.launch.microbenchmark_rank"
_ERROR = re.compile(r"\w*Error: .+")
_SIGNAL = re.compile(r"Signal \d+ \(SIG\w+\) received by PID \d+")


@dataclass(frozen=True)
class Workload:
    """The measurements to make, and for how long; a measurement whose field is unset is left out."""

    matmul_size: int | None = None
    """Rows and columns of square matrices that are multiplied. Their numbers are random and normal, because with
    zeros a GPU takes less power and its clocks rise above those of training.
    """
    attention_shape: tuple[int, int, int] | None = None
    """Heads, sequence length and head width of an SDPA forward and backward."""
    copy_bytes: int | None = None
    """Bytes of a tensor that is copied into a new one."""
    layer: bool = False
    """Time forward and backward of a transformer layer with almost no arithmetic, which is the cost of launches."""
    head: tuple[int, int, int] | None = None
    """Tokens, width and vocabulary of an output layer with its loss, forward and backward."""
    parameters: int | None = None
    """Elements of a tensor that AdamW updates, with its gradient zeroed, accumulated, normed and clipped."""
    table: int | None = None
    """Elements of an embedding table whose gradient is computed and accumulated."""
    all_reduce_bytes: int | None = None
    """Bytes of a tensor that all ranks all-reduce."""
    other_collectives: bool = False
    """Also time a reduce-scatter, an all-gather and an all-to-all of `all_reduce_bytes`."""
    latency: bool = False
    """Time by which a small all-reduce extends arithmetic, including the wait for the slowest rank."""
    spread: bool = False
    """Measure by how much the times of ranks differ that do the same work."""
    node_pairs: bool = False
    """Also time the all-reduce between each node and the next one, while the other nodes wait."""
    seconds_each: float = 0.5
    """Seconds of all calls of one measurement together; collectives are counted instead."""
    warm_up_calls: int = 1
    rounds: int = 1
    """Number of times that all measurements are made, one after the other. The median round counts for each
    figure, because a disturbance of a second falls into one round.
    """
    mean: bool = False
    """Take the mean call, because an iteration is the sum of its calls; False takes the fastest call, which other
    programs disturb least.
    """


@dataclass(frozen=True)
class Figures:
    """The measured figures of the slowest rank; None marks a measurement that the workload left out."""

    matmul_flops: float | None = None
    """FLOP/s in bf16 on a GPU, in fp32 on a CPU rank."""
    attention_flops: float | None = None
    copy_bytes_per_second: float | None = None
    """Bytes read plus bytes written."""
    layer_seconds: float | None = None
    logit_seconds: float | None = None
    """Seconds per logit of the output layer and its loss, without those of the matrix products."""
    parameter_seconds: float | None = None
    """Seconds per element of an optimizer update."""
    tensor_seconds: float | None = None
    """Seconds of an optimizer update per tensor, measured with a tensor of one element."""
    gradient_seconds: float | None = None
    """Seconds per element of a table's gradient, which is computed and accumulated."""
    all_reduce_bytes_per_second: float | None = None
    """Bytes that a rank sends in a ring per second: 2(n-1)/n of the tensor."""
    reduce_scatter_bytes_per_second: float | None = None
    """Bytes per second that gloo sends (`src/parakit/costs/operations.py`), as in the next two fields."""
    all_gather_bytes_per_second: float | None = None
    all_to_all_bytes_per_second: float | None = None
    all_reduce_latency_seconds: float | None = None
    jitter: float | None = None
    """Excess of the slowest of n ranks' time over their mean time, as a fraction of the mean, divided by
    the square root of 2 ln n.
    """
    nodes: tuple[str, ...] = ()
    """Names of the nodes in their order; empty unless the workload has `node_pairs`."""
    pair_bytes_per_second: tuple[float, ...] = ()
    """Rate between each node and the next one around the ring; two nodes are one pair."""


def attention_flops(shape: tuple[int, int, int], causal: bool) -> int:
    """Return the FLOPs of an SDPA forward and backward; with a causal mask half of the scores count.

    `shape` is heads, sequence length and head width.
    """
    heads, length, width = shape
    return 12 * heads * length * length * width // (2 if causal else 1)


def run_workload(
    workload: Workload,
    device: DeviceKind,
    ranks: int,
    nodes: Nodes | None = None,
    defaults: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Figures | None:
    """Run a workload on `ranks` ranks of this machine, or of each of `nodes`, and return the figures.

    The result is None on every node but the first. `defaults` are environment variables that the caller's own
    environment overrides.

    Raises:
        LaunchError: The ranks failed or did not end in time; the message has their last error.
    """
    launcher: tuple[str, ...] = (sys.executable,)
    if ranks > 1 or nodes is not None:
        launcher = torchrun_command(ranks, sys.executable, nodes)
    encoded_workload = msgspec.json.encode(workload).decode()
    environment = {**(defaults or {}), **os.environ, "PYTHONPATH": PYTHON_PATH}
    environment |= CPU_RANK_ENVIRONMENT if device is DeviceKind.CPU else {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        try:
            completed = subprocess.run(
                (*launcher, "-m", _RANK_MODULE, device, str(output), encoded_workload),
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(f"the ranks did not end within {timeout_seconds:.0f} s") from None
        if completed.returncode:
            raise LaunchError(_find_last_error(completed.stderr))
        if not output.is_file():
            return None
        return msgspec.json.decode(output.read_bytes(), type=Figures)


def _find_last_error(output: str) -> str:
    """Return the last exception that a rank printed, or else the signal that killed the first rank.

    torchrun's own report comes after both, with its root cause last. The last line is returned if neither is
    found. The text is cut off after 200 characters.
    """
    errors: list[str] = (
        _ERROR.findall(output) or _SIGNAL.findall(output) or output.strip().splitlines()
    )
    return errors[-1].strip()[:200] if errors else "the ranks failed"
