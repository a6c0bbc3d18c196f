"""What each rank holds: samples and tokens of the batch, weights by component, memory at its fullest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import batched

from parakit.config.run import RunSpec
from parakit.costs import (
    PredictedMemory,
    bytes_per_parameter,
    estimate_rank_memory,
    rank_parameters,
)
from parakit.formatting.units import amount, count
from parakit.site.drawing.sheet import EXACT_BYTES, WIDTH, DrawnRank, Sheet, draw_rank_headings

_LABEL = 108
"""Width of what stands before the ranks' columns."""


@dataclass(frozen=True)
class _Cell:
    """A whole cut into equal parts, and those that a rank holds."""

    text: str
    parts: int = 1
    held: Iterable[int] = (0,)
    cut: str = "columns"
    """`columns`, `rows`, or `both`: of two matrices the first by columns, the second by rows."""
    length: float = 1.0
    """Of what a column has room for."""
    size_bytes: int = 0


@dataclass(frozen=True)
class _Row:
    name: str
    cell: Callable[[DrawnRank], _Cell | None]
    """None where a rank has nothing of it."""


def draw_tensors(spec: RunSpec, ranks: list[DrawnRank], name: str) -> str:
    """The sheet: a column for each rank, a row for each tensor, of which the rank's part is filled."""
    sheet = Sheet(f"{name}-held", f"What each rank holds: {spec.model} as {spec.name}")
    for band in batched(ranks, 4):
        wide = (WIDTH - _LABEL) / len(band)
        draw_rank_headings(sheet, spec.parallelism, band, _LABEL, wide)
        for title, rows in (
            ("the batch", _batch_rows(spec)),
            ("weights it computes with", _weight_rows(spec)),
            ("memory at its fullest, in scale", _state_rows(spec)),
        ):
            sheet.text(0, sheet.y + 12, title, "title")
            sheet.y += 19
            for row in rows:
                _draw_row(sheet, row, band, wide)
        sheet.y += 10
    return sheet.svg()


def _draw_row(sheet: Sheet, row: _Row, ranks: Iterable[DrawnRank], wide: float) -> None:
    top, tall = sheet.y, 14
    sheet.y -= 1
    lines = sheet.lines(0, _LABEL - 8, row.name)
    for column, rank in enumerate(ranks):
        x, cell = _LABEL + wide * column + 4, row.cell(rank)
        if cell is None:
            sheet.text(x + wide / 2 - 4, top + 12, "–", "q", "middle")
            continue
        data = {"rank": rank.number, "holds": cell.size_bytes} if cell.size_bytes else {}
        sheet.open(f"rank {rank.number}, {row.name}: {cell.text}", **data)
        room = min(wide - 8, 100)
        x += (wide - 8 - room) / 2
        width = room * cell.length
        if cell.cut == "both":
            _parts(sheet, x, top, width / 2 - 3, tall, cell, across=False)
            _parts(sheet, x + width / 2 + 3, top, width / 2 - 3, tall, cell, across=True)
        else:
            _parts(sheet, x, top, width, tall, cell, across=cell.cut == "rows")
        sheet.text(
            x + room / 2, top + tall + 10, cell.text, "q" if wide > 70 else "q small", "middle"
        )
        sheet.close()
    sheet.y = top + max(tall + 19, 13 * lines + 5)


def _parts(
    sheet: Sheet, x: float, y: float, wide: float, tall: float, cell: _Cell, across: bool
) -> None:
    sheet.box(x, y, wide, tall, "whole")
    for part in cell.held:
        start, size = part / cell.parts, 1 / cell.parts
        if across:
            sheet.box(x, y + tall * start, wide, tall * size, "held")
        else:
            sheet.box(x + wide * start, y, wide * size, tall, "held")


