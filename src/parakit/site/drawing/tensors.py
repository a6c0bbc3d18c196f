"""Draw what each rank holds: samples and tokens of the batch, weights by component, memory at its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import batched
from operator import attrgetter

from parakit.config.run import RunSpec
from parakit.costs import (
    PredictedMemory,
    bytes_per_parameter,
    estimate_rank_memory,
    rank_parameters,
)
from parakit.formatting.units import amount, count
from parakit.site.drawing.sheet import EXACT_BYTES, WIDTH, DrawnRank, Sheet, draw_rank_headings

_LABEL_WIDTH = 108
"""Width of the labels to the left of the ranks' columns."""
_RANKS_PER_BAND = 4
"""The most ranks side by side. Further ranks are drawn below."""
_CELL_WIDTH, _CELL_HEIGHT = 100, 14
"""The largest width of a tensor's box, and its height."""


@dataclass(frozen=True)
class _TensorBox:
    """A tensor that is cut into equal parts, and the parts that a rank holds."""

    text: str
    parts: int = 1
    held: Iterable[int] = (0,)
    """Numbers of the parts that the rank holds."""
    cut: str = "columns"
    """`columns`, `rows`, or `both`: of two matrices the first by columns and the second by rows."""
    length: float = 1.0
    """The box's width as a fraction of the largest width."""
    size_bytes: int = 0
    """Bytes that the rank holds; 0 if they are not to be added up."""


@dataclass(frozen=True)
class _TensorRow:
    """A row of the sheet: a tensor, with a box per rank."""

    name: str
    make_box: Callable[[DrawnRank], _TensorBox | None]
    """Returns the box of a rank; None if the rank holds nothing of the tensor."""


@dataclass(frozen=True)
class _MemoryComponent:
    """A component of a rank's memory, such as its gradients."""

    name: str
    get_bytes: Callable[[PredictedMemory], int]
    """Returns the bytes of the component on one rank."""
    shards: int
    """Ranks that share the component; 1 if every rank holds all of it."""


def draw_tensors(spec: RunSpec, ranks: list[DrawnRank], name: str) -> str:
    """Return the sheet as SVG: a column per rank, and a row per tensor with the rank's part filled.

    Args:
        spec: The run.
        ranks: The ranks to draw.
        name: The prefix of the sheet's id.
    """
    sheet = Sheet(f"{name}-held", f"What each rank holds: {spec.model} as {spec.name}")
    for band in batched(ranks, _RANKS_PER_BAND):
        wide = (WIDTH - _LABEL_WIDTH) / len(band)
        draw_rank_headings(sheet, spec.parallelism, band, _LABEL_WIDTH, wide)
        for title, rows in (
            ("the batch", _batch_rows(spec)),
            ("weights it computes with", _weight_rows(spec)),
            ("memory at its peak, in scale", _memory_rows(spec)),
        ):
            sheet.draw_text(0, sheet.y + 12, title, "title")
            sheet.y += 19
            for row in rows:
                _draw_row(sheet, row, band, wide)
        sheet.y += 10
    return sheet.to_svg()


def _draw_row(sheet: Sheet, row: _TensorRow, ranks: Iterable[DrawnRank], wide: float) -> None:
    """Draw the label of a row and the box of each rank, and move the sheet's `y` below the row."""
    top = sheet.y
    sheet.y -= 1
    num_lines = sheet.draw_wrapped_text(0, _LABEL_WIDTH - 8, row.name)
    for column, rank in enumerate(ranks):
        left_edge = _LABEL_WIDTH + wide * column
        box = row.make_box(rank)
        if box is None:
            sheet.draw_text(left_edge + wide / 2, top + 12, "–", "q", "middle")
            continue
        data = {"rank": rank.number, "holds": box.size_bytes} if box.size_bytes else {}
        sheet.begin_group(f"rank {rank.number}, {row.name}: {box.text}", **data)
        _draw_tensor_box(sheet, box, left_edge, top, wide)
        sheet.end_group()
    box_height = _CELL_HEIGHT + 19  # With the text below the box.
    label_height = 13 * num_lines + 5
    sheet.y = top + max(box_height, label_height)


