"""Checkpoints of imported models in the form in which a run of Megatron saves them."""

from argparse import Namespace
from pathlib import Path

import torch

from parakit.config.flags import Flags
from parakit.config.model import find_model

CHECKPOINT = "checkpoint/iter_0000001"
"""Folder of the checkpoint in the folder of an imported model."""
_DEFAULTS: dict[str, object] = {
    "rotary_percent": 1.0,
    "moe_layer_freq": 1,
    "softmax_type": "vanilla",
    "rope_scaling_factor": 8.0,
    "window_size": None,
    "multi_latent_attention": False,
    "moe_shared_expert_gate": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "add_bias_linear": True,
    "add_qkv_bias": False,
}
"""Arguments that a checkpoint states although no flag set them."""


def state_arguments(folder: Path, states_vocabulary: bool = True) -> None:
    """Let the checkpoint of an imported model state Megatron's arguments, as a run of Megatron does.

    Args:
        folder: Folder of the imported model.
        states_vocabulary: Whether the arguments include the size of the vocabulary without padding.
    """
    flags = Flags(find_model(str(folder / f"{folder.name}.args")).flags)
    arguments: dict[str, object] = {
        name.removeprefix("--").replace("-", "_"): values[0] if values else True
        for name, values in flags._values.items()
    }
    if arguments.pop("disable_bias_linear", None):
        arguments["add_bias_linear"] = False
    else:
        arguments["add_qkv_bias"] = True
    if not states_vocabulary:
        arguments["vocab_size"] = None
    path = folder / CHECKPOINT / "common.pt"
    common = torch.load(path, weights_only=False)
    common["args"] = Namespace(**{**_DEFAULTS, **arguments, **vars(common["args"])})
    torch.save(common, path)
