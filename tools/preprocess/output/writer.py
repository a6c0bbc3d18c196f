"""Filling a workspace: blocks through the pipeline, parts committed, problems named and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tools.preprocess.encode.encoders import Say
from tools.preprocess.encode.pipeline import Encoded, Pipeline
from tools.preprocess.errors import InputError
from tools.preprocess.input.documents import HARMLESS, Problem, ProblemKind
from tools.preprocess.input.files import Block
from tools.preprocess.input.source import Source
from tools.preprocess.output.workspace import Position, Workspace

ANNOUNCED_BYTES = 64 << 20
"""A document larger than this is announced before it is encoded."""
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
    first_bytes: int | None = None
    """What was done at the first block: an earlier process did the most of that."""
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"reading": 0.0, "encoding": 0.0, "writing": 0.0}
    )
    """Processor time by stage."""

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Add the processor time of a block of code to a stage."""
        start = time.thread_time()
        yield
        self.seconds[stage] += time.thread_time() - start

    def add(self, encoded: Encoded, done_bytes: int) -> None:
        """Count a block, after which so much of the input is done."""
        self.done_bytes = done_bytes
        if self.first_bytes is None:
            self.first_bytes = done_bytes
        self.text_bytes += encoded.block.size_bytes
        self.documents += len(encoded.documents.lines)
        self.tokens += sum(len(packed.tokens) for packed in encoded.packed)
        self.seconds["reading"] += encoded.parse_seconds
        self.seconds["encoding"] += encoded.encode_seconds

    def describe(self, seconds: float) -> str:
        """Rates and counts, such as `142.1 MB/s · 1,234 documents · 567,890 tokens`."""
        rate = self.text_bytes / 1e6 / max(seconds, 1e-9)
        return f"{rate:.1f} MB/s · {self.documents:,} documents · {self.tokens:,} tokens"


Watch = Callable[[Progress], None]


class DatasetWriter:
    """Encodes what is not yet committed."""

    def __init__(self, workspace: Workspace, source: Source, skip_errors: bool, say: Say) -> None:
        self._workspace = workspace
        self._source = source
        self._skip_errors = skip_errors
        self._say = say
        self._problems: Counter[str] = Counter()
        self._named: Counter[str] = Counter()
        self._uncommitted_bytes = 0
        first = source.slices[0].start if source.slices else 0
        self._end = workspace.parts[-1].end if workspace.parts else Position(0, first)
        self._counted_from = self._end
        self._lines = 0
        self._lines_before: int | None = None
        """Of the slice before `_counted_from`: counted only when a problem asks for it."""

    def run(self, pipeline: Pipeline, part_bytes: int, progress: Progress, watch: Watch) -> None:
        """Fill the workspace up to the input's end.

        Raises:
            InputError: A document cannot be used and errors are not to be skipped.
        """
        if self._workspace.parts and self._workspace.parts[-1].final:
            return
        for encoded in pipeline.run(self._read(progress)):
            self._account(encoded)
            with progress.clock("writing"):
                self._workspace.append(encoded.packed)
            self._end = Position(encoded.slice_index, encoded.block.next_offset)
            if self._uncommitted_bytes >= part_bytes or self._workspace.is_part_full:
                with progress.clock("writing"):
                    self._commit(final=False)
            before = self._source.slices[: encoded.slice_index]
            progress.add(encoded, sum(s.size_bytes for s in before) + encoded.block.read_bytes)
            watch(progress)
        with progress.clock("writing"):
            self._commit(final=True)
        watch(progress)

    def _read(self, progress: Progress) -> Iterator[tuple[int, Block]]:
        blocks = self._source.blocks(self._end.slice_index, self._end.offset)
        while True:
            with progress.clock("reading"):
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

    def _commit(self, final: bool) -> None:
        self._workspace.commit(self._end, self._problems, final)
        self._problems.clear()
        self._uncommitted_bytes = 0

    def _account(self, encoded: Encoded) -> None:
        if encoded.slice_index != self._counted_from.slice_index:
            start = self._source.slices[encoded.slice_index].start
            self._counted_from = Position(encoded.slice_index, start)
            self._lines, self._lines_before = 0, None
        for problem in encoded.documents.problems:
            self._handle_problem(encoded, problem)
        for packed in encoded.packed:
            for index in (packed.counts == 0).nonzero()[0].tolist():
                line = encoded.documents.lines[index]
                self._handle_problem(encoded, Problem(ProblemKind.EMPTY_DOCUMENT, line))
        self._uncommitted_bytes += encoded.block.size_bytes
        self._lines += encoded.documents.line_count

    def _handle_problem(self, encoded: Encoded, problem: Problem) -> None:
        self._problems[problem.kind] += 1
        harmless = problem.kind in HARMLESS
        if not harmless and not self._skip_errors:
            raise InputError(
                f"{self._place(encoded, problem)}; correct it, or leave such documents out with "
                "--on-error skip."
            )
        self._named[problem.kind] += 1
        if self._named[problem.kind] <= _NAMED_PROBLEMS:
            what = "noted" if harmless else "left out"
            self._say(f"{self._place(encoded, problem)} ({what})")

    def _place(self, encoded: Encoded, problem: Problem) -> str:
        name = self._source.slices[encoded.slice_index].name
        if problem.kind is ProblemKind.EMPTY_FILE:
            return f"{name}: {problem.kind}"
        if self._lines_before is None:
            start = self._counted_from
            self._lines_before = self._source.lines_before(start.slice_index, start.offset)
        line = self._lines_before + self._lines + problem.line + 1
        detail = f" ({problem.detail})" if problem.detail else ""
        return f"{name}:{line}: {problem.kind}{detail}"
