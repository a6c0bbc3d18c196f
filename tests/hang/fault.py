"""A patch file that makes one rank of a run fail at a call: `WHY_HANG_FAULT="kind rank n"`.

Calls are counted from the third training step on.
"""

import os
import signal
import time
from typing import Any

import torch
from megatron.training import training
from torch.distributed import ProcessGroup

from tools.ledger.process_groups import METHODS

KIND, RANK, NUMBER = os.environ["WHY_HANG_FAULT"].split()
steps, calls = 0, 0


def stall(kind: str) -> None:
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while kind == "loop":
        pass
    time.sleep(100_000 if kind == "sleep" else 0)


def wrapped(original: Any, name: str) -> Any:
    def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        global calls  # noqa: PLW0603 - one count for all methods
        calls += steps >= 3 and group.size() > 1
        is_reduction = name == "allreduce"
        if steps < 3 or group.size() < 2 or calls < int(NUMBER):
            return original(group, *args, **kwargs)
        if KIND in ("sleep", "loop", "stop"):
            calls = -1_000_000
            stall(KIND)
        elif is_reduction:
            calls = -1_000_000
            if KIND == "skip":
                return None
            if KIND == "twice":
                original(group, [args[0][0].clone()], *args[1:], **kwargs).wait()
            if KIND == "size":
                args = ([torch.cat([args[0][0].flatten()] * 2)], *args[1:])
            if KIND == "dtype":
                args = ([args[0][0].to(torch.float64)], *args[1:])
            if KIND == "barrier":
                group.barrier().wait()
        return original(group, *args, **kwargs)

    # As torch's own frames: a call's place in the code is what it would be without this file.
    method.__code__ = method.__code__.replace(co_filename="/torch/fault.py")
    return method


def counted(original: Any) -> Any:
    def train_step(*args: Any, **kwargs: Any) -> Any:
        global steps  # noqa: PLW0603 - read by every method
        steps += 1
        if KIND == "data" and steps == 3 + int(NUMBER) % 3:
            stuck_data = training.__dict__.setdefault("stuck_data", lambda: time.sleep(100_000))
            stuck_data()
        return original(*args, **kwargs)

    train_step.__code__ = train_step.__code__.replace(co_filename="/torch/fault.py")
    return train_step


if int(os.environ["RANK"]) == int(RANK):
    training.train_step = counted(training.train_step)
    for each in METHODS:
        setattr(ProcessGroup, each, wrapped(getattr(ProcessGroup, each), each))
