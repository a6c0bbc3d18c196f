"""What a command line asks for, carried out: inputs → tokens → data sets."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Self

from rich.console import Console
from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from parakit.artifacts.io import write_record
from parakit.data import (
    Dataset,
    DatasetError,
    RunIdentity,
    bin_path,
    idx_path,
    lock_folder,
    open_dataset,
    publish,
    retire,
    token_dtype,
    working_folder,
)
from parakit.formatting import terminal
from parakit.formatting.units import plural
from tools.preprocess.documents import HARMLESS, Parser, Problem, ProblemKind
from tools.preprocess.encoders import choose_encoder
from tools.preprocess.lines import Block, Slice, lines_before
from tools.preprocess.parts import decoded, join_parts, read_parts, write_parts
from tools.preprocess.pipeline import Encoded, Pipeline, default_threads
from tools.preprocess.source import START, InputStream, Position, PreprocessOptions, open_source
from tools.preprocess.tokenizer import TokenizerSpec, load_tokenizer

ANNOUNCED_BYTES = 64 << 20
"""A document larger than this is announced before it is encoded."""
MEMORY_MULTIPLE = 12
"""Peak memory of such a document, as a multiple of its size; measured, see the README."""
UNBROKEN_MULTIPLE = 40
"""The same for a document without a space or a sign in it: one word of many MiB."""
_NAMED_PROBLEMS = 10
"""Places named for each kind of problem; the others are only counted."""


LINE_SECONDS = 60.0
"""Between two lines where there is no terminal."""


def preprocess(options: PreprocessOptions) -> list[Dataset]:
    """Make a data set for each JSON key, resuming an earlier run that was cut off."""
    spec, source = load_tokenizer(options.tokenizer), open_source(options)
    identity = RunIdentity(
        inputs=source.identities,
        tokenizer=spec.name,
        tokenizer_sha256=spec.sha256,
        vocabulary=spec.vocabulary,
        eod=spec.require_eod() if options.append_eod else None,
        json_keys=options.keys,
        part=str(options.shard),
        shard_bytes=options.part_bytes,
        max_document_bytes=options.max_document_bytes,
    )
    base = options.output_prefix
    prefixes = {key: base.with_name(f"{base.name}_{key}_document") for key in options.keys}
    folder = working_folder(base)
    progress = ProgressLine()
    if options.restart and folder.exists():
        with lock_folder(folder):
            retire(folder)
    if not folder.exists():
        retire(folder)  # what a killed clean-up has left
        if not options.overwrite and (done := _existing(list(prefixes.values()), identity)):
            progress.say("Nothing to do: these data sets are complete and of this very input.")
            return done
    with lock_folder(folder):
        _claim(folder / "run.json", identity)
        _Work(options, spec, source, progress).fill(folder, identity)
        publish(folder, prefixes)
        return [open_dataset(prefix) for prefix in prefixes.values()]


@dataclass(frozen=True)
class _Work:
    """The way from blocks to parts."""

    options: PreprocessOptions
    spec: TokenizerSpec
    source: InputStream
    progress: ProgressLine

    def fill(self, folder: Path, identity: RunIdentity) -> None:
        """Encode what is not yet in parts, and join all of them."""
        parts = read_parts(folder)
        if parts:
            self.progress.say(
                f"Resuming after {plural(len(parts), 'finished part')} of an earlier run."
            )
        start = parts[-1] if parts else START
        parser = Parser(self.options.keys, self.options.max_document_bytes)
        # The samples have no name here: one may be large, and the run would keep it to its end.
        encoder = choose_encoder(
            self.spec, self.source.samples(self.options.cross_check, parser), self.progress.say
        )
        threads = self.options.threads or default_threads()
        dtype = token_dtype(self.spec.vocabulary)
        pipeline = Pipeline(parser, encoder, dtype, identity.eod, threads)
        with self.progress:
            blocks = self._named(start, pipeline.run(self._announced(start)))
            write_parts(folder, parts, blocks, identity, encoder.name)
        join_parts(folder, len(parts), identity)

    def _announced(self, start: Position) -> Iterator[Block]:
        """The blocks to encode; a user hears of a very large one before it takes its memory."""
        for block in self.source.blocks(start):
            if block.size_bytes > ANNOUNCED_BYTES:
                self.progress.say(
                    f"{self.source.slices[block.slice_index].name} has a document of "
                    f"{block.size_bytes >> 20} MiB ending at {block.next_offset}: it takes up to "
                    f"{MEMORY_MULTIPLE} times that in memory ({UNBROKEN_MULTIPLE} times if it is "
                    "one unbroken word); --max-document-mb refuses such."
                )
            yield block

    def _named(
        self, start: Position, blocks: Iterator[Encoded]
    ) -> Iterator[tuple[Position, Encoded]]:
        """The blocks, each with the place where it ends; their problems named by file and line."""
        seen: Counter[str] = Counter()
        place = start
        for encoded in blocks:
            block = encoded.block
            if block.slice_index != place.slice_index:
                place = Position(block.slice_index, 0, 0)
            for row, problem in encoded.problems:
                seen[problem.kind] += 1
                if seen[problem.kind] <= _NAMED_PROBLEMS:
                    self._name(problem, self.source.slices[block.slice_index], place.lines + row)
            place = Position(block.slice_index, block.next_offset, place.lines + encoded.line_count)
            self.progress.add(
                done=block.read_bytes,
                total=self.source.size_bytes,
                text_bytes=block.size_bytes,
                documents=len(encoded.packed[0].index.boundaries) - 1,
                tokens=sum(len(packed.tokens) for packed in encoded.packed),
            )
            yield place, encoded

    def _name(self, problem: Problem, slice_: Slice, line: int) -> None:
        """Print `file:line: what (detail)`, with the line's number in the whole file, or refuse it."""
        where = (
            f":{lines_before(slice_) + line + 1}" if problem.kind != ProblemKind.EMPTY_FILE else ""
        )
        detail = f" ({problem.detail})" if problem.detail else ""
        said = f"{slice_.name}{where}: {problem.kind}{detail}"
        if problem.kind in HARMLESS:
            self.progress.say(f"{said} (noted)")
        elif self.options.on_error == "skip":
            self.progress.say(f"{said} (left out)")
        else:
            raise DatasetError(
                f"{said}; correct it, or leave such documents out with --on-error skip."
            )


