"""Timed kernels and transfers: what this machine's devices multiply, copy and send in a second.

The only place where the kit times hardware outside of training. The planner's constants
(`calibrate.py`), the rates that `make doctor` prints (`link_rates.py`) and the ceilings of
`make bench NAME=gpu` each describe a `Workload` and take what they need of its `Figures`. All ranks measure
at once, because they also train at once; one rank alone needs no torchrun and no process group.
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

_ERROR = re.compile(r"\w*Error: .+")
_SIGNAL = re.compile(r"Signal \d+ \(SIG\w+\) received by PID \d+")


@dataclass(frozen=True)
class Workload:
    """What to time and for how long; a measurement that is not asked for is left out."""

    matmul_size: int | None = None
    """Rows and columns of a product of square matrices of random normal numbers: with zeros a GPU
    takes less power, and clocks higher than in training."""
    attention_shape: tuple[int, int, int] | None = None
    """Heads, sequence length and head width of an SDPA forward and backward."""
    copy_bytes: int | None = None
    """Size of a tensor that is copied into a new one."""
    layer: bool = False
    """Forward and backward of a transformer layer of almost no work: the cost of its launches."""
    head: tuple[int, int, int] | None = None
    """Tokens, width and vocabulary of an output layer with its loss, forward and backward."""
    parameters: int | None = None
    """Elements of a tensor that AdamW updates, its gradient zeroed, added, normed and clipped."""
    table: int | None = None
    """Elements of an embedding whose gradient is made and added."""
    all_reduce_bytes: int | None = None
    other_collectives: bool = False
    """A reduce-scatter, an all-gather and an all-to-all of as many bytes, too."""
    latency: bool = False
    """What a small all-reduce adds to arithmetic, the wait for the slowest rank included."""
    spread: bool = False
    """How far ranks that do the same work are apart."""
    node_pairs: bool = False
    """The all-reduce between each node and the next one alone, too."""
    seconds_each: float = 0.5
    """Time of all calls of one measurement together, collectives excepted."""
    warm_up_calls: int = 1
    rounds: int = 1
    """Times that all is measured, one figure after the other. Of each the median round counts: what
    disturbs a machine for a second falls on one."""
    mean: bool = False
    """Take the mean call, as an iteration adds them up, and not the fastest, which other work disturbs
    least."""


@dataclass(frozen=True)
class Figures:
    """What was measured, of the slowest rank; None is what was not asked for."""

    matmul_flops: float | None = None
    """FLOP/s in bf16 on a GPU, in fp32 on a CPU rank."""
    attention_flops: float | None = None
    copy_bytes_per_second: float | None = None
    """Read and written."""
    layer_seconds: float | None = None
    logit_seconds: float | None = None
    """Of the output layer and its loss, beside the FLOPs of their products, a logit."""
    parameter_seconds: float | None = None
    """Of an update, an element."""
    tensor_seconds: float | None = None
    """Of an update, a tensor of almost no elements."""
    gradient_seconds: float | None = None
    """Of a table's gradient, made and added to what is there, an element."""
    all_reduce_bytes_per_second: float | None = None
    """That a rank sends in a ring: 2(n-1)/n of the tensor."""
    reduce_scatter_bytes_per_second: float | None = None
    """Of what gloo puts on the wire for it (`src/parakit/costs/operations.py`), as the next two."""
    all_gather_bytes_per_second: float | None = None
    all_to_all_bytes_per_second: float | None = None
    all_reduce_latency_seconds: float | None = None
    jitter: float | None = None
    """What the slowest of n ranks takes longer than their mean, of the mean, over the root of 2 ln n."""
    nodes: tuple[str, ...] = ()
    """Names, in node order, where pairs were asked for."""
    pair_bytes_per_second: tuple[float, ...] = ()
    """Of each node with the next one around the ring; two nodes are one pair."""


def attention_flops(shape: tuple[int, int, int], causal: bool) -> int:
    """Of SDPA forward and backward (`Workload.attention_shape`); causal, half of the scores count."""
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
    """Run a workload on so many ranks of this machine, or of each of `nodes`.

    `defaults` are environment variables that the caller's own override.

    Returns:
        The figures; None on every node but the first.

    Raises:
        LaunchError: The ranks failed, with their last error, or were not done in time.
    """
    own = CPU_RANK_ENVIRONMENT if device is DeviceKind.CPU else {"OMP_NUM_THREADS": "1"}
    alone = ranks == 1 and nodes is None
    start = (sys.executable,) if alone else torchrun_command(ranks, sys.executable, nodes)
    asked = msgspec.json.encode(workload).decode()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        try:
            done = subprocess.run(
                (*start, "-m", "parakit.launch.microbenchmark_rank", device, str(output), asked),
                cwd=ROOT,
                env={**(defaults or {}), **os.environ, "PYTHONPATH": PYTHON_PATH, **own},
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            raise LaunchError(f"the ranks did not end within {timeout_seconds:.0f} s") from None
        if done.returncode:
            # The last exception that a rank printed, or the signal that killed the first of them:
            # torchrun's own report follows, its root cause last.
            said = done.stderr
            found = _ERROR.findall(said) or _SIGNAL.findall(said) or said.strip().splitlines()
            raise LaunchError(str(found[-1]).strip()[:200] if found else "the ranks failed")
        return msgspec.json.decode(output.read_bytes(), type=Figures) if output.is_file() else None
