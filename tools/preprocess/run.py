"""Make data sets from inputs: find the inputs, encode their documents, write and publish the data sets."""

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
from tools.preprocess.documents import ADVICE, HARMLESS, Parser, Problem, ProblemKind
from tools.preprocess.encoders import choose_encoder
from tools.preprocess.lines import Block, Slice, lines_before
from tools.preprocess.parts import decoded, join_parts, read_parts, write_parts
from tools.preprocess.pipeline import Encoded, Pipeline, default_threads
from tools.preprocess.source import START, InputStream, Position, PreprocessOptions, open_source
from tools.preprocess.tokenizer import TokenizerSpec, load_tokenizer

ANNOUNCED_BYTES = 64 << 20
"""Bytes from which a document is announced before it is encoded."""
MEMORY_MULTIPLE = 12
"""Peak memory of such a document over its size, as measured (see the README)."""
UNBROKEN_MULTIPLE = 40
"""Peak memory over size of a document without spaces and punctuation: one word of many MiB."""
_NAMED_PROBLEMS = 10
"""Problems of each kind that are printed; further ones are only counted."""


LINE_SECONDS = 60.0
"""Seconds between two progress lines if there is no terminal."""


def preprocess(options: PreprocessOptions) -> list[Dataset]:
    """Make one data set per JSON key from the input files, and return the data sets.

    An earlier run that was cut off is resumed, unless `options.restart` is set. If data sets with the same inputs and
    settings are complete already, they are returned without further work, unless `options.overwrite` is set.

    Raises:
        DatasetError: An input or option is wrong, or the output exists and differs.
    """
    spec, source = load_tokenizer(options.tokenizer), open_source(options)
    identity = _make_identity(options, spec, source)
    base = options.output_prefix
    prefixes = {key: base.with_name(f"{base.name}_{key}_document") for key in options.keys}
    folder = working_folder(base)
    progress = ProgressLine()
    if options.restart and folder.exists():
        with lock_folder(folder):
            retire(folder)
    if not folder.exists():
        retire(folder)  # A clean-up that was killed may have left files.
        completed: list[Dataset] = []
        if not options.overwrite:
            completed = _find_completed(list(prefixes.values()), identity)
        if completed:
            progress.say("Nothing to do: these data sets are complete and of this very input.")
            return completed
    with lock_folder(folder):
        _claim_folder(folder / "run.json", identity)
        _PartWriter(options, spec, source, progress).fill(folder, identity)
        publish(folder, prefixes)
        return [open_dataset(prefix) for prefix in prefixes.values()]


def _make_identity(
    options: PreprocessOptions, spec: TokenizerSpec, source: InputStream
) -> RunIdentity:
    """Return all inputs and settings that decide the bytes of the data sets."""
    return RunIdentity(
        inputs=source.identities,
        tokenizer=spec.name,
        tokenizer_sha256=spec.sha256,
        vocabulary=spec.vocabulary,
        eod=spec.require_eod() if options.append_eod else None,
        json_keys=options.keys,
        part=str(options.shard),
        shard_bytes=options.part_bytes,
        max_document_bytes=options.max_document_bytes,
        text_documents=options.text_documents.value if source.has_plain_text else None,
    )


@dataclass(frozen=True)
class _PartWriter:
    """Writer that encodes the blocks of an input into the parts of a run."""

    options: PreprocessOptions
    spec: TokenizerSpec
    source: InputStream
    progress: ProgressLine

    def fill(self, folder: Path, identity: RunIdentity) -> None:
        """Encode the rest of the input, which no part has yet, and join all parts into data sets in `folder`."""
        parts = read_parts(folder)
        if parts:
            self.progress.say(
                f"Resuming after {plural(len(parts), 'finished part')} of an earlier run."
            )
        start = parts[-1] if parts else START
        parser = Parser(self.options.keys, self.options.max_document_bytes)
        # No variable holds the samples: they may be large, and would stay in memory until the run ends.
        encoder = choose_encoder(
            self.spec, self.source.samples(self.options.cross_check, parser), self.progress.say
        )
        threads = self.options.threads or default_threads()
        dtype = token_dtype(self.spec.vocabulary)
        pipeline = Pipeline(parser, encoder, dtype, identity.eod, threads)
        with self.progress:
            blocks = self._locate_blocks(start, pipeline.run(self._announce_blocks(start)))
            write_parts(folder, parts, blocks, identity, encoder.name)
        join_parts(folder, len(parts), identity)

    def _announce_blocks(self, start: Position) -> Iterator[Block]:
        """Yield the blocks of the input from `start` on.

        Before a block with a document of more than ANNOUNCED_BYTES, print a message on the memory that it will take.
        """
        for block in self.source.blocks(start):
            if block.size_bytes > ANNOUNCED_BYTES:
                self.progress.say(
                    f"{self.source.slices[block.slice_index].name} has a document of "
                    f"{block.size_bytes >> 20} MiB ending at {block.next_offset}: it takes up to "
                    f"{MEMORY_MULTIPLE} times that in memory ({UNBROKEN_MULTIPLE} times if it is "
                    "one unbroken word); --max-document-mb refuses such."
                )
            yield block

    def _locate_blocks(
        self, start: Position, blocks: Iterator[Encoded]
    ) -> Iterator[tuple[Position, Encoded]]:
        """Yield the encoded blocks, each with the position at which it ends.

        Problems are printed with file and line, and the progress line is updated.

        Raises:
            DatasetError: A document has a problem, and --on-error is not `skip`.
        """
        count_by_kind: Counter[str] = Counter()
        position = start
        for encoded in blocks:
            block = encoded.block
            if block.slice_index != position.slice_index:
                position = Position(block.slice_index, 0, 0)
            slice_ = self.source.slices[block.slice_index]
            for row, problem in encoded.problems:
                count_by_kind[problem.kind] += 1
                if count_by_kind[problem.kind] <= _NAMED_PROBLEMS:
                    self._print_problem(problem, slice_, line=position.lines + row)
            lines = position.lines + encoded.line_count
            position = Position(block.slice_index, block.next_offset, lines)
            self.progress.add(
                done=block.read_bytes,
                total=self.source.size_bytes,
                text_bytes=block.size_bytes,
                documents=len(encoded.packed[0].index.boundaries) - 1,
                tokens=sum(len(packed.tokens) for packed in encoded.packed),
            )
            yield position, encoded

    def _print_problem(self, problem: Problem, slice_: Slice, line: int) -> None:
        """Print a problem as `file:line: kind (detail)`.

        Args:
            problem: The problem.
            slice_: Slice of the input that has the document.
            line: Line in the slice, from 0. The printed line is counted from the start of the file.

        Raises:
            DatasetError: The problem is not harmless, and --on-error is not `skip`.
        """
        location = slice_.name
        if problem.kind != ProblemKind.EMPTY_FILE:
            location += f":{lines_before(slice_) + line + 1}"
        detail = f" ({problem.detail})" if problem.detail else ""
        text = f"{location}: {problem.kind}{detail}"
        if problem.kind in HARMLESS:
            self.progress.say(f"{text} (noted)")
        elif self.options.on_error == "skip":
            self.progress.say(f"{text} (left out)")
        else:
            advice = ADVICE.get(
                problem.kind, "correct it, or leave such documents out with --on-error skip"
            )
            raise DatasetError(f"{text}; {advice}.")