def _draw_tensor_box(
    sheet: Sheet, box: _TensorBox, left_edge: float, top: float, wide: float
) -> None:
    """Draw a tensor's box in the middle of a column that begins at `left_edge`, and its text below."""
    column_width = wide - 8  # A gap of 4 on both sides.
    room = min(column_width, _CELL_WIDTH)
    x = left_edge + 4 + (column_width - room) / 2
    width = room * box.length
    if box.cut == "both":
        matrix_width = width / 2 - 3
        _draw_parts(sheet, box, x, top, matrix_width, cut_rows=False)
        _draw_parts(sheet, box, x + width / 2 + 3, top, matrix_width, cut_rows=True)
    else:
        _draw_parts(sheet, box, x, top, width, cut_rows=box.cut == "rows")
    kind = "q" if wide > 70 else "q small"
    sheet.draw_text(x + room / 2, top + _CELL_HEIGHT + 10, box.text, kind, "middle")


def _draw_parts(
    sheet: Sheet, box: _TensorBox, x: float, y: float, wide: float, *, cut_rows: bool
) -> None:
    """Draw the frame of a tensor at (x, y), and fill the parts that a rank holds.

    `cut_rows` is True if the tensor is cut into rows, and False if it is cut into columns.
    """
    sheet.draw_box(x, y, wide, _CELL_HEIGHT, "whole")
    for part in box.held:
        start, size = part / box.parts, 1 / box.parts
        if cut_rows:
            sheet.draw_box(x, y + _CELL_HEIGHT * start, wide, _CELL_HEIGHT * size, "held")
        else:
            sheet.draw_box(x + wide * start, y, wide * size, _CELL_HEIGHT, "held")


def _batch_rows(spec: RunSpec) -> Iterator[_TensorRow]:
    """Yield the drawing's rows on the batch: samples, tokens per sample, and the tokens that SP splits further.

    With CP, a rank holds two chunks of a sample: one from the front and one from the back.
    """
    split, batch, length = spec.parallelism, spec.batch.global_batch_size, spec.shape.seq_length
    samples = f"{batch // split.data:,} of {batch:,}"
    yield _TensorRow("samples", lambda rank: _TensorBox(samples, split.data, (rank.data,)))
    rank_tokens, chunks = length // split.context, 2 * split.context
    tokens = f"{rank_tokens:,} of {length:,}"
    yield _TensorRow(
        "tokens of each",
        lambda rank: _TensorBox(tokens, chunks, (rank.context, chunks - 1 - rank.context)),
    )
    if split.sequence_parallel:
        split_tokens = f"{rank_tokens // split.tensor:,} of {rank_tokens:,}"
        name = "of these in norms and dropouts"
        yield _TensorRow(name, lambda rank: _TensorBox(split_tokens, split.tensor, (rank.tensor,)))


_WEIGHTS = {
    "word_embedding": ("word embedding", "rows"),
    "position_embedding": ("positions", ""),
    "norms": ("norms", ""),
    "attention": ("attention: in, out", "both"),
    "dense_mlp": ("MLP: in, out", "both"),
    "router": ("router", ""),
    "experts": ("experts", "experts"),
    "output_layer": ("output layer", "rows"),
}
"""Label and cut of each component, by field of `Parameters`.

TP cuts input projections by columns, output projections and tables by rows, and the others not at all. EP cuts
experts.
"""


def _weight_rows(spec: RunSpec) -> Iterator[_TensorRow]:
    """Yield the drawing's rows on the weights: layers, and each component that some stage has."""
    stages = range(spec.parallelism.pipeline)
    layers_by_stage = [_list_layers(spec, stage) for stage in stages]
    num_layers = sum(map(len, layers_by_stage))

    def make_layer_box(rank: DrawnRank) -> _TensorBox:
        layers = layers_by_stage[rank.stage]
        return _TensorBox(f"{len(layers):,} of {num_layers:,}", num_layers, layers)

    yield _TensorRow("layers", make_layer_box)
    parameters_by_stage = [rank_parameters(spec, stage) for stage in stages]
    bytes_per_weight = bytes_per_parameter(spec).weights
    for component, (label, cut) in _WEIGHTS.items():
        bytes_by_stage = []
        for parameters in parameters_by_stage:
            bytes_by_stage.append(getattr(parameters, component) * bytes_per_weight)
        if any(bytes_by_stage):
            yield _TensorRow(label, partial(_make_weight_box, spec, bytes_by_stage, cut))


