"""Published figures of runs (`examples/gpt3/published.yaml`), and corrections of their write-ups.

Only this module reads the file. The report compares measured values with these figures, `reproduce`
repeats the runs, and the planner predicts them.
"""

from __future__ import annotations

import functools
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
    """A write-up that publishes figures."""

    key: str
    name: str
    """Short name on pages."""
    title: str
    hardware: str
    software: str
    device: str | None = None
    megatron_commit: str | None = None
    driver: str | None = None
    tolerance: Mapping[str, PublishedNumber] = field(default_factory=dict)
    """Allowed relative difference of a measured value from the published measurements, by field of
    `Figure`.
    """
    tolerance_basis: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The published figures of one run. None or empty means that the write-up does not give the
    value.
    """

    source: Publication
    backend: str
    model: str
    strategy: str
    devices: int
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    dtype: str | None = None
    iteration_ms: tuple[PublishedNumber, ...] = ()
    """Times of consecutive iterations in milliseconds."""
    device_memory_mib: tuple[PublishedNumber, ...] = ()
    """Memory that the devices reported, in MiB by rank."""
    caution: str = ""
    published_as: str = ""
    """The write-up's name of the run."""
    peak_memory_gb: tuple[PublishedNumber, ...] = ()
    samples_per_second: float | None = None
    speedup: float | None = None
    """Speedup over the write-up's baseline."""
    shares: Mapping[str, PublishedNumber] = field(default_factory=dict)
    """Fraction of an iteration by phase."""
    network: Mapping[str, PublishedNumber] = field(default_factory=dict)
    """Megabytes and seconds of one transfer and its rate, as published."""
    micro_batches_per_second: float | None = None
    wall_seconds: float | None = None
    final_loss: float | None = None
    validation_accuracy: float | None = None
    perplexity: float | None = None

    @property
    def parallelism(self) -> Parallelism:
        """Parallelism of the run, from its strategy and number of devices."""
        return parse_strategy(self.strategy, self.devices)

    @property
    def mean_iteration_ms(self) -> float | None:
        """Mean of the published iteration times; None if there are none."""
        return sum(self.iteration_ms) / len(self.iteration_ms) if self.iteration_ms else None

    @property
    def ms_per_sample(self) -> float | None:
        """Published milliseconds per sample, which makes different batch sizes comparable; None if
        unknown.
        """
        mean = self.mean_iteration_ms
        return mean / self.global_batch_size if mean and self.global_batch_size else None


@dataclass(frozen=True)
class Correction:
    """A statement of a write-up (`says`) and its correction (`right`)."""

    source: str
    """Key of the write-up."""
    name: str
    says: str
    right: str


@dataclass(frozen=True)
class Published:
    """All figures and corrections in the file."""

    figures: tuple[Figure, ...] = ()
    corrections: tuple[Correction, ...] = ()

    def figures_of(self, source: str) -> tuple[Figure, ...]:
        """Return the figures of one write-up, given its key."""
        return tuple(figure for figure in self.figures if figure.source.key == source)


@functools.cache
def load_published(path: Path = PUBLISHED_FILE) -> Published:
    """Return the published figures and corrections of a file. A missing file gives an empty result.

    Each file is read once per process, so later changes are not seen.

    Raises:
        msgspec.ValidationError: A figure lacks a value or has one of another type.
    """
    if not path.is_file():
        return Published()
    data = read_yaml(path)
    sources = {key: {"key": key} | entry for key, entry in data["sources"].items()}
    # In the file, figures and corrections name their source by its key.
    figures = []
    for entry in data["figures"]:
        figures.append(entry | {"source": sources[entry["source"]]})
    corrections = []
    for entry in data["corrections"]:
        corrections.append(entry | {"name": sources[entry["source"]]["name"]})
    return msgspec.convert({"figures": figures, "corrections": corrections}, Published)
