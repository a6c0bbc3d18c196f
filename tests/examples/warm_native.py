"""Warm process of the native backend, which has imported torch and forks ranks.

`python -m tests.examples.warm_native DESCRIPTOR ENTRY`
"""

import importlib
import socket
import sys
from pathlib import Path

from megatron_patches.entry import freeze_imports
from megatron_patches.warm import _become_rank, _serve, _train
from parakit.experiments.verify.verifier import RANK_ENVIRONMENT
from parakit.launch.supervise.warm import WarmMegatron


class WarmNative(WarmMegatron):
    """Warm process of the native backend, whose entry is shared by both model families."""

    module = "tests.examples.warm_native"

    def __init__(self) -> None:
        super().__init__("examples/gpt3/pretrain_native.py", RANK_ENVIRONMENT)


def main(descriptor: int, entry: Path) -> None:
    """Import torch and serve. Each forked rank exits here after its training."""
    with socket.socket(fileno=descriptor) as listener:
        code = compile(entry.read_bytes(), str(entry), "exec")
        with freeze_imports():
            exec(code, {"__name__": "entry", "__file__": str(entry)})  # noqa: S102 - for what it imports
            importlib.import_module(
                "torch._dynamo"
            )  # The first optimizer of a rank would otherwise load this module.
        rank = _serve(listener)
    if rank is not None:
        _become_rank(rank)
        _train(code, str(entry))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
