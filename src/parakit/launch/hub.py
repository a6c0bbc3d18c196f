"""`make import-hf` and `make export-hf`: convert weights from and to Hugging Face's format, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.model import HUB, imported_weights_folder, load_model
from parakit.launch.checkpoints import select_checkpoint
from parakit.launch.run_folder import read_named_run

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def import_hf(hf: str, name: str | None, console: Console) -> int:
    """Import the Hugging Face model `hf` as the model `hub/NAME` and print the next command; return 0.

    `hf` is a folder or a name on the hub. By default NAME is the last part of `hf` in lower case.

    Raises:
        LaunchError, ValueError: The model cannot be converted; nothing was written.
    """
    from parakit.convert import ConversionProgress, import_model, read_source

    source = read_source(fetch_model_folder(hf))
    name = name or Path(hf).name.lower()
    summary = import_model(source, name, ConversionProgress(console), known_as=hf)
    console.print(f"{summary} → {relative_to_root(HUB / name)}", highlight=False)
    console.print(
        f"Train it with 'make train-tp2-{name}-2gpu DATA=…' (data: make prepare-ds INPUT=… NAME=… "
        f"TOKENIZER=hub/{name}).",
        highlight=False,
    )
    return 0


def export_hf(run: str, to: str, console: Console) -> int:
    """Write a run's newest valid checkpoint, or an imported model, to the folder `to`; return 0.

    `run` is a run folder or a folder in `hub/`.

    Raises:
        LaunchError, ValueError: The weights cannot be converted; nothing was written.
    """
    from parakit.convert import ConversionProgress, export_model

    folder = ROOT / run
    if folder.parent == HUB:
        model = load_model(folder.name)
        checkpoint = HUB / model.name / "checkpoint" / "iter_0000001"
        flags, shape = model.flags, model.shape
    else:
        record = read_named_run(folder)
        checkpoint, flags = select_checkpoint(folder).checkpoint.path, record.argv
        model, shape = load_model(record.spec.model), record.spec.shape
    weights = imported_weights_folder(model)
    imported, target = weights.parent if weights else None, Path(to).absolute()
    summary = export_model(checkpoint, flags, shape, imported, target, ConversionProgress(console))
    console.print(f"{summary} → {to}", highlight=False)
    return 0


def fetch_model_folder(name: str) -> Path:
    """Return the folder `name`, or the downloaded files of the hub's model of that name.

    Raises:
        LaunchError: There is no such folder, and the hub does not give such a model.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() or not _HUB_NAME.fullmatch(name):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = ("*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "LICENSE*")
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise LaunchError(
            f"There is no folder {name}, and the hub has no model of that name for you ({reason}); "
            "name a folder that holds its config.json and safetensors."
        ) from None
