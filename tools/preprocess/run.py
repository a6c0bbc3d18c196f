"""What a command line asks for, carried out: inputs → tokens → data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.preprocess.dataset.files import Dataset, bin_path, idx_path, open_dataset
from tools.preprocess.dataset.manifest import RunIdentity, difference
from tools.preprocess.encode.encoders import Say, choose_encoder
from tools.preprocess.encode.pipeline import Pipeline, default_threads
from tools.preprocess.encode.tokenizer import GPT2, TokenizerSpec, load_tokenizer, require_eod
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.input.source import WHOLE_INPUT, InputShard, Source, open_source
from tools.preprocess.output.folder import disk_errors, locked, retire
from tools.preprocess.output.workspace import Workspace
from tools.preprocess.output.writer import fill
from tools.preprocess.progress import Progress, Watch


@dataclass(frozen=True)
class PreprocessOptions:
    """Flags of a run."""

    inputs: tuple[str, ...]
    """Files, folders, globs; or one `hub:NAME`."""
    output_prefix: Path
    keys: tuple[str, ...] = ("text",)
    shard: InputShard = WHOLE_INPUT
    max_document_bytes: int | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    tokenizer: str = GPT2
    append_eod: bool = False
    on_error: Literal["stop", "skip"] = "stop"
    cross_check: int = 64
    """Documents encoded by two tokenizers before the run."""
    part_bytes: int = 64 << 20
    """Input between two commits."""
    threads: int = 0
    """0 is every core this process may use."""
    restart: bool = False
    overwrite: bool = False


def preprocess(
    options: PreprocessOptions, say: Say, watch: Watch
) -> tuple[list[Dataset], Progress]:
    """Make a data set for each JSON key, resuming an earlier run that was cut off; and what it took.

    Args:
        options: What to make.
        say: Called with what a user should know, one sentence at a time.
        watch: Called after each block.

    Raises:
        PreprocessError: Anything that keeps it from being made; what is committed stays.
    """
    spec = load_tokenizer(options.tokenizer)
    eod = require_eod(spec) if options.append_eod else None
    source = open_source(
        options.inputs,
        options.keys,
        options.shard,
        options.max_document_bytes,
        options.hub_config,
        options.hub_split,
    )
    progress = Progress(source.size_bytes)
    workspace = Workspace(options.output_prefix, _identity(options, spec, eod, source))
    with disk_errors(workspace.folder):
        if options.restart and workspace.folder.exists():
            with locked(workspace.folder):
                retire(workspace.folder)
        if not workspace.folder.exists():
            retire(workspace.folder)  # what a killed clean-up has left
            if done := _existing(options, workspace):
                say("Nothing to do: these data sets are complete and of this very input.")
                return done, progress
        with workspace.opened():
            if workspace.parts:
                say(f"Resuming after {len(workspace.parts)} finished part(s) of an earlier run.")
            if not workspace.is_complete:
                encoder = choose_encoder(spec, source.samples(options.cross_check), say)
                threads = options.threads or default_threads()
                pipeline = Pipeline(
                    source.parse, encoder, workspace.dtype, eod, threads, progress.clock
                )
                skip = options.on_error == "skip"
                fill(workspace, source, pipeline, skip, say, progress, watch)
                workspace.finish(encoder.name)
            return [open_dataset(prefix) for prefix in workspace.publish()], progress


def _identity(
    options: PreprocessOptions, spec: TokenizerSpec, eod: int | None, source: Source
) -> RunIdentity:
    return RunIdentity(
        inputs=source.identities,
        tokenizer=spec.name,
        tokenizer_sha256=spec.sha256,
        vocabulary=spec.vocabulary,
        eod=eod,
        json_keys=options.keys,
        part=str(options.shard),
        shard_bytes=options.part_bytes,
        max_document_bytes=options.max_document_bytes,
    )


def _existing(options: PreprocessOptions, workspace: Workspace) -> list[Dataset]:
    """The data sets, if this very run has been completed before.

    Raises:
        OutputError: Something else stands under the final names.
    """
    prefixes = workspace.prefixes.values()
    there = [p for prefix in prefixes for p in (idx_path(prefix), bin_path(prefix)) if p.exists()]
    if options.overwrite or not there:
        return []
    remedy = "remove it, choose another --output-prefix, or give --overwrite."
    try:
        datasets = [open_dataset(prefix) for prefix in prefixes]
    except DatasetError as error:
        raise OutputError(f"{there[0]} exists already, incomplete: {error} Else {remedy}") from None
    for dataset in datasets:
        if dataset.manifest is None:
            raise OutputError(f"{there[0]} exists already and has no manifest; {remedy}")
        if changed := difference(workspace.identity, dataset.manifest.identity):
            raise OutputError(f"{there[0]} exists already, but {changed}; {remedy}")
    return datasets
