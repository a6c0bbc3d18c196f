"""What a command line asks for, carried out: inputs → tokens → data sets."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tools.preprocess.dataset import Dataset, bin_path, idx_path, open_dataset
from tools.preprocess.durable import disk_errors
from tools.preprocess.encoders import Encoder, Say, choose_encoder
from tools.preprocess.errors import DatasetError, OutputError
from tools.preprocess.filling import Filling, Watch
from tools.preprocess.manifest import RunIdentity, difference, read_manifest
from tools.preprocess.pipeline import Pipeline, default_threads
from tools.preprocess.source import Selection, Source, open_source
from tools.preprocess.tokenizer import GPT2, TokenizerSpec, load_tokenizer, require_eod
from tools.preprocess.workspace import Workspace, output_prefix

SHARD_BYTES = 64 << 20
CROSS_CHECK = 64


@dataclass(frozen=True)
class Options:
    """Flags of a run."""

    selection: Selection
    output_prefix: Path
    tokenizer: str = GPT2
    append_eod: bool = False
    skip_errors: bool = False
    cross_check: int = CROSS_CHECK
    """Documents encoded by two tokenizers before the run."""
    shard_bytes: int = SHARD_BYTES
    threads: int = 0
    """0 is every core this process may use."""
    restart: bool = False
    overwrite: bool = False


def preprocess(options: Options, say: Say, watch: Watch) -> list[Dataset]:
    """Make a data set for each JSON key, going on with an earlier run that was cut off.

    Args:
        options: What to make.
        say: Told what a user should know, one sentence at a time.
        watch: Called after each block.

    Raises:
        PreprocessError: Anything that keeps it from being made; what is committed stays.
    """
    spec = load_tokenizer(options.tokenizer)
    eod = require_eod(spec) if options.append_eod else None
    source = open_source(options.selection)
    workspace = Workspace(options.output_prefix, _identity(options, spec, eod, source))
    with disk_errors(workspace.folder), closing(workspace):
        if options.restart and workspace.folder.exists():
            shutil.rmtree(workspace.folder)
        if not workspace.folder.exists() and (done := _existing(options, workspace.identity)):
            say("Nothing to do: these data sets are complete and of this very input.")
            return done
        workspace.open()
        if workspace.shards:
            say(f"Going on after {len(workspace.shards)} committed shard(s) of an earlier run.")
        if not workspace.is_complete:
            encoder = choose_encoder(spec, source.samples(options.cross_check), say)
            pipeline = _pipeline(source, workspace, encoder, options.threads)
            filling = Filling(workspace, source, options.skip_errors, say)
            filling.run(pipeline, options.shard_bytes, watch)
            workspace.finish(encoder.name)
        return [open_dataset(prefix) for prefix in workspace.publish()]


def _identity(
    options: Options, spec: TokenizerSpec, eod: int | None, source: Source
) -> RunIdentity:
    return RunIdentity(
        inputs=source.identities,
        tokenizer=spec.name,
        tokenizer_sha256=spec.sha256,
        vocabulary=spec.vocabulary,
        eod=eod,
        json_keys=options.selection.keys,
        part=str(options.selection.part),
        shard_bytes=options.shard_bytes,
        max_document_bytes=options.selection.max_document_bytes,
    )


def _existing(options: Options, identity: RunIdentity) -> list[Dataset]:
    """The data sets, if this very run has been completed before.

    Raises:
        OutputError: Something else stands under the final names.
    """
    prefixes = [output_prefix(options.output_prefix, key) for key in options.selection.keys]
    there = [p for prefix in prefixes for p in (idx_path(prefix), bin_path(prefix)) if p.exists()]
    if options.overwrite or not there:
        return []
    way_out = "remove it, choose another --output-prefix, or give --overwrite."
    try:
        datasets = [open_dataset(prefix) for prefix in prefixes]
        manifests = [read_manifest(prefix) for prefix in prefixes]
    except DatasetError as error:
        raise OutputError(
            f"{there[0]} exists already, incomplete: {error} Else {way_out}"
        ) from None
    for manifest in manifests:
        if manifest is None:
            raise OutputError(f"{there[0]} exists already and has no manifest; {way_out}")
        changed = difference(identity, manifest.identity)
        if changed is not None:
            raise OutputError(f"{there[0]} exists already, but {changed}; {way_out}")
    return datasets


def _pipeline(source: Source, workspace: Workspace, encoder: Encoder, threads: int) -> Pipeline:
    return Pipeline(
        parse=source.parse,
        encoder=encoder,
        dtype=workspace.dtype,
        eod=workspace.identity.eod,
        threads=threads or default_threads(),
    )