def _claim(file: Path, identity: RunIdentity) -> None:
    """Say whose the working folder is."""
    if not file.exists():
        write_record(file, identity, durable=True)
    elif changed := difference(identity, decoded(file, RunIdentity)):
        raise DatasetError(
            f"{file.parent} holds an unfinished run that differs: {changed}; "
            "repeat it as it was, or remove that folder."
        )


def _existing(prefixes: list[Path], identity: RunIdentity) -> list[Dataset]:
    """The data sets, if this very run has been completed before."""
    there = [p for prefix in prefixes for p in (idx_path(prefix), bin_path(prefix)) if p.exists()]
    if not there:
        return []
    remedy = (
        f"remove it ('rm {there[0].with_suffix('')}.*'), or make another (NAME=, --output-prefix)."
    )
    try:
        datasets = [open_dataset(prefix) for prefix in prefixes]
    except DatasetError as error:
        raise DatasetError(
            f"{there[0]} exists already, incomplete: {error} Else {remedy}"
        ) from None
    for dataset in datasets:
        if dataset.manifest is None:
            raise DatasetError(f"{there[0]} exists already and has no manifest; {remedy}")
        if changed := difference(identity, dataset.manifest.identity):
            raise DatasetError(f"{there[0]} exists already, but {changed}; {remedy}")
    return datasets


def difference(ours: RunIdentity, theirs: RunIdentity) -> str | None:
    """Name the first thing two identities differ in, as `what was theirs, now ours`."""
    for (what, was), (_, now) in zip(_facts(theirs), _facts(ours), strict=False):
        if was != now:
            return f"{what} was {shorten(str(was), 200)}, now {shorten(str(now), 200)}"
    return None


def _facts(identity: RunIdentity) -> Iterator[tuple[str, object]]:
    """What a run depends on, under names that a user knows."""
    yield "the input", tuple(input_.name for input_ in identity.inputs)
    for input_ in identity.inputs:
        yield f"input {input_.name}", f"{input_.size_bytes} bytes"
        yield f"the content of input {input_.name}", input_.edges_sha256
        yield f"the time stamp of input {input_.name}", input_.modified_ns
    yield "--tokenizer", identity.tokenizer
    yield "the tokenizer's sha256", identity.tokenizer_sha256
    yield "the vocabulary", identity.vocabulary
    yield "--append-eod (end-of-document id)", identity.eod
    yield "--json-keys", identity.json_keys
    yield "--shard", identity.part
    yield "--commit-mib (in bytes)", identity.shard_bytes
    yield "--max-document-mb (in bytes)", identity.max_document_bytes


class ProgressLine:
    """Counts of this process, without what an earlier one committed; and what a user should know.

    While it is entered, the line is on the terminal, where its last state stays.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._is_terminal = self._console.is_terminal
        columns = (TextColumn("{task.description}"), TaskProgressColumn(), TimeRemainingColumn())
        self._shown = Progress(*columns, console=self._console, disable=not self._is_terminal)
        self._task = self._shown.add_task("", total=None)
        self._start = self._printed = time.monotonic()
        self._text_bytes = self._documents = self._tokens = 0
        self._line = ""

    def __enter__(self) -> Self:
        self._shown.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._shown.stop()
        if kind is None and self._line and not self._is_terminal:
            self.say(self._line)

    def say(self, sentence: str) -> None:
        """Print a sentence on a line of its own."""
        terminal.say(self._console, sentence)

    def add(self, done: int, total: int, text_bytes: int, documents: int, tokens: int) -> None:
        """Count a block, after which so many bytes of the input are done (of 0 if not known)."""
        self._text_bytes += text_bytes
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        rate = self._text_bytes / 1e6 / max(now - self._start, 1e-9)
        line = f"{rate:.1f} MB/s · {self._documents:,} documents · {self._tokens:,} tokens"
        self._shown.update(self._task, completed=done, total=total or None, description=line)
        self._line = line
        if not self._is_terminal and now - self._printed >= LINE_SECONDS:
            self._printed = now
            task = self._shown.tasks[0]
            if task.time_remaining is not None:
                left = timedelta(seconds=round(task.time_remaining))
                line += f" · {task.percentage:.0f}% · {left} left"
            self.say(line)
