"""The published runs that the kit reproduces and those of a paper, as readings beside the file's."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from tools.plan.published import h200_figures, h200_spec, paper_specs, usual_cluster
from tools.plan.readings.express import Expressed
from tools.plan.readings.table import Reading
from tools.plan.tensors import parameters_total
from tools.plan.time.cluster import Cluster
from tools.spec.published import load_paper
from tools.spec.run import RunSpec

KIT = "examples/gpt3/published.yaml"
"""Their source, as `constants.yaml` names it."""


def kit_runs() -> list[Expressed]:
    """The six gpt2-large runs on H200."""
    found = []
    for figure in h200_figures():
        assert figure.mean_iteration_ms is not None
        cluster, spec = usual_cluster("h200", figure.devices), h200_spec(figure.strategy)
        found.append(_expressed(KIT, spec, cluster, figure.mean_iteration_ms / 1e3))
    return found


def paper_runs() -> list[Expressed]:
    """The eight of arXiv:2205.05198."""
    found = []
    paper = load_paper()
    for case in paper.cases:
        cluster = usual_cluster(paper.device, case.tensor * case.pipeline)
        measured = (case.full_seconds, case.selective_seconds)
        for spec, seconds in zip(paper_specs(paper, case), measured, strict=True):
            found.append(_expressed(paper.source, spec, cluster, seconds))
    return found


def _expressed(source: str, spec: RunSpec, cluster: Cluster, seconds: float) -> Expressed:
    split, words = spec.parallelism, ("model", "gpu", "dtype", "recompute", "notes", "where")
    unknown: dict[str, Any] = {
        each.name: None for each in fields(Reading) if each.default is MISSING
    }
    stated: dict[str, Any] = {
        "line": 0,
        "source": source,
        "metric": "step_time_s",
        "value": seconds,
        "model": spec.model,
        "params_b": round(parameters_total(spec.shape) / 1e9, 2),
        "seq": spec.shape.seq_length,
        "gpu": cluster.device.key.upper(),
        "gpus": split.world_size,
        "tp": split.tensor,
        "pp": split.pipeline,
        "cp": split.context,
        "dtype": spec.dtype,
    }
    return Expressed(Reading(**(unknown | dict.fromkeys(words, "") | stated)), spec, cluster)
