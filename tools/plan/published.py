"""Published runs as the planner's own: the six of gpt2-large on H200, and those of a paper on A100."""

from __future__ import annotations

from dataclasses import replace

from tools.plan.time.cluster import Cluster
from tools.spec.hardware import device_by_key, link_by_key
from tools.spec.model import ModelShape, load_model
from tools.spec.published import MAIN_SOURCE, Figure, Paper, PaperCase, load_published
from tools.spec.recompute import Recompute
from tools.spec.run import RunSpec, spec_of_model
from tools.spec.strategy import Batch, Parallelism, batch_for, devices_of, parse_strategy


def h200_figures() -> tuple[Figure, ...]:
    """The published gpt2-large runs."""
    return load_published().of(MAIN_SOURCE)


def h200_spec(strategy: str) -> RunSpec:
    """A published gpt2-large run."""
    model, split = load_model("gpt2-large"), parse_strategy(strategy, devices_of(strategy))
    return spec_of_model(model, split, batch_for(model.batch, split))


def paper_specs(paper: Paper, case: PaperCase) -> tuple[RunSpec, RunSpec]:
    """A paper's case with full and with selective recomputation; attention was not fused then."""
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


def usual_cluster(gpu: str, devices: int) -> Cluster:
    """Nodes of eight, with the device's own links."""
    device = device_by_key(gpu)
    return Cluster(device, devices, 8, link_by_key(device.link), link_by_key(device.network))