def _batch_rows(spec: RunSpec) -> Iterator[_Row]:
    split, batch, length = spec.parallelism, spec.batch.global_batch_size, spec.shape.seq_length
    samples = f"{batch // split.data:,} of {batch:,}"
    yield _Row("samples", lambda rank: _Cell(samples, split.data, (rank.data,)))
    tokens, chunks = f"{length // split.context:,} of {length:,}", 2 * split.context
    yield _Row(
        "tokens of each",
        lambda rank: _Cell(tokens, chunks, (rank.context, chunks - 1 - rank.context)),
    )
    if split.sequence_parallel:
        alone = f"{length // split.context // split.tensor:,} of {length // split.context:,}"
        name = "of these in norms and dropouts"
        yield _Row(name, lambda rank: _Cell(alone, split.tensor, (rank.tensor,)))


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
"""Fields of `Parameters`, and how TP cuts them: input projections by columns, output projections and
tables by rows, the others not at all."""


def _weight_rows(spec: RunSpec) -> Iterator[_Row]:
    split = spec.parallelism
    layers = [_layers(spec, stage) for stage in range(split.pipeline)]
    every = sum(map(len, layers))
    yield _Row(
        "layers",
        lambda rank: _Cell(f"{len(layers[rank.stage]):,} of {every:,}", every, layers[rank.stage]),
    )
    stages = [rank_parameters(spec, stage) for stage in range(split.pipeline)]
    for component, (name, cut) in _WEIGHTS.items():
        if any(getattr(parameters, component) for parameters in stages):
            sizes = [
                getattr(each, component) * bytes_per_parameter(spec).weights for each in stages
            ]
            yield _Row(name, partial(_weights, spec, sizes, cut))


def _weights(spec: RunSpec, sizes: list[int], cut: str, rank: DrawnRank) -> _Cell | None:
    size, split = sizes[rank.stage], spec.parallelism
    if not size:
        return None
    if cut == "experts":
        own = spec.shape.experts // split.expert
        held = range(rank.expert * own, (rank.expert + 1) * own)
        return _Cell(_memory(size), spec.shape.experts, held, size_bytes=size)
    parts = split.tensor if cut else 1
    own_part = (rank.tensor,) if cut else (0,)
    return _Cell(_memory(size), parts, own_part, cut or "columns", size_bytes=size)


def _layers(spec: RunSpec, stage: int) -> list[int]:
    """Which layers a stage holds: with virtual stages several stretches of them."""
    found: list[int] = []
    first = 0
    counts = [spec.layers_per_chunk(each) for each in range(spec.parallelism.pipeline)]
    for chunk in zip(*counts, strict=True):
        for each, layers in enumerate(chunk):
            found += range(first, first + layers) if each == stage else ()
            first += layers
    return found


def _state_rows(spec: RunSpec) -> Iterator[_Row]:
    """What a rank has at its fullest, as bars of one scale; in its frame a shard of what is sharded."""
    split, sharding = spec.parallelism, spec.parallelism.sharding
    memory = [estimate_rank_memory(spec, stage) for stage in range(split.pipeline)]
    ranks = split.data * split.context // spec.optimizer_instances
    rows: tuple[tuple[str, Callable[[PredictedMemory], int], bool], ...] = (
        ("weights", lambda of: of.weights, sharding.shards_weights),
        ("gradients", lambda of: of.gradients, sharding.shards_gradients),
        ("optimizer's state", lambda of: of.main_parameters + of.optimizer_state, bool(sharding)),
        ("activations", lambda of: of.activations, False),
    )
    longest = max(
        size(of) * (ranks if is_sharded else 1) for of in memory for _, size, is_sharded in rows
    )

    def cell(size: Callable[[PredictedMemory], int], shards: int, rank: DrawnRank) -> _Cell:
        own, place = size(memory[rank.stage]), rank.data * split.context + rank.context
        length = own * shards / longest
        return _Cell(_memory(own), shards, (place % shards,), length=length)

    for name, size, is_sharded in rows:
        yield _Row(name, partial(cell, size, ranks if is_sharded else 1))


def _memory(size_bytes: int) -> str:
    return f"{count(size_bytes)} B" if size_bytes < EXACT_BYTES else amount(size_bytes)
