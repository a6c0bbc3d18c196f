"""The largest model that fits a number of devices, by strategy, for `make plan LARGEST=1`.

Models are of one family with GPT-3's proportions from 6.7B on (arXiv:2005.14165 table 2.1): heads 128 wide, as many
heads as layers, and an MLP four times as wide. The result says how large a model each strategy holds; a search
(`make plan MODEL=`) says which strategy is the fastest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from parakit.config.hardware import Device, device_by_key
from parakit.config.model import GPT2_VOCABULARY, ModelShape
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec
from parakit.config.strategy import Batch, parse_strategy
from parakit.costs import (
    find_peak_device_memory,
    find_peak_rank_that_may_fit,
    total_parameters,
)
from parakit.formatting.svg import svg_figure
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import wide_console
from parakit.formatting.units import gib
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.request import resolve_device_counts
from parakit.planner.verdict import recommended_bytes

_HEAD_WIDTH = 128
_SEQUENCE = 2048
_ROUNDING_RATIO = 1.25
"""Ratio of parameters above the largest fitting model at which the search stops. Below it a larger model may still fit,
because layers and heads are rounded to multiples."""
_MICRO_BATCHES_PER_STAGE = 4
"""Micro batches per pipeline stage, enough to keep the bubble below a quarter."""


@dataclass(frozen=True)
class LargestModel:
    """Largest model of a family of growing models that fits with one strategy. All numbers are 0 if none fits."""

    strategy: str
    recompute: str
    parameters: int = 0
    layers: int = 0
    hidden: int = 0
    memory_bytes: int = 0
    """Bytes of the rank with the peak memory."""


def show_largest(options: PlanOptions) -> int:
    """Print the largest models as a table or JSON, draw them if SVG= names a file, and return 0.

    Raises:
        RequestError: The options name a model or a strategy, or contradictory numbers of devices.
    """
    if options.model or options.strategy:
        raise RequestError(
            "LARGEST=1 makes its own models and tries every strategy; leave MODEL= and STRATEGY= out."
        )
    if options.peft:
        raise RequestError("LARGEST=1 sizes models whose weights are all trained; leave PEFT= out.")
    device = device_by_key(options.gpu)
    devices, _ = resolve_device_counts(options, device.domain)
    seq_length, dtype = options.seq or _SEQUENCE, options.dtype or "bf16"
    models = find_largest_models(device, devices, seq_length, dtype)
    if options.json:
        print(json.dumps([asdict(model) for model in models], indent=2))
    else:
        title = f"The largest model on {devices:,} {device.name}, micro batch 1"
        wide_console().print(rich_table(_build_table(models, title)))
    if options.svg:
        _draw_models(models, options.svg, f"{devices:,} {device.name}")
    return 0


def find_largest_models(
    device: Device, devices: int, seq_length: int = _SEQUENCE, dtype: str = "bf16"
) -> list[LargestModel]:
    """Return two models per strategy: the largest without recomputation, and the largest with full recomputation.

    Most strategies have one kind of parallelism. Tensor and context parallelism are tried only inside a node. Two
    further strategies combine tensor and sequence parallelism with pipeline stages or with replicas.
    """
    models = []
    for name in _list_strategies(devices, device.domain):
        for recompute in (Recompute.NONE, Recompute.FULL):
            specs = _enumerate_growing_models(name, devices, seq_length, dtype)
            recomputing = (replace(spec, recompute=recompute) for spec in specs)
            largest = _find_largest_fitting(name, recompute, recomputing, device.memory_bytes)
            models.append(largest)
    return models


def _find_largest_fitting(
    strategy: str, recompute: Recompute, specs: Iterable[RunSpec], device_bytes: int
) -> LargestModel:
    """Return the last of some growing models whose peak memory may be recommended on a device.

    The models that may fit by the closed form are listed first. The list ends with the first model that does not fit
    and that has clearly more parameters than the last one that did. The memory of the listed models is then replayed,
    if the replay knows them, from the largest model to the first one that fits.
    """
    capacity = recommended_bytes(device_bytes)
    candidates: list[RunSpec] = []
    most_parameters = 0
    for spec in specs:
        parameters = total_parameters(spec.shape)
        if find_peak_rank_that_may_fit(spec, capacity):
            candidates.append(spec)
            most_parameters = parameters
        elif parameters > _ROUNDING_RATIO * most_parameters:
            break
    for spec in reversed(candidates):
        _, memory = find_peak_device_memory(spec, device_bytes)
        if memory.total <= capacity:
            return LargestModel(
                strategy,
                str(recompute),
                parameters=total_parameters(spec.shape),
                layers=spec.shape.layers,
                hidden=spec.shape.hidden,
                memory_bytes=memory.total,
            )
    return LargestModel(strategy, str(recompute))


def _list_strategies(devices: int, domain: int) -> list[str]:
    """Return the names of the strategies for which the largest model is searched.

    Args:
        devices: Number of devices that each strategy uses.
        domain: Number of devices in a node.
    """
    if devices == 1:
        return ["baseline"]
    names = [f"dp{devices}{sharding}" for sharding in ("", "-zero1", "-zero2", "-zero3")]
    if devices <= domain:
        names += [f"cp{devices}", f"tp{devices}", f"sp{devices}"]
    names.append(f"pp{devices}")
    for inner in (8, 4, 2):
        if devices % inner == 0 and inner < devices:
            names.append(f"sp{inner}pp{devices // inner}")
            names.append(f"sp{inner}dp{devices // inner}-zero3")
            break
    return names


def _enumerate_growing_models(
    name: str, devices: int, seq_length: int, dtype: str
) -> Iterator[RunSpec]:
    """Yield runs of ever larger models that a strategy can split evenly. The iterator does not end.

    The number of layers is a multiple of the pipeline stages, and the number of heads a multiple of the tensor
    parallelism. The width of a head is chosen so that the hidden size stays in proportion to the layers.
    """
    split = parse_strategy(name, devices)
    tensor, pipeline = split.tensor, split.pipeline
    micro_batches = _MICRO_BATCHES_PER_STAGE * pipeline if pipeline > 1 else 1
    for size in count(max(tensor, pipeline)):
        heads = -(-size // tensor) * tensor
        width = round(_HEAD_WIDTH * size / heads / 8) * 8
        shape = ModelShape(
            layers=round(size / pipeline) * pipeline,
            hidden=heads * width,
            heads=heads,
            query_groups=heads,
            head_width=width,
            ffn_hidden=4 * heads * width,
            seq_length=seq_length,
            positions=seq_length,
            vocabulary=GPT2_VOCABULARY,
        )
        yield RunSpec(shape, split, Batch(1, micro_batches * split.data), dtype, dropout=0.0)


def _format_size(model: LargestModel) -> str:
    """Return a model's parameters, layers and hidden size, or "none" if no model fits."""
    if not model.parameters:
        return "none"
    return f"{model.parameters / 1e9:.1f}B ({model.layers} x {model.hidden:,})"


