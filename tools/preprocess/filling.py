"""Filling a workspace: blocks through the pipeline, shards committed, problems told and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tools.preprocess.documents import HARMLESS, Kind, Problem
from tools.preprocess.encoders import Say
from tools.preprocess.errors import InputError
from tools.preprocess.inputs import Block
from tools.preprocess.pipeline import Encoded, Pipeline
from tools.preprocess.source import Source
from tools.preprocess.workspace import Position, Workspace

ANNOUNCED_BYTES = 64 << 20
"""A document larger than this is told of before it is encoded."""
MEMORY_MULTIPLE = 12
"""Peak memory of such a document, as a multiple of its size; measured, see the README."""
UNBROKEN_MULTIPLE = 40
"""The same for a document without a space or a sign in it: one word of many MiB."""
_NAMED_PROBLEMS = 10
"""Places named for each kind of problem; the others are only counted."""


@dataclass
class Progress:
    """How far a run is; counts are of this process, without what an earlier one committed."""

    total_bytes: int
    """Of the input as stored; 0 if not known."""
    done_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"reading": 0.0, "encoding": 0.0, "writing": 0.0}
    )
    """Processor time by stage."""


Watch = Callable[[Progress], None]


class Filling:
    """Encodes what is not yet committed."""

    def __init__(self, workspace: Workspace, source: Source, skip_errors: bool, say: Say) -> None:
        self._workspace = workspace
        self._source = source
        self._skip_errors = skip_errors
        self._say = say
        self._problems: Counter[str] = Counter()
        self._named: Counter[str] = Counter()
        self._uncommitted_bytes = 0
        self._lines = _Lines(source)

    def run(self, pipeline: Pipeline, shard_bytes: int, watch: Watch) -> None:
        """Fill the workspace up to the input's end.

        Raises:
            InputError: A document cannot be used and errors are not to be skipped.
        """
        done = self._workspace.shards[-1] if self._workspace.shards else None
        if done is not None and done.final:
            return
        end = done.end if done else Position(0, _first_offset(self._source))
        self._lines.start(end)
        progress = Progress(self._source.size_bytes)
        before = sum(s.size_bytes for s in self._source.slices[: end.slice_index])
        for encoded in pipeline.run(self._read(end, progress)):
            self._account(encoded)
            with _clock(progress, "writing"):
                self._workspace.append(encoded.packed)
            end = Position(encoded.slice_index, encoded.block.next_offset)
            if self._uncommitted_bytes >= shard_bytes:
                with _clock(progress, "writing"):
                    self._commit(end, final=False)
            before = sum(s.size_bytes for s in self._source.slices[: encoded.slice_index])
            _advance(progress, encoded, before)
            watch(progress)
        self._commit(end, final=True)
        watch(progress)

    def _read(self, start: Position, progress: Progress) -> Iterator[tuple[int, Block]]:
        blocks = self._source.blocks(start.slice_index, start.offset)
        while True:
            with _clock(progress, "reading"):
                found = next(blocks, None)
            if found is None:
                return
            index, block = found
            if block.size_bytes > ANNOUNCED_BYTES:
                self._say(
                    f"{self._source.slices[index].name} has a document of "
                    f"{block.size_bytes >> 20} MiB ending at {block.next_offset}: it takes up to "
                    f"{MEMORY_MULTIPLE} times that in memory ({UNBROKEN_MULTIPLE} times if it is "
                    "one unbroken word); --max-document-mb refuses such."
                )
            yield found

    def _commit(self, end: Position, final: bool) -> None:
        self._workspace.commit(end, self._uncommitted_bytes, dict(self._problems), final)
        self._problems.clear()
        self._uncommitted_bytes = 0

    def _account(self, encoded: Encoded) -> None:
        self._uncommitted_bytes += encoded.block.size_bytes
        problems = list(encoded.documents.problems)
        for packed in encoded.packed:
            for index in (packed.counts == 0).nonzero()[0].tolist():
                problems.append(Problem(Kind.EMPTY_DOCUMENT, encoded.documents.lines[index]))
        for problem in problems:
            self._meet(encoded, problem)
        self._lines.passed(encoded)

    def _meet(self, encoded: Encoded, problem: Problem) -> None:
        self._problems[problem.kind] += 1
        harmless = problem.kind in HARMLESS
        if harmless or self._skip_errors:
            self._named[problem.kind] += 1
            if self._named[problem.kind] <= _NAMED_PROBLEMS:
                what = "noted" if harmless else "left out"
                self._say(f"{self._place(encoded, problem)} ({what})")
            return
        raise InputError(
            f"{self._place(encoded, problem)}; mend it, or leave such documents out with "
            "--on-error skip."
        )

    def _place(self, encoded: Encoded, problem: Problem) -> str:
        name = self._source.slices[encoded.slice_index].name
        detail = f" ({problem.detail})" if problem.detail else ""
        if problem.kind is Kind.EMPTY_FILE:
            return f"{name}: {problem.kind}"
        line = self._lines.before(encoded) + problem.line + 1
        return f"{name}:{line}: {problem.kind}{detail}"


class _Lines:
    """Numbers lines of the slice being read; counted from the input's start only when asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._slice = 0
        self._start = 0
        self._base: int | None = 0
        self._since = 0

    def start(self, position: Position) -> None:
        """Go on from a position."""
        self._slice, self._start = position.slice_index, position.offset
        self._base, self._since = (None if position.offset else 0), 0

    def before(self, encoded: Encoded) -> int:
        """Lines before a block, which is the next one to be passed."""
        self._enter(encoded.slice_index)
        if self._base is None:
            self._base = self._source.lines_before(self._slice, self._start)
        return self._base + self._since

    def passed(self, encoded: Encoded) -> None:
        """Go past a block."""
        self._enter(encoded.slice_index)
        self._since += encoded.documents.line_count

    def _enter(self, index: int) -> None:
        if index != self._slice:
            self.start(Position(index, self._source.slices[index].start))


class _clock:  # noqa: N801 - used as a verb
    """Adds the processor time of a block of code to a stage."""

    def __init__(self, progress: Progress, stage: str) -> None:
        self._seconds, self._stage = progress.seconds, stage

    def __enter__(self) -> None:
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._stage] += time.thread_time() - self._start


def _first_offset(source: Source) -> int:
    return source.slices[0].start if source.slices else 0


def _advance(progress: Progress, encoded: Encoded, before: int) -> None:
    progress.done_bytes = before + encoded.block.read_bytes
    progress.text_bytes += encoded.block.size_bytes
    progress.documents += len(encoded.documents.lines)
    progress.tokens += sum(len(packed.tokens) for packed in encoded.packed)
    progress.seconds["reading"] += encoded.parse_seconds
    progress.seconds["encoding"] += encoded.encode_seconds
