"""What a command line asks for, carried out: inputs → tokens → data sets."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tools.preprocess.dataset import Dataset, bin_path, idx_path, open_dataset
from tools.preprocess.documents import HARMLESS, Documents, Kind, LineParser, Problem
from tools.preprocess.encoders import Encoder, choose_encoder
from tools.preprocess.errors import DatasetError, InputError, OutputError
from tools.preprocess.inputs import Block, Slice, expand, identify, plain_blocks, whole_file
from tools.preprocess.manifest import RunIdentity, difference, read_manifest
from tools.preprocess.pipeline import Encoded, Pipeline, default_threads
from tools.preprocess.tokenizer import TokenizerSpec, load_tokenizer, require_eod
from tools.preprocess.workspace import Workspace, output_prefix

SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class Options:
    """Flags of a run."""

    inputs: tuple[str, ...]
    output_prefix: Path
    tokenizer: str
    append_eod: bool = False
    json_keys: tuple[str, ...] = ("text",)
    skip_errors: bool = False
    shard_bytes: int = SHARD_BYTES
    max_document_bytes: int | None = None
    threads: int = 0
    """0 is every core this process may use."""
    part: tuple[int, int] = (0, 1)
    restart: bool = False
    overwrite: bool = False


def preprocess(options: Options) -> list[Dataset]:
    """Make a data set for each JSON key, going on with an earlier run that was cut off.

    Raises:
        PreprocessError: Anything that keeps it from being made; what is committed stays.
    """
    spec = load_tokenizer(options.tokenizer)
    eod = require_eod(spec) if options.append_eod else None
    files = expand(options.inputs)
    identity = RunIdentity(
        inputs=tuple(identify(file) for file in files),
        tokenizer=spec.name,
        tokenizer_sha256=spec.sha256,
        vocabulary=spec.vocabulary,
        eod=eod,
        json_keys=options.json_keys,
        part="{}/{}".format(*options.part),
        shard_bytes=options.shard_bytes,
        max_document_bytes=options.max_document_bytes,
    )
    options.output_prefix.parent.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(options.output_prefix, identity)
    if options.restart:
        shutil.rmtree(workspace.folder, ignore_errors=True)
    if not workspace.folder.exists() and (done := _existing(options, identity)):
        return done
    with closing(workspace):
        workspace.open()
        if not workspace.is_complete:
            _fill(workspace, options, spec, tuple(whole_file(file) for file in files))
        return [open_dataset(prefix) for prefix in workspace.publish()]


def _existing(options: Options, identity: RunIdentity) -> list[Dataset]:
    """The data sets, if this very run has been completed before.

    Raises:
        OutputError: Something else stands under the final names.
    """
    prefixes = [output_prefix(options.output_prefix, key) for key in options.json_keys]
    there = [p for prefix in prefixes for p in (idx_path(prefix), bin_path(prefix)) if p.exists()]
    if options.overwrite or not there:
        return []
    way_out = "remove it, choose another --output-prefix, or give --overwrite"
    for prefix in prefixes:
        try:
            open_dataset(prefix)
            manifest = read_manifest(prefix)
        except DatasetError as error:
            raise OutputError(
                f"{there[0]} exists already but is damaged ({error}) {way_out}."
            ) from None
        if manifest is None:
            raise OutputError(f"{there[0]} exists already and has no manifest; {way_out}.")
        changed = difference(identity, manifest.identity)
        if changed is not None:
            raise OutputError(f"{there[0]} exists already, but {changed}; {way_out}.")
    return [open_dataset(prefix) for prefix in prefixes]


def _fill(
    workspace: Workspace, options: Options, spec: TokenizerSpec, slices: Sequence[Slice]
) -> None:
    """Encode what is not yet committed."""
    encoder = choose_encoder(spec)
    done = workspace.shards[-1] if workspace.shards else None
    if done is None or not done.final:
        first, offset = (done.slice_index, done.offset) if done else (0, slices[0].start)
        filling = _Filling(workspace, options, encoder)
        for index in range(first, len(slices)):
            start = offset if index == first else slices[index].start
            filling.add(slices[index], index, start, last=index == len(slices) - 1)
    workspace.finish(encoder.name)


class _Filling:
    """Feeds slices through the pipeline into the workspace."""

    def __init__(self, workspace: Workspace, options: Options, encoder: Encoder) -> None:
        self._workspace = workspace
        self._options = options
        self._parser = LineParser(options.json_keys)
        self._pipeline = Pipeline(
            parse=self._parse,
            encoder=encoder,
            dtype=workspace.dtype,
            eod=workspace.identity.eod,
            threads=options.threads or default_threads(),
        )
        self._problems: Counter[str] = Counter()
        self._uncommitted_bytes = 0

    def add(self, slice_: Slice, index: int, start: int, last: bool) -> None:
        blocks = plain_blocks(slice_, start, self._options.max_document_bytes)
        offset = start
        lines = 0
        for encoded in self._pipeline.run(blocks):
            self._check(slice_, encoded, lines)
            lines += encoded.documents.line_count
            self._workspace.append(encoded.packed)
            self._uncommitted_bytes += encoded.block.size_bytes
            offset = encoded.block.next_offset
            if self._uncommitted_bytes >= self._options.shard_bytes:
                self._commit(index, offset, final=False)
        if last:
            self._commit(index, offset, final=True)

    def _commit(self, index: int, offset: int, final: bool) -> None:
        self._workspace.commit(index, offset, self._uncommitted_bytes, dict(self._problems), final)
        self._problems.clear()
        self._uncommitted_bytes = 0

    def _parse(self, block: Block) -> Documents:
        assert block.data is not None
        return self._parser.parse(block.data)

    def _check(self, slice_: Slice, encoded: Encoded, lines: int) -> None:
        for problem in encoded.documents.problems:
            self._problems[problem.kind] += 1
            if problem.kind not in HARMLESS and not self._options.skip_errors:
                raise InputError(_describe(slice_, problem, lines + problem.line + 1))
        empty = sum(int((packed.counts == 0).sum()) for packed in encoded.packed)
        if empty:
            self._problems[Kind.EMPTY_DOCUMENT] += empty


def _describe(slice_: Slice, problem: Problem, line: int) -> str:
    detail = f" ({problem.detail})" if problem.detail else ""
    return (
        f"{slice_.name}:{line}: {problem.kind}{detail}; mend it, or leave such documents out "
        "with --on-error skip."
    )