class _ModelPair(NamedTuple):
    """Largest models of one strategy."""

    stored: LargestModel
    """Model without recomputed layers."""
    recomputed: LargestModel
    """Model with full recomputation."""


def _build_table(models: list[LargestModel], title: str) -> Table[_ModelPair]:
    """Return a table with a row per strategy. A row has the largest models without and with recomputed layers."""
    columns = (
        Column[_ModelPair]("strategy", lambda pair: pair.stored.strategy, right=False),
        Column[_ModelPair]("nothing recomputed", lambda pair: _format_size(pair.stored)),
        Column[_ModelPair]("GiB per rank", lambda pair: gib(pair.stored.memory_bytes)),
        Column[_ModelPair]("layers recomputed", lambda pair: _format_size(pair.recomputed)),
        Column[_ModelPair]("GiB per rank", lambda pair: gib(pair.recomputed.memory_bytes)),
    )
    # The models of a strategy follow one another: first without recomputed layers, then with them.
    pairs = [
        _ModelPair(stored, recomputed)
        for stored, recomputed in zip(models[::2], models[1::2], strict=True)
    ]
    return Table(columns, tuple(pairs), title)


def _draw_models(models: list[LargestModel], path: Path, cluster: str) -> None:
    """Draw the sizes of the models as an SVG picture, with two bars per strategy.

    Args:
        models: Two models per strategy, as `find_largest_models` returns them.
        path: The SVG file.
        cluster: Name of the devices, for the title.
    """
    names = [model.strategy for model in models[::2]]
    with svg_figure(path, "largest", 8, 0.8 + 0.45 * len(names)) as figure:
        axes = figure.subplots()
        styles = (("nothing recomputed", "#0072B2"), ("layers recomputed", "#56B4E9"))
        for index, (label, colour) in enumerate(styles):
            sizes = [model.parameters / 1e9 for model in models[index::2]]
            rows = [row + 0.38 * (index - 0.5) for row in range(len(names))]
            bars = axes.barh(rows, sizes, 0.36, color=colour, label=label)
            axes.bar_label(bars, fmt=" {:.1f}B", fontsize=7.5)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("billion parameters")
        axes.set_title(f"The largest model on {cluster}, by strategy", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
