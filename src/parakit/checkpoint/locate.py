"""Find the checkpoint in the folder that a user names, and the arguments that other files of the folder hold.

Megatron, Megatron-Bridge, NeMo 2, torchtitan and this kit each put a checkpoint at another place below the folder
of a run. DeepSpeed's checkpoints and unfinished folders are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parakit.artifacts.run import CHECKPOINTS_FOLDER, RUN_FILE
from parakit.artifacts.torch_dist import FORMAT, METADATA, TRACKER_FILE
from parakit.config.files import describe_file_problem, read_args_file, read_regular_file

RELEASE = "release"
"""Content of the tracker file, and name of the folder, of a checkpoint that was converted and not trained."""
IMPORTED, IMPORT_FILE = "checkpoint", "import.json"
"""Folder of the weights in `hub/NAME`, and the file by which such a folder is recognised."""
NEMO_WEIGHTS = "weights"
BRIDGE_CONFIG = "run_config.yaml"
"""File in a checkpoint of Megatron-Bridge that holds what Megatron's own checkpoints hold as arguments."""

_STEP_FOLDER = re.compile(r"step-(\d+)")
_ITERATION_FOLDER = re.compile(r"iter_(\d+)")
_MAX_SHOWN = 40
"""Longest text of a tracker file that an error shows."""


class UnknownFormatError(ValueError):
    """A folder that holds no checkpoint, or a checkpoint of a format that is not read."""


@dataclass(frozen=True)
class LocatedCheckpoint:
    """The folder of a checkpoint, with the arguments and the trainer that files beside the checkpoint name."""

    folder: Path
    arguments: Mapping[str, str]
    """Megatron's arguments by name as a log prints them; empty if no file beside the tensors holds any."""
    trainer: str = ""
    """The trainer that saved the checkpoint, if it is built on Megatron-Core and not Megatron itself."""


def locate_checkpoint(folder: Path) -> LocatedCheckpoint:
    """Find the checkpoint that a folder contains, or return the folder itself if it is a checkpoint.

    Args:
        folder: A checkpoint's own folder, the folder above it, the folder of a run of this kit, a model `hub/NAME`,
            or a folder of NeMo 2 or torchtitan.

    Raises:
        UnknownFormatError: The folder does not exist, its tracker names no checkpoint, or it is DeepSpeed's.
    """
    if (folder / RUN_FILE).is_file():
        folder /= CHECKPOINTS_FOLDER
    arguments: Mapping[str, str] = {}
    if (folder / IMPORT_FILE).is_file() and (folder / IMPORTED).is_dir():
        arguments = _read_args_files(folder)
        folder /= IMPORTED
    # Megatron-DeepSpeed writes Megatron's tracker file too, which names no folder there.
    _refuse_deepspeed(folder)
    folder = _follow_tracker(folder)
    if not folder.is_dir():
        raise UnknownFormatError(f"{folder} is no folder; name one that holds a checkpoint.")
    _refuse_deepspeed(folder)
    if not (folder / METADATA).exists():
        folder = _find_subfolder(folder)
    if (folder / BRIDGE_CONFIG).is_file():
        arguments = _read_bridge_arguments(folder / BRIDGE_CONFIG)
        return LocatedCheckpoint(folder, arguments, "Megatron-Bridge")
    trainer = "NeMo 2" if folder.name == NEMO_WEIGHTS else ""
    return LocatedCheckpoint(folder, arguments, trainer)


def _follow_tracker(folder: Path) -> Path:
    """Return the folder that the tracker file names; the folder itself if it has no tracker file.

    Raises:
        UnknownFormatError: The tracker file is no regular file, is empty, is no number, or names no checkpoint.
    """
    path = folder / TRACKER_FILE
    flaw = describe_file_problem(path)
    if flaw == "is missing":
        return folder
    if flaw:
        raise UnknownFormatError(f"{path} {flaw}; name the folder of one checkpoint (iter_…).")
    text = read_regular_file(path).decode(errors="replace").strip()
    if text == RELEASE:
        name = RELEASE
    elif text.isascii() and text.isdecimal():
        name = f"iter_{int(text):07d}"
    else:
        shown = f"holds {text[:_MAX_SHOWN]!r}" if text else "is empty"
        raise UnknownFormatError(
            f"{path} {shown}, and not the number of an iteration; {_list_choices(folder)}."
        )
    if not (folder / name).is_dir():
        raise UnknownFormatError(
            f"{path} names {name}, and there is no such folder; {_list_choices(folder)}."
        )
    if not _has_checkpoint_files(folder / name):
        raise UnknownFormatError(
            f"{path} names {name}, which holds no {METADATA} and no mp_rank_… folder, so its save did not "
            f"finish; {_list_choices(folder)}."
        )
    return folder / name


