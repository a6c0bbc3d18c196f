"""`make import-hf` and `make export-hf`: weights from and to Hugging Face's folders, without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from tools.launch.checkpoint.stored import select_checkpoint
from tools.launch.errors import LaunchError, read_named_run, wrong_settings_refused
from tools.spec import settings
from tools.spec.files import ROOT, from_root
from tools.spec.model import HUB, imported_weights, load_model

_WHICH_FOLDER = "Say which model: make import-hf HF=folder (or org/name on the hub) NAME=name"
_WHICH_RUN = "Say what: make export-hf RUN=runs/… (or RUN=hub/NAME) TO=folder"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def import_hf(console: Console, environment: Mapping[str, str] = os.environ) -> int:
    """`HF=` becomes the model `hub/NAME`; 0.

    Raises:
        LaunchError, ValueError: It cannot be converted; nothing was written.
    """
    from tools.convert.hf.into_megatron import import_model, read_source
    from tools.convert.hf.work import Work

    with wrong_settings_refused():
        given, name = settings.HF.value(environment), settings.IMPORTED.value(environment)
    if given is None:
        raise LaunchError(_WHICH_FOLDER)
    source = read_source(folder_of(given))
    name = name or Path(given).name.lower()
    summary = import_model(source, name, Work(console), known_as=given)
    console.print(f"{summary.line} → {from_root(HUB / name)}", highlight=False)
    console.print(
        f"Train it with 'make train-tp2-{name}-2gpu DATA=…' (data: make prepare-ds INPUT=… NAME=… "
        f"TOKENIZER=hub/{name}).",
        highlight=False,
    )
    return 0


def export_hf(console: Console, environment: Mapping[str, str] = os.environ) -> int:
    """The newest valid checkpoint of `RUN=`, or an imported model, becomes the folder `TO=`; 0.

    Raises:
        LaunchError, ValueError: It cannot be converted; nothing was written.
    """
    from tools.convert.hf.from_megatron import export_model, read_export
    from tools.convert.hf.work import Work

    with wrong_settings_refused():
        run, to = settings.EXPORTED.value(environment), settings.TO.value(environment)
    if run is None or to is None:
        raise LaunchError(_WHICH_RUN)
    folder = ROOT / run
    if folder.parent == HUB:
        model = load_model(folder.name)
        checkpoint, words, shape = (
            HUB / model.name / "checkpoint" / "iter_0000001",
            model.flags,
            model.shape,
        )
    else:
        record = read_named_run(folder)
        checkpoint, words = select_checkpoint(folder).checkpoint.path, record.argv
        model, shape = load_model(record.spec.model), record.spec.shape
    weights = imported_weights(model)
    export = read_export(checkpoint, words, shape, weights.parent if weights else None)
    summary = export_model(export, Path(to).absolute(), Work(console))
    console.print(f"{summary.line} → {to}", highlight=False)
    return 0


def folder_of(given: str) -> Path:
    """A folder, or what the hub's name stands for, fetched.

    Raises:
        LaunchError: It is neither, or the hub does not give it.
    """
    folder = Path(given).expanduser()
    if folder.is_dir() or not _HUB_NAME.fullmatch(given):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = ("*.safetensors", "*.json", "tokenizer*", "*.model", "merges.txt", "LICENSE*")
    try:
        return Path(snapshot_download(given, allow_patterns=list(wanted)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise LaunchError(
            f"There is no folder {given}, and the hub does not give a model of that name ({reason}); "
            "name a folder that holds its config.json and safetensors."
        ) from None
