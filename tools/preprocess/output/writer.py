"""Filling a workspace: blocks through the pipeline into parts; problems named and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tools.preprocess.encode.encoders import Say
from tools.preprocess.encode.pipeline import Encoded, Pipeline
from tools.preprocess.errors import InputError
from tools.preprocess.input.documents import HARMLESS, Problem, ProblemKind
from tools.preprocess.input.files import Block, Position
from tools.preprocess.input.source import Source
from tools.preprocess.output.workspace import Workspace
from tools.preprocess.progress import Progress, Watch

ANNOUNCED_BYTES = 64 << 20
"""A document larger than this is announced before it is encoded."""
MEMORY_MULTIPLE = 12
"""Peak memory of such a document, as a multiple of its size; measured, see the README."""
UNBROKEN_MULTIPLE = 40
"""The same for a document without a space or a sign in it: one word of many MiB."""
_NAMED_PROBLEMS = 10
"""Places named for each kind of problem; the others are only counted."""


class ProblemReporter:
    """Names problems by file and line, and stops the run at the first that is not to be skipped."""

    def __init__(self, source: Source, start: Position, skip_errors: bool, say: Say) -> None:
        self._source = source
        self._skip_errors = skip_errors
        self._say = say
        self._named: Counter[str] = Counter()
        self._counted_from = start
        self._lines = 0
        self._lines_before: int | None = None
        """Of the slice before `_counted_from`: counted only when a problem asks for it."""

    def report(self, encoded: Encoded) -> None:
        """Name those of a block; blocks have to come in order.

        Raises:
            InputError: A document cannot be used and errors are not to be skipped.
        """
        index = encoded.block.slice_index
        if index != self._counted_from.slice_index:
            self._counted_from = Position(index, self._source.slices[index].start)
            self._lines, self._lines_before = 0, None
        for problem in encoded.problems:
            self._name(problem)
        self._lines += encoded.line_count

    def _name(self, problem: Problem) -> None:
        harmless = problem.kind in HARMLESS
        if not harmless and not self._skip_errors:
            raise InputError(
                f"{self._place(problem)}; correct it, or leave such documents out with "
                "--on-error skip."
            )
        self._named[problem.kind] += 1
        if self._named[problem.kind] <= _NAMED_PROBLEMS:
            self._say(f"{self._place(problem)} ({'noted' if harmless else 'left out'})")

    def _place(self, problem: Problem) -> str:
        name = self._source.slices[self._counted_from.slice_index].name
        if problem.kind is ProblemKind.EMPTY_FILE:
            return f"{name}: {problem.kind}"
        if self._lines_before is None:
            self._lines_before = self._source.lines_before(self._counted_from)
        line = self._lines_before + self._lines + problem.line + 1
        detail = f" ({problem.detail})" if problem.detail else ""
        return f"{name}:{line}: {problem.kind}{detail}"


def fill(
    workspace: Workspace,
    source: Source,
    pipeline: Pipeline,
    skip_errors: bool,
    say: Say,
    progress: Progress,
    watch: Watch,
) -> None:
    """Encode what is not yet committed, up to the input's end.

    Raises:
        InputError: A document cannot be used and errors are not to be skipped.
    """
    if workspace.has_all_input:
        return
    start = workspace.parts[-1].end if workspace.parts else source.start
    reporter = ProblemReporter(source, start, skip_errors, say)
    for encoded in pipeline.run(_read(source, start, say, progress)):
        reporter.report(encoded)
        with progress.clock("writing"):
            workspace.append(encoded)
        progress.add(
            done_bytes=encoded.block.read_bytes,
            text_bytes=encoded.block.size_bytes,
            documents=len(encoded.packed[0].counts),
            tokens=sum(len(packed.tokens) for packed in encoded.packed),
        )
        watch(progress)
    with progress.clock("writing"):
        workspace.commit(final=True)
    watch(progress)


def _read(source: Source, start: Position, say: Say, progress: Progress) -> Iterator[Block]:
    blocks = source.blocks(start)
    while True:
        with progress.clock("reading"):
            block = next(blocks, None)
        if block is None:
            return
        if block.size_bytes > ANNOUNCED_BYTES:
            say(
                f"{source.slices[block.slice_index].name} has a document of "
                f"{block.size_bytes >> 20} MiB ending at {block.next_offset}: it takes up to "
                f"{MEMORY_MULTIPLE} times that in memory ({UNBROKEN_MULTIPLE} times if it is "
                "one unbroken word); --max-document-mb refuses such."
            )
        yield block
