"""Draw a strategy as HTML: sentences on what it does, and three sheets of SVG.

`render_drawings_page` draws some strategies as a static page. In the browser, the planner draws any other strategy.

The drawn parts carry the bytes that a rank holds and sends (`data-rank`, `data-holds`, `data-sends`), so that a
test can add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from parakit.config.groups import Group, group_size
from parakit.config.hardware import load_hardware
from parakit.config.model import model_names
from parakit.config.run import DeviceKind, RunSpec
from parakit.config.strategy import (
    EXAMPLE_STRATEGIES,
    Parallelism,
    count_devices,
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
    """Return the drawing of a run as HTML: a caption in sentences, then the sheets.

    Args:
        spec: A legal run.
        name: The figure's name, which links use and ids begin with. It must be unique in a page.

    Raises:
        UnevenSplitError: A parallel size does not divide what it splits.
    """
    ranks = select_ranks(spec.parallelism)
    tensors = draw_tensors(spec, ranks, name)
    schedule = draw_schedule(spec, ranks, name)
    communication = draw_communication(spec, ranks, name)
    caption = "".join(f"<p>{escape(sentence)}</p>" for sentence in _caption_sentences(spec, ranks))
    columns = f"<div>{tensors}</div><div>{schedule}{communication}</div>"
    return f'<figure id="{name}"><figcaption>{caption}</figcaption>{columns}</figure>'


_DIMENSIONS: tuple[tuple[Callable[[Parallelism], bool], str], ...] = (
    (
        lambda split: split.data > split.expert,
        "Data parallelism (DP): each replica of the model trains on other samples. Gradients are summed "
        "once per iteration. DP is the first choice while a replica fits its devices.",
    ),
    (
        lambda split: split.tensor > 1 and not split.sequence_parallel,
        "Tensor parallelism (TP): every matrix is split. Partial results are summed four times per layer "
        "and micro batch, and nothing overlaps the two sums of forward. TP needs the fast links of one "
        "node.",
    ),
    (
        lambda split: split.sequence_parallel,
        "Tensor parallelism with sequence parallelism (SP): matrices are split, and between them the "
        "tokens of norms and dropouts. A reduce-scatter and an all-gather replace each sum. SP is TP with "
        "less memory.",
    ),
    (
        lambda split: split.context > 1,
        "Context parallelism (CP): the tokens of each sample are split. A rank gets one chunk from the "
        "front and one from the back, so that all ranks have the same causal attention to compute. "
        "Weights are replicated; keys and values are sent. CP is for long sequences.",
    ),
    (
        lambda split: split.pipeline > 1,
        "Pipeline parallelism (PP): layers are split. A stage sends one hidden state to the next stage, "
        "and waits for other stages at both ends of an iteration. PP is for slow links, and for models "
        "that no node can hold.",
    ),
    (
        lambda split: split.expert > 1,
        "Expert parallelism (EP), inside DP: experts are split, and tokens are sent to their experts and "
        "back. EP is for mixtures of experts.",
    ),
)
"""Sentences on each dimension, with the condition under which a strategy uses the dimension."""
_SHARDINGS = {
    "zero1": "ZeRO-1: the optimizer's state is split over data-parallel ranks. Gradients are scattered "
    "and updated weights are gathered. With ring algorithms that sends as much as DP.",
    "zero2": "ZeRO-2: gradients and the optimizer's state are split over data-parallel ranks.",
    "zero3": "ZeRO-3: weights, gradients and the optimizer's state are split over data-parallel ranks. "
    "A layer's weights are gathered before its forward and before its backward. ZeRO-3 needs the least "
    "memory and sends more.",
    "fsdp2": "PyTorch's FSDP2: weights, gradients and the optimizer's state are split as under ZeRO-3. "
    "A layer's weights are gathered before its forward and before its backward.",
}
"""Sentences on the effect of each sharding, by the name of the sharding."""


def _caption_sentences(spec: RunSpec, ranks: list[DrawnRank]) -> Iterator[str]:
    """Yield the caption's sentences: on each parallel dimension, on sharding, and on the bytes per iteration."""
    split = spec.parallelism
    for is_used, sentence in _DIMENSIONS:
        if is_used(split):
            yield sentence
    if split.sharding:
        yield _SHARDINGS[split.sharding]
    stages = sorted({rank.stage for rank in ranks})
    sent_bytes = {stage: total_wire_bytes(rank_collectives(spec, stage)) for stage in stages}
    devices = "CPU ranks" if spec.device is DeviceKind.CPU else "GPUs"
    text = (
        f"{spec.model} as {spec.name} on {split.world_size:,} {devices}, {spec.dtype}, micro batch "
        f"{spec.batch.micro_batch_size:,}, global batch {spec.batch.global_batch_size:,}. In an "
        f"iteration a rank sends {_list_by_stage(sent_bytes)}."
    )
    if len(ranks) < split.world_size:
        text += f" {len(ranks)} of its ranks are drawn."
    yield text
    if spec.shape.experts and group_size(split, Group.TENSOR_EXPERT) > 1:
        yield (
            "A router decides how many tokens each expert gets. So only the sum of these bytes over all "
            "ranks is exact."
        )


def _list_by_stage(bytes_by_stage: dict[int, int]) -> str:
    """Return the bytes of each stage as text; a single number if all stages have the same."""
    if len(set(bytes_by_stage.values())) == 1:
        return format_traffic(next(iter(bytes_by_stage.values())))
    return joined(
        [
            f"{format_traffic(sent_bytes)} on stage {stage}"
            for stage, sent_bytes in bytes_by_stage.items()
        ]
    )


_DENSE, _EXPERTS = ("gpt2-tiny", "gpt2-large"), ("moe-tiny", "blueberry-79m")
"""Models of the drawings: on CPU ranks, whose measured bytes are the drawn ones, and on GPUs."""
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
"""Heading, number of devices and models of each drawing on the page, by strategy."""
GPU = "h200"


def resolve_run(
    model: str,
    strategy: str,
    device: str,
    devices: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
) -> RunSpec:
    """Return the run that `make train-STRATEGY-MODEL-N` would train.

    Args:
        model: The model's name.
        strategy: The strategy's name.
        device: Key of a GPU, or `cpu`.
        devices: Number of devices; None for the product of the strategy's parallel sizes.
        micro_batch: Samples per micro batch; None for the value that training uses.
        global_batch: Samples per iteration; None for the value that training uses.

    Raises:
        ValueError: There is no such model, strategy or device, or Megatron refuses the run; one sentence.
    """
    options = PlanOptions(
        model=model,
        gpu=device,
        gpus=devices or count_devices(strategy),
        strategy=strategy,
        micro_batch=micro_batch,
        global_batch=global_batch,
    )
    return time_strategy(options).candidate.spec


def render_drawings_page() -> str:
    """Return the page as HTML, with every drawing of `DRAWN` for both of its models."""
    sections = []
    for strategy, (heading, devices, (tiny, large)) in DRAWN.items():
        exact = draw_figure(resolve_run(tiny, strategy, "cpu", devices), f"{strategy}-{tiny}")
        predicted = draw_figure(resolve_run(large, strategy, GPU, devices), f"{strategy}-{large}")
        drawings = f'<div class="exact">{exact}</div><div class="predicted">{predicted}</div>'
        sections.append((strategy, heading, drawings))
    template = environment(Path(__file__).parents[1] / "templates").get_template("drawings.html.j2")
    return template.render(
        sections=sections,
        models=model_names(),
        strategies=EXAMPLE_STRATEGIES,
        devices=load_hardware().devices.values(),
        gpu=GPU,
    )
