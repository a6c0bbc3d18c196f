"""`make import-hf` and `make export-hf`: convert weights from and to Hugging Face's format, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from parakit.checkpoint import TORCH_DIST, find_problems, read_contents
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.huggingface import EXACT_GELU, MEGATRON_BRIDGE, read_source_config
from parakit.config.model import HUB, ModelShape, imported_weights_folder, load_model
from parakit.config.run import flags_from_printed_arguments
from parakit.launch.checkpoints import select_checkpoint
from parakit.launch.run_folder import read_named_run

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def import_hf(hf: str, name: str | None, console: Console) -> int:
    """Import the Hugging Face model `hf` as the model `hub/NAME` and print the next command; return 0.

    `hf` is a folder or a name on the hub. By default NAME is the last part of `hf` in lower case.

    Raises:
        LaunchError, ValueError: The model cannot be converted; nothing was written.
    """
    folder = fetch_model_folder(hf)
    # Importing torch takes much longer than reading the config, so a wrong folder is refused before.
    read_source_config(folder)
    from parakit.convert import ConversionProgress, import_model, read_source

    source = read_source(folder)
    name = name or Path(hf).name.lower()
    summary = import_model(source, name, ConversionProgress(console), known_as=hf)
    console.print(f"{summary} → {relative_to_root(HUB / name)}", highlight=False)
    console.print(
        f"Train it with 'make train-tp2-{name}-2gpu DATA=…' (data: make prepare-ds INPUT=… NAME=… "
        f"TOKENIZER=hub/{name}).",
        highlight=False,
    )
    return 0


@dataclass(frozen=True)
class _ExportSource:
    """The weights to export, with the flags and the shape of their model."""

    checkpoint: Path
    """Folder `iter_…` in Megatron's distributed format."""
    flags: Sequence[str]
    shape: ModelShape
    imported: Path | None
    """Folder of the imported model that the weights were trained from; None without one."""


def export_hf(run: str | None, to: str, console: Console, ckpt: str | None = None) -> int:
    """Write weights to the folder `to` in Hugging Face's format; return 0.

    Args:
        run: A run folder, whose newest valid checkpoint is exported, or a folder in `hub/`.
        to: The folder to write; it must not exist.
        console: Shows progress and the closing line.
        ckpt: A folder with a checkpoint of any Megatron, in place of `run`.

    Raises:
        LaunchError, ValueError: The weights cannot be converted; nothing was written.
    """
    if bool(run) == bool(ckpt):
        raise LaunchError(
            "export-hf needs either RUN= (a run folder, or hub/NAME) or CKPT= (any checkpoint of Megatron), for "
            "example: make export-hf CKPT=checkpoints TO=folder"
        )
    source = _find_checkpoint_source(str(ckpt)) if ckpt else _find_run_source(str(run))
    # Importing torch takes much longer than reading the folder, so a wrong folder is refused before.
    from parakit.convert import ConversionProgress, export_model

    summary = export_model(
        source.checkpoint,
        source.flags,
        source.shape,
        source.imported,
        Path(to).absolute(),
        ConversionProgress(console),
    )
    console.print(f"{summary} → {to}", highlight=False)
    return 0


def _find_run_source(run: str) -> _ExportSource:
    """Return the weights of a run's newest valid checkpoint, or of a model in `hub/`.

    Raises:
        LaunchError, ValueError: The folder holds no such weights.
    """
    folder = ROOT / run
    if folder.parent == HUB:
        model = load_model(folder.name)
        shape, flags = model.shape, model.flags
        checkpoint = HUB / model.name / "checkpoint" / "iter_0000001"
    else:
        record = read_named_run(folder)
        model = load_model(record.spec.model)
        shape, flags = record.spec.shape, record.argv
        checkpoint = select_checkpoint(folder).checkpoint.path
    weights = imported_weights_folder(model)
    return _ExportSource(checkpoint, flags, shape, weights.parent if weights else None)


def _find_checkpoint_source(ckpt: str) -> _ExportSource:
    """Return the weights of a checkpoint that any Megatron saved; the model is that of its arguments.

    Without `vocab_size` among the arguments, all rows of the embedding are taken for the vocabulary.

    Raises:
        LaunchError, ValueError: The folder holds no complete checkpoint of this format with arguments.
    """
    contents = read_contents(ROOT / Path(ckpt).expanduser())
    if contents.format != TORCH_DIST:
        raise LaunchError(
            f"CKPT={ckpt} is of the format {contents.format}, whose weights are not exported here; load it "
            f"with Megatron and save it with --ckpt-format torch_dist; {MEGATRON_BRIDGE}."
        )
    for problem in find_problems(contents):
        raise LaunchError(f"CKPT={ckpt} is not complete: {problem}")
    if contents.spec is None:
        raise LaunchError(f"CKPT={ckpt} holds no arguments that define a model; {MEGATRON_BRIDGE}.")
    arguments, shape = contents.arguments, contents.spec.shape
    if not arguments.get("vocab_size", "").isdecimal():
        shape = replace(shape, vocabulary=contents.vocabulary_rows)
    flags = flags_from_printed_arguments(arguments)
    if arguments.get("bias_gelu_fusion") == "False" and "--openai-gelu" not in flags:
        # Without its fused kernel Megatron computes the exact GELU.
        flags = (*flags, EXACT_GELU)
    return _ExportSource(contents.folder, flags, shape, imported=None)


def fetch_model_folder(name: str) -> Path:
    """Return the folder `name`, or the downloaded files of the hub's model of that name.

    A name that is not in the form of the hub's names is returned as a folder, even if there is none.

    Raises:
        LaunchError: There is no such folder, and the hub does not give such a model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() or not _HUB_NAME.fullmatch(name):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ["*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "LICENSE*"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise LaunchError(
            f"There is no folder {name}, and the hub has no model of that name for you ({reason}); "
            "name a folder that holds its config.json and safetensors."
        ) from None
