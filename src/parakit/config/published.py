"""Published figures of runs (`examples/gpt3/published.yaml`), and corrections of them.

The one place that reads the file: the report compares measured values with these figures, `reproduce`
repeats the runs, the planner predicts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from parakit.config.files import ROOT, read_yaml
from parakit.config.strategy import Parallelism, parse_strategy

PUBLISHED_FILE = ROOT / "examples" / "gpt3" / "published.yaml"
MAIN_SOURCE = "003"
"""The write-up whose runs this kit reproduces: gpt2-large on two H200."""

PublishedNumber = int | float
"""A number as published; an integer where it is one."""


@dataclass(frozen=True)
class Publication:
    """A write-up."""

    key: str
    name: str
    """What pages call it."""
    title: str
    hardware: str
    software: str
    device: str | None = None
    megatron_commit: str | None = None
    driver: str | None = None
    tolerance: Mapping[str, PublishedNumber] = field(default_factory=dict)
    """By a figure's field: how far from the published measurements a measured value may be, relative."""
    tolerance_basis: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The published figures of one run; None or empty where the write-up gives none."""

    source: Publication
    backend: str
    model: str
    strategy: str
    devices: int
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    dtype: str | None = None
    iteration_ms: tuple[PublishedNumber, ...] = ()
    """Readings of consecutive iterations."""
    device_memory_mib: tuple[PublishedNumber, ...] = ()
    """The devices' own readings, by rank."""
    caution: str = ""
    published_as: str = ""
    """The write-up's name of the run."""
    peak_memory_gb: tuple[PublishedNumber, ...] = ()
    samples_per_second: float | None = None
    speedup: float | None = None
    """Over the write-up's own baseline."""
    shares: Mapping[str, PublishedNumber] = field(default_factory=dict)
    """Of an iteration, by phase."""
    network: Mapping[str, PublishedNumber] = field(default_factory=dict)
    """Megabytes and seconds of one transfer, and the rate that follows, as the write-up has them."""
    micro_batches_per_second: float | None = None
    wall_seconds: float | None = None
    final_loss: float | None = None
    validation_accuracy: float | None = None
    perplexity: float | None = None

    @property
    def parallelism(self) -> Parallelism:
        """How the run was split."""
        return parse_strategy(self.strategy, self.devices)

    @property
    def mean_iteration_ms(self) -> float | None:
        """Mean of the published measurements."""
        return sum(self.iteration_ms) / len(self.iteration_ms) if self.iteration_ms else None

    @property
    def ms_per_sample(self) -> float | None:
        """Published time a sample; what figures of different batch sizes are compared by."""
        mean = self.mean_iteration_ms
        return mean / self.global_batch_size if mean and self.global_batch_size else None


@dataclass(frozen=True)
class Correction:
    """What a write-up got wrong."""

    source: str
    """Its key."""
    name: str
    says: str
    right: str


@dataclass(frozen=True)
class Published:
    """Everything in the file."""

    figures: tuple[Figure, ...] = ()
    corrections: tuple[Correction, ...] = ()

    def figures_of(self, source: str) -> tuple[Figure, ...]:
        """The figures of one write-up."""
        return tuple(figure for figure in self.figures if figure.source.key == source)


def load_published(path: Path = PUBLISHED_FILE) -> Published:
    """Read the published figures; without the file there are none.

    Raises:
        msgspec.ValidationError: A figure lacks a value, or has one of another type.
    """
    if not path.is_file():
        return Published()
    data = read_yaml(path)
    sources = {key: {"key": key} | entry for key, entry in data["sources"].items()}
    figures = [entry | {"source": sources[entry["source"]]} for entry in data["figures"]]
    corrections = [
        entry | {"name": sources[entry["source"]]["name"]} for entry in data["corrections"]
    ]
    return msgspec.convert({"figures": figures, "corrections": corrections}, Published)