def _claim_folder(file: Path, identity: RunIdentity) -> None:
    """Write the run's identity into its working folder, or check that the folder belongs to the run.

    Raises:
        DatasetError: The folder belongs to a run that differs.
    """
    if not file.exists():
        write_record(file, identity, durable=True)
        return
    difference = find_difference(identity, decoded(file, RunIdentity))
    if difference:
        raise DatasetError(
            f"{file.parent} holds an unfinished run that differs: {difference}; "
            "repeat it as it was, or remove that folder."
        )


def _find_completed(prefixes: list[Path], identity: RunIdentity) -> list[Dataset]:
    """Return the data sets of an earlier run that has the same identity and was completed.

    The list is empty if none of the files exists.

    Raises:
        DatasetError: Files exist that are incomplete, or that another run made.
    """
    paths = [file_path(prefix) for prefix in prefixes for file_path in (idx_path, bin_path)]
    existing = [path for path in paths if path.exists()]
    if not existing:
        return []
    first = existing[0]
    remedy = (
        f"remove it ('rm {first.with_suffix('')}.*'), or make another (NAME=, --output-prefix)."
    )
    try:
        datasets = [open_dataset(prefix) for prefix in prefixes]
    except DatasetError as error:
        raise DatasetError(f"{first} exists already, incomplete: {error} Else {remedy}") from None
    for dataset in datasets:
        if dataset.manifest is None:
            raise DatasetError(f"{first} exists already and has no manifest; {remedy}")
        difference = find_difference(identity, dataset.manifest.identity)
        if difference:
            raise DatasetError(f"{first} exists already, but {difference}; {remedy}")
    return datasets


def find_difference(ours: RunIdentity, theirs: RunIdentity) -> str | None:
    """Return the first difference of two identities, as `NAME was OLD, now NEW`, or None if they are equal.

    Args:
        ours: The new identity.
        theirs: The old identity.
    """
    # The first fact is the list of inputs. If it is equal, both identities have the same facts.
    for (name, was), (_, now) in zip(_list_facts(theirs), _list_facts(ours), strict=False):
        if was != now:
            return f"{name} was {shorten(str(was), 200)}, now {shorten(str(now), 200)}"
    return None


def _list_facts(identity: RunIdentity) -> Iterator[tuple[str, object]]:
    """Yield pairs of name and value for all inputs and settings that a run depends on.

    The names are for error messages, such as "--tokenizer".
    """
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
    yield "--txt-documents", identity.text_documents


class ProgressLine:
    """Progress line with the counts of this process. Documents that an earlier process encoded are not counted.

    Used as a context manager, it shows the line on the terminal, where the last state remains. Without a terminal it
    prints a new line every LINE_SECONDS.
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
        """Add the counts of a block and update the line.

        Args:
            done: Bytes of the input on the disk that have been read, from the start of the input.
            total: Bytes of the input on the disk, or 0 if unknown.
            text_bytes: Bytes of text in the block.
            documents: Documents in the block.
            tokens: Tokens of the block, over all keys.
        """
        self._text_bytes += text_bytes
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        elapsed_seconds = max(now - self._start, 1e-9)
        megabytes_per_second = self._text_bytes / 1e6 / elapsed_seconds
        line = (
            f"{megabytes_per_second:.1f} MB/s · {plural(self._documents, 'document')} · "
            f"{plural(self._tokens, 'token')}"
        )
        self._shown.update(self._task, completed=done, total=total or None, description=line)
        self._line = line
        if not self._is_terminal and now - self._printed >= LINE_SECONDS:
            self._printed = now
            task = self._shown.tasks[0]
            if task.time_remaining is not None:
                remaining = timedelta(seconds=round(task.time_remaining))
                line += f" · {task.percentage:.0f}% · {remaining} left"
            self.say(line)
