"""`make plan LARGEST=1`: the largest model that fits so many devices, by strategy.

Models are of one family, with GPT-3's proportions from 6.7B on (arXiv:2005.14165 table 2.1): heads 128
wide, as many of them as layers, an MLP four times as wide. It says what each parallelism buys in size; a
search (`make plan MODEL=`) says which is the fastest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from parakit.config.hardware import Device, device_by_key
from parakit.config.model import GPT2_VOCABULARY, ModelShape
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec
from parakit.config.strategy import Batch, parse_strategy
from parakit.costs import find_peak_rank, total_parameters
from parakit.formatting.svg import svg_figure
from parakit.formatting.table import Column, Table, rich_table
from parakit.formatting.terminal import wide_console
from parakit.formatting.units import gib
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.request import resolve_device_counts
from parakit.planner.verdict import recommended_bytes

_HEAD_WIDTH = 128
_SEQUENCE = 2048
_ROUNDED = 1.25
"""Layers and heads in whole multiples: a larger model may fit where a smaller one does not."""
_MICRO_BATCHES_A_STAGE = 4
"""As many as keep a pipeline's bubble below a quarter."""


@dataclass(frozen=True)
class LargestModel:
    """The largest model of the family that one strategy holds; 0 parameters where none fits."""

    strategy: str
    recompute: str
    parameters: int = 0
    layers: int = 0
    hidden: int = 0
    memory_bytes: int = 0
    """Of its fullest rank."""


def show_largest(options: PlanOptions) -> int:
    """Print, write and draw what fits.

    Raises:
        RequestError: A model is given too, or contradictory numbers of devices.
    """
    if options.model or options.strategy:
        raise RequestError(
            "LARGEST=1 makes its own models and tries every strategy; leave MODEL= and STRATEGY= out."
        )
    device = device_by_key(options.gpu)
    devices, _ = resolve_device_counts(options, device.domain)
    found = find_largest_models(device, devices, options.seq or _SEQUENCE, options.dtype or "bf16")
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        title = f"The largest model on {devices:,} {device.name}, micro batch 1"
        wide_console().print(rich_table(_table(found, title)))
    if options.svg:
        _draw(found, options.svg, f"{devices:,} {device.name}")
    return 0


def find_largest_models(
    device: Device, devices: int, seq_length: int = _SEQUENCE, dtype: str = "bf16"
) -> list[LargestModel]:
    """Of every strategy of one dimension (TP and CP inside a node), and of SP with stages or replicas;
    without and with recomputation of whole layers."""
    capacity = recommended_bytes(device.memory_bytes)
    found = []
    for name in _strategies(devices, device.domain):
        for recompute in (Recompute.NONE, Recompute.FULL):
            best = LargestModel(name, str(recompute))
            for spec in _growing(name, devices, seq_length, dtype):
                memory = find_peak_rank(replace(spec, recompute=recompute))[1].total
                shape, parameters = spec.shape, total_parameters(spec.shape)
                size = (parameters, shape.layers, shape.hidden, memory)
                if memory <= capacity:
                    best = LargestModel(name, str(recompute), *size)
                elif parameters > _ROUNDED * best.parameters:
                    break
            found.append(best)
    return found


def _strategies(devices: int, domain: int) -> list[str]:
    if devices == 1:
        return ["baseline"]
    data = [f"dp{devices}{suffix}" for suffix in ("", "-zero1", "-zero2", "-zero3")]
    words = ("cp", "tp", "sp", "pp") if devices <= domain else ("pp",)
    names = [*data, *(f"{word}{devices}" for word in words)]
    inner = next((degree for degree in (8, 4, 2) if devices % degree == 0 and degree < devices), 0)
    if inner:
        names.append(f"sp{inner}pp{devices // inner}")
        names.append(f"sp{inner}dp{devices // inner}-zero3")
    return names


def _growing(name: str, devices: int, seq_length: int, dtype: str) -> Iterator[RunSpec]:
    """Models of the family that the strategy can split, ever larger: layers in multiples of its stages,
    heads in multiples of TP, whose width keeps the hidden size in proportion."""
    split = parse_strategy(name, devices)
    tensor, pipeline = split.tensor, split.pipeline
    micro_batches = _MICRO_BATCHES_A_STAGE * pipeline if pipeline > 1 else 1
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


def _size(found: LargestModel) -> str:
    if not found.parameters:
        return "none"
    return f"{found.parameters / 1e9:.1f}B ({found.layers} x {found.hidden:,})"


def _table(found: list[LargestModel], title: str) -> Table[tuple[LargestModel, LargestModel]]:
    """A strategy a row: nothing recomputed, whole layers recomputed."""
    columns = (
        Column[tuple[LargestModel, LargestModel]](
            "strategy", lambda pair: pair[0].strategy, right=False
        ),
        Column[tuple[LargestModel, LargestModel]](
            "nothing recomputed", lambda pair: _size(pair[0])
        ),
        Column[tuple[LargestModel, LargestModel]](
            "GiB a rank", lambda pair: gib(pair[0].memory_bytes)
        ),
        Column[tuple[LargestModel, LargestModel]]("layers recomputed", lambda pair: _size(pair[1])),
        Column[tuple[LargestModel, LargestModel]](
            "GiB a rank", lambda pair: gib(pair[1].memory_bytes)
        ),
    )
    pairs = tuple(zip(found[::2], found[1::2], strict=True))
    return Table(columns, pairs, title)


def _draw(found: list[LargestModel], path: Path, where: str) -> None:
    names = [each.strategy for each in found[::2]]
    with svg_figure(path, "largest", 8, 0.8 + 0.45 * len(names)) as figure:
        axes = figure.subplots()
        styles = (("nothing recomputed", "#0072B2"), ("layers recomputed", "#56B4E9"))
        for place, (label, colour) in enumerate(styles):
            sizes = [each.parameters / 1e9 for each in found[place::2]]
            rows = [row + 0.38 * (place - 0.5) for row in range(len(names))]
            bars = axes.barh(rows, sizes, 0.36, color=colour, label=label)
            axes.bar_label(bars, fmt=" {:.1f}B", fontsize=7.5)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("billion parameters")
        axes.set_title(f"The largest model on {where}, by strategy", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
