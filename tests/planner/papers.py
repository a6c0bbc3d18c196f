"""Iteration times of a paper (`papers.yaml`): constants are fitted to them, and compared with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from parakit.config.files import ROOT, read_yaml
from parakit.config.model import ModelShape
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec
from parakit.config.strategy import Batch, Parallelism
from parakit.planner.readings.published import build_measured_run, usual_cluster
from parakit.planner.readings.reading_to_spec import MeasuredRun

PAPERS_FILE = ROOT / "examples" / "gpt3" / "papers.yaml"


@dataclass(frozen=True, kw_only=True)
class PaperCase:
    """A model of `papers.yaml` with its times under full recomputation and under SP with selective recomputation."""

    name: str
    layers: int
    hidden: int
    heads: int
    tensor: int
    pipeline: int
    virtual_stages: int
    micro_batch_size: int
    global_batch_size: int
    full_seconds: float
    selective_seconds: float


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Iteration times of one paper."""

    source: str
    device: str
    """Key of `hardware.yaml`."""
    seq_length: int
    vocabulary: int
    cases: tuple[PaperCase, ...]


def load_paper(path: Path = PAPERS_FILE) -> Paper:
    """Read the paper's times.

    Raises:
        msgspec.ValidationError: A case lacks a value, or has one of another type.
    """
    return msgspec.convert(read_yaml(path), Paper)


def paper_specs(paper: Paper, case: PaperCase) -> tuple[RunSpec, RunSpec]:
    """Return a case with full and with selective recomputation, both with unfused attention."""
    shape = ModelShape(
        layers=case.layers,
        hidden=case.hidden,
        heads=case.heads,
        query_groups=case.heads,
        head_width=case.hidden // case.heads,
        ffn_hidden=4 * case.hidden,
        seq_length=paper.seq_length,
        positions=paper.seq_length,
        vocabulary=paper.vocabulary,
    )
    split = Parallelism(
        tensor=case.tensor, pipeline=case.pipeline, virtual_stages=case.virtual_stages
    )
    batch = Batch(case.micro_batch_size, case.global_batch_size)
    full = RunSpec(
        shape, split, batch, dtype="fp16", recompute=Recompute.FULL, fused_attention=False
    )
    sequence = replace(split, sequence_parallel=True)
    return full, replace(full, parallelism=sequence, recompute=Recompute.SELECTIVE)


def paper_runs() -> list[MeasuredRun]:
    """Return the eight runs of arXiv:2205.05198."""
    runs = []
    paper = load_paper()
    for case in paper.cases:
        cluster = usual_cluster(paper.device, case.tensor * case.pipeline)
        measured = (case.full_seconds, case.selective_seconds)
        for spec, seconds in zip(paper_specs(paper, case), measured, strict=True):
            runs.append(build_measured_run(paper.source, spec, cluster, seconds))
    return runs
