"""What Megatron's own parser and builders make of flags: `python megatrons_configs.py WORDS OUT`.

Both are JSON files: `[[name, ranks, [flag, …]], …]`, and by name the model's, the optimizer's and the
DDP's configuration with all arguments. No GPU is needed: what asks
for one is given the properties of an H100.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from parakit.convert.recipe import evaluate

evaluate.REPLACEABLE_PACKAGES = ("transformer_engine",)


def main(recipes: str, out: str) -> None:
    warnings.simplefilter("ignore")
    evaluate.replace_missing_packages()
    h100 = SimpleNamespace(major=9, minor=0)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: h100  # type: ignore[assignment]
    configs: dict[str, Any] = {}
    for name, ranks, flags in json.loads(Path(recipes).read_text()):
        configs[name] = configs_of(ranks, flags)
    Path(out).write_text(json.dumps(configs))


def parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    made = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(made)
    return made


def configs_of(ranks: int, flags: list[str]) -> dict[str, dict[str, Any]]:
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import validate_args
    from megatron.training.training import (
        get_megatron_ddp_config,
        get_megatron_optimizer_config,
    )

    args = parser().parse_args(flags)
    args.rank, args.world_size = 0, ranks
    if args.use_megatron_fsdp or args.use_torch_fsdp2:  # Both refuse it, and TP and CP need it.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    else:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    validate_args(args)
    made = {
        "model": core_transformer_config_from_args(args),
        "ddp": get_megatron_ddp_config(args),
        "optimizer": get_megatron_optimizer_config(args)[0],
        "args": args,
    }
    return {name: {key: plain(item) for key, item in vars(it).items()} for name, it in made.items()}


def plain(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
