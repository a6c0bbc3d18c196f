"""A strategy drawn from the spec of a run, as HTML: what it is in words, then its three sheets.

`page` draws some as static SVG, any other the planner in the browser.

What is drawn says how many bytes which rank holds and sends (`data-rank`, `data-holds`, `data-sends`),
so that a test can add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from parakit.config.groups import Group, group_size
from parakit.config.hardware import load_hardware
from parakit.config.model import load_model, model_names
from parakit.config.run import DeviceKind, RunSpec
from parakit.config.strategy import (
    EXAMPLE_STRATEGIES,
    Parallelism,
    count_devices,
    parse_strategy,
    scale_batch,
)
from parakit.costs import rank_collectives, total_wire_bytes
from parakit.formatting.html import environment
from parakit.formatting.units import joined
from parakit.planner import PlanOptions, time_strategy
from parakit.site.drawing.communication import draw_communication, format_traffic
from parakit.site.drawing.schedule import draw_schedule
from parakit.site.drawing.sheet import DrawnRank, select_ranks
from parakit.site.drawing.tensors import draw_tensors


def draw_figure(spec: RunSpec, name: str) -> str:
    """The drawing as HTML: a caption in words, then its sheets.

    Args:
        spec: A legal run.
        name: Of the figure, for links to it and for ids, which differ between figures of a page.

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
    """
    ranks = select_ranks(spec.parallelism)
    sheets = [
        draw_tensors(spec, ranks, name),
        draw_schedule(spec, ranks, name),
        draw_communication(spec, ranks, name),
    ]
    says = "".join(f"<p>{escape(sentence)}</p>" for sentence in _sentences(spec, ranks))
    columns = f"<div>{sheets[0]}</div><div>{sheets[1]}{sheets[2]}</div>"
    return f'<figure id="{name}"><figcaption>{says}</figcaption>{columns}</figure>'


_DIMENSIONS: tuple[tuple[Callable[[Parallelism], bool], str], ...] = (
    (
        lambda split: split.data > split.expert,
        "Data parallelism (DP): every replica of the model trains on other samples; gradients are "
        "summed once an iteration. The first choice while a replica fits its devices.",
    ),
    (
        lambda split: split.tensor > 1 and not split.sequence_parallel,
        "Tensor parallelism (TP): every matrix is split; partial results are summed four times a layer "
        "and micro batch, and nothing hides the two of forward. For the fast links of one node.",
    ),
    (
        lambda split: split.sequence_parallel,
        "Tensor parallelism with sequence parallelism (SP): matrices are split, and between them the "
        "tokens of norms and dropouts; a sum becomes a reduce-scatter and an all-gather. TP with less "
        "memory.",
    ),
    (
        lambda split: split.context > 1,
        "Context parallelism (CP): the tokens of each sample are split, first and last chunks paired so "
        "that causal attention is even; weights are whole, keys and values travel. For long sequences.",
    ),
    (
        lambda split: split.pipeline > 1,
        "Pipeline parallelism (PP): layers are split; a stage sends one hidden state on, and waits for "
        "others at both ends of an iteration. For slow links and models that no node holds.",
    ),
    (
        lambda split: split.expert > 1,
        "Expert parallelism (EP), inside DP: experts are split, and tokens travel to theirs and back. "
        "For mixtures of experts.",
    ),
)
_SHARDINGS = {
    "zero1": "ZeRO-1: the optimizer's state is split over data-parallel ranks. Gradients are scattered "
    "and updated weights gathered, which with rings is as much as DP sends.",
    "zero2": "ZeRO-2: gradients and the optimizer's state are split over data-parallel ranks.",
    "zero3": "ZeRO-3: weights, gradients and the optimizer's state are split over data-parallel ranks; "
    "a layer's weights are gathered before its forward and its backward. The least memory, and more "
    "traffic.",
    "fsdp2": "PyTorch's FSDP2: weights, gradients and the optimizer's state are split as under ZeRO-3; "
    "a layer's weights are gathered before its forward and its backward.",
}


def _sentences(spec: RunSpec, ranks: list[DrawnRank]) -> Iterator[str]:
    split = spec.parallelism
    for holds, sentence in _DIMENSIONS:
        if holds(split):
            yield sentence
    if split.sharding:
        yield _SHARDINGS[split.sharding]
    stages = sorted({rank.stage for rank in ranks})
    sent = {stage: total_wire_bytes(rank_collectives(spec, stage)) for stage in stages}
    kind = "CPU ranks" if spec.device is DeviceKind.CPU else "GPUs"
    yield (
        f"{spec.model} as {spec.name} on {split.world_size:,} {kind}, {spec.dtype}, micro batch "
        f"{spec.batch.micro_batch_size:,}, global batch {spec.batch.global_batch_size:,}. In an "
        f"iteration a rank sends {_list_by_stage(sent)}."
        + ("" if len(ranks) == split.world_size else f" {len(ranks)} of its ranks are drawn.")
    )
    if spec.shape.experts and group_size(split, Group.TENSOR_EXPERT) > 1:
        yield "A router decides how many tokens go where: of these bytes the sum over ranks is exact."


def _list_by_stage(values: dict[int, int]) -> str:
    if len(set(values.values())) == 1:
        return format_traffic(next(iter(values.values())))
    return joined([f"{format_traffic(value)} on stage {stage}" for stage, value in values.items()])


_DENSE, _EXPERTS = ("gpt2-tiny", "gpt2-large"), ("moe-tiny", "blueberry-79m")
"""Of CPU ranks, where ledgers count the same bytes, and of GPUs."""
DRAWN = {
    "dp2": ("Data parallel", 2, _DENSE),
    "tp2": ("Tensor parallel", 2, _DENSE),
    "sp2": ("Sequence parallel", 2, _DENSE),
    "cp2": ("Context parallel", 2, _DENSE),
    "pp2": ("Pipeline parallel", 2, _DENSE),
    "ep2": ("Expert parallel", 2, _EXPERTS),
    "zero1": ("ZeRO-1", 2, _DENSE),
    "zero3": ("ZeRO-3", 2, _DENSE),
    "tp2pp2dp2": ("Three at once", 8, _DENSE),
}
"""By strategy: heading, devices, models."""
GPU = "h200"


def resolve_run(
    model: str,
    strategy: str,
    device: str,
    devices: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
) -> RunSpec:
    """The run that `make train-STRATEGY-MODEL-N` would train; `device` is a GPU's key or `cpu`.

    Raises:
        ValueError: There is no such model, strategy or device, or Megatron refuses it; one sentence.
    """
    devices = devices or count_devices(strategy)
    batch = scale_batch(load_model(model).batch, parse_strategy(strategy, devices))
    options = PlanOptions(
        model=model,
        gpu=device,
        gpus=devices,
        strategy=strategy,
        micro_batch=micro_batch or batch.micro_batch_size,
        global_batch=global_batch or batch.global_batch_size,
    )
    return time_strategy(options).candidate.spec


def render_drawings_page() -> str:
    """The page, with every drawing of `DRAWN` for both of its models."""
    sections = []
    for strategy, (heading, devices, (tiny, large)) in DRAWN.items():
        small = draw_figure(resolve_run(tiny, strategy, "cpu", devices), f"{strategy}-{tiny}")
        predicted = draw_figure(resolve_run(large, strategy, GPU, devices), f"{strategy}-{large}")
        both = f'<div class="exact">{small}</div><div class="predicted">{predicted}</div>'
        sections.append((strategy, heading, both))
    template = environment(Path(__file__).parents[1] / "templates").get_template("drawings.html.j2")
    return template.render(
        sections=sections,
        models=model_names(),
        strategies=EXAMPLE_STRATEGIES,
        devices=load_hardware().devices.values(),
        gpu=GPU,
    )
