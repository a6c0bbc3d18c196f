"""Ranks of the native backend, forked from one process that has imported torch.

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
    """That process; the other family's entry has the same lines."""

    module = "tests.examples.warm_native"

    def __init__(self) -> None:
        super().__init__("examples/gpt3/pretrain_native.py", RANK_ENVIRONMENT)


def main(descriptor: int, entry: Path) -> None:
    """Import and serve; each rank ends here, with its training."""
    with socket.socket(fileno=descriptor) as listener:
        code = compile(entry.read_bytes(), str(entry), "exec")
        with freeze_imports():
            exec(code, {"__name__": "entry", "__file__": str(entry)})  # noqa: S102 - for what it imports
            importlib.import_module("torch._dynamo")  # Which the first optimizer of a rank loads.
        rank = _serve(listener)
    if rank is not None:
        _become_rank(rank)
        _train(code, str(entry))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