def _has_checkpoint_files(folder: Path) -> bool:
    """Return True if a folder has the files that every finished save of Megatron leaves, in any format."""
    has_description = any((folder / name).exists() for name in (METADATA, FORMAT))
    return has_description or any(folder.glob("mp_rank_*"))


def _list_choices(folder: Path) -> str:
    """Return a clause that names the newest checkpoint in a folder as the one to choose."""
    folders = [path for path in folder.glob("iter_*") if _ITERATION_FOLDER.fullmatch(path.name)]
    if not folders:
        return "the folder holds no iter_… folder either, so it holds no checkpoint"
    complete_folders = [path for path in folders if _has_checkpoint_files(path)]
    if not complete_folders:
        return "no other iter_… folder there holds a checkpoint"
    newest = max(complete_folders, key=lambda path: int(path.name.removeprefix("iter_")))
    return f"the newest folder there is {newest.name}: name it"


def _find_subfolder(folder: Path) -> Path:
    """Return the subfolder in which NeMo 2 or torchtitan stored a checkpoint; without one, `folder` itself.

    If torchtitan stored several steps, the last complete step is taken.
    """
    if (folder / NEMO_WEIGHTS / METADATA).exists():
        return folder / NEMO_WEIGHTS
    complete_steps: dict[int, Path] = {}
    for path in folder.glob("step-*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and (path / METADATA).exists():
            complete_steps[int(match[1])] = path
    if not complete_steps:
        return folder
    return complete_steps[max(complete_steps)]


def _refuse_deepspeed(folder: Path) -> None:
    """Raise an error if the folder is a checkpoint of DeepSpeed or contains one.

    Raises: UnknownFormatError: The message names the file by which DeepSpeed was recognised.
    """
    patterns = (
        "*_model_states.pt",
        "global_step*/*_model_states.pt",
        "*/mp_rank_*_model_states.pt",
    )
    file = next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)
    if file is not None:
        raise UnknownFormatError(
            f"{folder} is a checkpoint of DeepSpeed ({file.relative_to(folder)}), which is not read here; "
            "run the zero_to_fp32.py that DeepSpeed put beside it, save the result as a Hugging Face model, and "
            "import that with 'make import-hf'."
        )


def _read_args_files(folder: Path) -> dict[str, str]:
    """Return the flags in the folder's `.args` files as arguments: `--num-layers 2` becomes `num_layers: 2`.

    A flag without a value gets 'True', and a flag with several values keeps the last. Without such a file, the
    result is empty.
    """
    arguments: dict[str, str] = {}
    for path in sorted(folder.glob("*.args")):
        flag = ""
        for word in read_args_file(path):
            if word.startswith("--"):
                flag = word.removeprefix("--").replace("-", "_")
                arguments[flag] = "True"
            elif flag:
                arguments[flag] = word
    return arguments


_BRIDGE_NAMES = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "layernorm_epsilon": "norm_epsilon",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
"""Megatron's arguments by the names of Bridge's fields of the model, where the names differ."""
_BRIDGE_SECTIONS = ("model", "train", "ddp", "tokenizer")
"""Sections whose fields have the names of Megatron's arguments."""


def _read_bridge_arguments(path: Path) -> dict[str, str]:
    """Read Megatron's arguments from the `run_config.yaml` of Megatron-Bridge; empty if the file cannot be read.

    All values are texts, by the name of Megatron's argument.
    """
    import yaml

    try:
        sections = yaml.safe_load(read_regular_file(path))
        fields: dict[str, Any] = {}
        for section in _BRIDGE_SECTIONS:
            fields |= {
                name: value
                for name, value in (sections.get(section) or {}).items()
                if isinstance(value, str | int | float | list) and name != "_target_"
            }
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return {}
    groups, heads = fields.get("num_query_groups"), fields.get("num_attention_heads")
    fields["group_query_attention"] = groups not in (None, heads)
    shares_embedding = fields.pop("share_embeddings_and_output_weights", True)
    fields["untie_embeddings_and_output_weights"] = not shares_embedding
    return {_BRIDGE_NAMES.get(name, name): str(value) for name, value in fields.items()}