def _make_weight_box(
    spec: RunSpec, bytes_by_stage: list[int], cut: str, rank: DrawnRank
) -> _TensorBox | None:
    """Return the box of one component of the weights; None if the rank's stage does not have this component."""
    size_bytes, split = bytes_by_stage[rank.stage], spec.parallelism
    if not size_bytes:
        return None
    text = _format_bytes(size_bytes)
    if cut == "experts":
        num_experts = spec.shape.experts
        experts_per_rank = num_experts // split.expert
        first = rank.expert * experts_per_rank
        held = range(first, first + experts_per_rank)
        return _TensorBox(text, num_experts, held, size_bytes=size_bytes)
    if not cut:
        return _TensorBox(text, size_bytes=size_bytes)
    return _TensorBox(text, split.tensor, (rank.tensor,), cut, size_bytes=size_bytes)


def _list_layers(spec: RunSpec, stage: int) -> list[int]:
    """Return the numbers of the layers on a stage. With virtual stages, they are not consecutive."""
    stages = range(spec.parallelism.pipeline)
    chunk_layers_by_stage = [spec.layers_per_chunk(number) for number in stages]
    layers: list[int] = []
    first = 0
    for layers_by_stage in zip(*chunk_layers_by_stage, strict=True):
        for number, num_layers in enumerate(layers_by_stage):
            if number == stage:
                layers += range(first, first + num_layers)
            first += num_layers
    return layers


def _memory_rows(spec: RunSpec) -> Iterator[_TensorRow]:
    """Yield the drawing's rows on a rank's memory at its peak, all to the same scale.

    The frame of a sharded component is as long as the component on all ranks together. The rank's shard is
    filled.
    """
    split = spec.parallelism
    memory_by_stage = [estimate_rank_memory(spec, stage) for stage in range(split.pipeline)]
    components = _list_memory_components(spec)
    longest = 0
    for memory in memory_by_stage:
        for component in components:
            longest = max(longest, component.get_bytes(memory) * component.shards)

    def make_box(component: _MemoryComponent, rank: DrawnRank) -> _TensorBox:
        size_bytes = component.get_bytes(memory_by_stage[rank.stage])
        shard = (rank.data * split.context + rank.context) % component.shards
        length = size_bytes * component.shards / longest
        return _TensorBox(_format_bytes(size_bytes), component.shards, (shard,), length=length)

    for component in components:
        yield _TensorRow(component.name, partial(make_box, component))


def _list_memory_components(spec: RunSpec) -> list[_MemoryComponent]:
    """Return the components of a rank's memory, each with the number of ranks over which it is sharded."""
    split, sharding = spec.parallelism, spec.parallelism.sharding
    shard_ranks = split.data * split.context // spec.optimizer_instances
    weight_shards = shard_ranks if sharding.shards_weights else 1
    gradient_shards = shard_ranks if sharding.shards_gradients else 1
    state_shards = shard_ranks if sharding else 1

    def get_state_bytes(memory: PredictedMemory) -> int:
        return memory.main_parameters + memory.optimizer_state

    return [
        _MemoryComponent("weights", attrgetter("weights"), weight_shards),
        _MemoryComponent("gradients", attrgetter("gradients"), gradient_shards),
        _MemoryComponent("optimizer's state", get_state_bytes, state_shards),
        _MemoryComponent("activations", attrgetter("activations"), shards=1),
    ]


def _format_bytes(size_bytes: int) -> str:
    """Return a size with all digits if it is small, else with a binary unit."""
    return f"{count(size_bytes)} B" if size_bytes < EXACT_BYTES else amount(size_bytes)
