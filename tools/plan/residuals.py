"""Every published case that the planner was held against, and by how much it misses each.

`python -m tools.plan residuals` prints the tables of the README.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tools.plan.memory import MIB, memory_of_rank
from tools.plan.time.cluster import Cluster
from tools.plan.time.iteration import iteration_seconds
from tools.spec.hardware import device_by_key, link_by_key
from tools.spec.model import ModelShape, load_model
from tools.spec.run import Recompute, RunSpec, spec_of_model
from tools.spec.strategy import Batch, Parallelism, batch_for, parse_strategy

MEMORY_READINGS = (
    ("baseline", 0, 80161),
    ("dp2", 0, 80543),
    ("tp2", 0, 85969),
    ("sp2", 0, 71571),
    ("cp2", 0, 81917),
    ("cp2", 0, 81557),
    ("pp2", 0, 61249),
    ("pp2", 1, 88299),
)
"""gpt2-large on H200: strategy, pipeline rank, MiB that nvidia-smi printed."""

ITERATION_TIMES = (
    ("baseline", 438.3, 436.7),
    ("dp2", 436.9, 437.5),
    ("tp2", 542.8, 543.6),
    ("sp2", 538.9, 541.4),
    ("cp2", 514.5, 519.1),
    ("pp2", 821.7, 813.0),
)
"""gpt2-large on H200: strategy, ms of two consecutive iterations."""


@dataclass(frozen=True)
class PaperCase:
    """A row of arXiv:2205.05198, tables 3 and 5: A100, fp16, sequence 2048."""

    name: str
    layers: int
    hidden: int
    heads: int
    tensor: int
    pipeline: int
    virtual: int
    batch: Batch
    full_seconds: float
    """With full recomputation."""
    selective_seconds: float
    """With sequence parallelism and selective recomputation."""


PAPER_CASES = (
    PaperCase("22B", 48, 6144, 64, 8, 1, 1, Batch(4, 4), 1.42, 1.10),
    PaperCase("175B", 96, 12288, 96, 8, 8, 3, Batch(1, 64), 18.13, 13.75),
    PaperCase("530B", 105, 20480, 128, 8, 35, 3, Batch(1, 280), 49.05, 37.83),
    PaperCase("1T", 128, 25600, 160, 8, 64, 1, Batch(1, 512), 94.42, 71.49),
)


@dataclass(frozen=True)
class Residual:
    """One published figure beside its prediction."""

    case: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative, positive if predicted too high."""
        return self.predicted / self.measured - 1

    def row(self, digits: int) -> str:
        """A row of a Markdown table."""
        numbers = f"{self.measured:.{digits}f} | {self.predicted:.{digits}f}"
        return f"| {self.case} | {numbers} | {100 * self.error:+.1f}% |"


def memory_residuals() -> list[Residual]:
    """MiB a device."""
    return [
        Residual(
            strategy if strategy != "pp2" else f"pp2, stage {rank}",
            measured,
            memory_of_rank(h200_spec(strategy), rank).total / MIB,
        )
        for strategy, rank, measured in MEMORY_READINGS
    ]


def h200_residuals() -> list[Residual]:
    """Milliseconds an iteration."""
    return [
        Residual(strategy, (first + second) / 2, 1e3 * h200_seconds(strategy))
        for strategy, first, second in ITERATION_TIMES
    ]


def a100_residuals() -> list[Residual]:
    """Seconds an iteration."""
    found = []
    for case in PAPER_CASES:
        devices = case.tensor * case.pipeline
        full, selective = paper_specs(case)
        for spec, measured, words in (
            (full, case.full_seconds, "full recomputation"),
            (selective, case.selective_seconds, "SP, selective"),
        ):
            predicted = iteration_seconds(spec, usual_cluster("a100", devices)).total
            found.append(Residual(f"{case.name} on {devices}, {words}", measured, predicted))
    return found


def h200_spec(strategy: str) -> RunSpec:
    """A published gpt2-large run."""
    model = load_model("gpt2-large")
    parallelism = parse_strategy(strategy, 1 if strategy == "baseline" else 2)
    return spec_of_model(model, parallelism, batch_for(model.batch, parallelism))


def h200_seconds(strategy: str) -> float:
    """Its predicted iteration."""
    spec = h200_spec(strategy)
    devices = spec.parallelism.world_size
    return iteration_seconds(spec, usual_cluster("h200", devices)).total


def paper_specs(case: PaperCase) -> tuple[RunSpec, RunSpec]:
    """A paper's case with full and with selective recomputation; attention was not fused then."""
    shape = ModelShape(
        layers=case.layers,
        hidden=case.hidden,
        heads=case.heads,
        query_groups=case.heads,
        head_width=case.hidden // case.heads,
        ffn_hidden=4 * case.hidden,
        seq_length=2048,
        positions=2048,
        vocabulary=51200,
    )
    split = Parallelism(tensor=case.tensor, pipeline=case.pipeline, virtual_stages=case.virtual)
    full = RunSpec(
        shape, split, case.batch, "fp16", recompute=Recompute.FULL, fused_attention=False
    )
    sequence = replace(split, sequence_parallel=True)
    return full, replace(full, parallelism=sequence, recompute=Recompute.SELECTIVE)


def usual_cluster(gpu: str, devices: int) -> Cluster:
    """Nodes of eight, with the device's own links."""
    device = device_by_key(gpu)
    return Cluster(device, devices, 8, link_by_key(device.link), link_by_key(device.network))


def residual_tables() -> Iterator[str]:
    """The README's tables, line by line."""
    for title, residuals, digits in (
        ("gpt2-large, H200, MiB a device", memory_residuals(), 0),
        ("gpt2-large, H200, ms an iteration", h200_residuals(), 1),
        ("arXiv:2205.05198, A100, s an iteration", a100_residuals(), 2),
    ):
        yield f"| {title} | measured | predicted | error |"
        yield "|---|---|---|---|"
        yield from (residual.row(digits) for residual in residuals)
        yield ""
