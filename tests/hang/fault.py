"""A patch file that makes ranks of a run fail at a call: `WHY_HANG_FAULT="kind rank n[;kind rank n]"`.

Calls of groups of several ranks are counted from the third training step on. A second fault comes at
the first call after the first one's. What a fault met is in `fired<rank>.json` of the run folder.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import training
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.nn.modules import module as hooks

from parakit.accounting.process_groups import PROCESS_GROUP_METHODS

OWN = int(os.environ["RANK"])
FOLDER = Path(os.environ["KIT_STACKS"]).parent
FAULTS = [text.split() for text in os.environ["WHY_HANG_FAULT"].split(";")]
KIND, _, NUMBER = next((f for f in FAULTS if int(f[1]) == OWN), ("none", "", "0"))
IS_SECOND = len(FAULTS) > 1 and int(FAULTS[1][1]) == OWN
FIRST_STEP = 3
USERS = "/home/me/hook.py"
PAUSE_SECONDS = 1.5
STALLS = ("sleep", "loop", "stop", "kill", "link", "leave", "c")
REDUCTIONS = ("allreduce", "_reduce_scatter_base", "reduce_scatter_single")
POINT_TO_POINT = ("send", "recv")
SIZED = (*REDUCTIONS, "_allgather_base", "all_gather_single")

steps, calls, has_fired = 0, 0, False
held: list[Any] = []
names: dict[int, str] = {}
running: list[tuple[str, int | None]] = []
spans: list[tuple[int, int, str, int | None]] = []
again: list[tuple[str, int | None]] = []


class Finished:
    """What a call that was never made gives back."""

    def wait(self, *_: Any) -> bool:
        return True

    is_completed = wait


def site() -> tuple[str, int | None]:
    """The module at work, and its layer: by hooks in forward, by autograd's numbers in backward."""
    node = torch._C._current_autograd_node()
    if node is None:
        return running[-1] if running else ("", None)
    number = node._sequence_nr()
    inside = [span for span in spans if span[0] <= number < span[1]]
    if inside:
        return min(inside, key=lambda span: span[1] - span[0])[2:]
    # What is computed again, by a function that is no module: that of the module that has it done.
    return again[-1] if again else ("", None)


def is_due() -> bool:
    if has_fired or steps < FIRST_STEP:
        return False
    if IS_SECOND:
        return any(FOLDER.glob("fired*.json"))
    return calls >= int(NUMBER)


def fire(method: str, first: dict[str, Any] | None = None) -> None:
    global has_fired  # noqa: PLW0603 - read by every method
    has_fired = True
    record = {"rank": OWN, "step": steps, "call": calls, "held": first, **met(method)}
    (FOLDER / f"fired{OWN}.json").write_text(json.dumps(record))
    print(f"fault: rank {OWN}", flush=True)


def met(method: str) -> dict[str, Any]:
    """Where a call is made."""
    frames = []
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        frames.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    module, layer = site()
    ours = [line for line in frames if "/megatron/" in line]
    is_backward = torch._C._current_autograd_node() is not None
    call_site = {"kind": KIND, "method": method, "module": module, "layer": layer, "frames": ours}
    return call_site | {"is_backward": is_backward}


def stall() -> None:
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "link":
        subprocess.run(("ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down"), check=True)
    if KIND == "leave":
        os._exit(0)
    if KIND == "c":
        # A signal ends this wait, as it ends many that libraries make.
        ctypes.CDLL(None).sleep(1000)
    while KIND == "loop":
        pass
    while KIND in ("sleep", "data"):
        time.sleep(1000)


def every_tensor(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    return [every_tensor(item, change) for item in value] if isinstance(value, list) else value


def another_group(group: ProcessGroup) -> ProcessGroup | None:
    world = distributed_c10d._world
    members = {process_group: set(places) for process_group, places in world.pg_group_ranks.items()}
    other_groups = [
        g for g in world.pg_map if g.size() > 1 and g is not group and OWN in members[g]
    ]
    other_groups.sort(key=lambda other_group: members[other_group] == members[group])
    return other_groups[0] if other_groups else None


def made_after(first: Any, original: Any, group: ProcessGroup, args: list[Any]) -> Any:
    first(group, args).wait()
    return original(group, *args)


def in_another_group(original: Any, group: ProcessGroup, args: list[Any]) -> Any:
    return original(another_group(group) or group, *args)


def with_tensors(change: Any, original: Any, group: ProcessGroup, args: list[Any]) -> Any:
    return original(group, *every_tensor(args, change))


changes = {
    "skip": lambda *_: Finished(),
    "barrier": lambda o, g, args: made_after(lambda group, _: group.barrier(), o, g, args),
    "twice": lambda o, g, args: made_after(
        lambda group, same: o(group, *every_tensor(same, torch.clone)), o, g, args
    ),
    "size": lambda *call: with_tensors(lambda t: torch.cat([t.flatten()] * 2), *call),
    "dtype": lambda *call: with_tensors(lambda t: t.to(torch.float64), *call),
    "group": in_another_group,
}


def wrapped(original: Any, name: str) -> Any:
    def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        global calls  # noqa: PLW0603 - one count for all methods
        if group.size() < 2:
            return original(group, *args, **kwargs)
        calls += steps >= FIRST_STEP
        if held:
            first, method_of, *held_arguments = held.pop()
            if name not in POINT_TO_POINT and (held_arguments[0], method_of) != (group, original):
                fire(name, first)
                done = original(group, *args, **kwargs)
                done.wait()
                method_of(*held_arguments)
                return done
            method_of(*held_arguments)
        if KIND == "pause" and calls % 7 == int(NUMBER) % 7 and steps >= 2:
            time.sleep(PAUSE_SECONDS)
        if not is_due():
            return original(group, *args, **kwargs)
        if KIND in STALLS:
            fire(name)
            stall()
        elif KIND == "swap" and name in SIZED:
            held.append((met(name), original, group, *args))
            return Finished()
        elif KIND in changes and (name == "allreduce" if KIND == "group" else name in SIZED):
            fire(name)
            return changes[KIND](original, group, list(args))
        return original(group, *args, **kwargs)

    return method


def counted(original: Any) -> Any:
    def train_step(*args: Any, **kwargs: Any) -> Any:
        global steps  # noqa: PLW0603 - read by every method
        steps += 1
        spans.clear()
        for chunk, part in enumerate(args[2]):
            names.update({id(m): f"{chunk}:{name}" for name, m in part.named_modules()})
        if KIND == "slow" and steps >= 2:
            time.sleep(2 * PAUSE_SECONDS)
        if KIND in ("data", "raise") and args[1] is None and is_due_at_data():
            at_data()
        return original(*args, **kwargs)

    return train_step


def is_due_at_data() -> bool:
    return not has_fired and steps >= FIRST_STEP + int(NUMBER) % 3


def at_data() -> None:
    fire("data")
    if KIND == "raise":
        raise ValueError("the sample is damaged")
    stall()


def read(original: Any) -> Any:
    def read_sample(self: Any) -> Any:
        if is_due_at_data():
            at_data()
        return original(self)

    read_sample.__code__ = read_sample.__code__.replace(co_filename=USERS)
    return read_sample


def computed_again(original: Any) -> Any:
    def backward(*args: Any) -> Any:
        again.append(site())
        done = original(*args)
        again.pop()
        return done

    return staticmethod(backward)


def begin(module: nn.Module, _: Any) -> None:
    layer = module.layer_number if isinstance(module, TransformerLayer) else None
    layer = layer or (running[-1][1] if running else None)
    running.append((names.get(id(module), ""), layer))
    starts.append(torch._C._autograd._get_sequence_nr())


def end(_: nn.Module, __: Any, ___: Any) -> None:
    name, layer = running.pop()
    spans.append((starts.pop(), torch._C._autograd._get_sequence_nr(), name, layer))


starts: list[int] = []


def move_to_a_namespace() -> None:
    """`WHY_HANG_LINK="prefix subnet"`: even ranks in one network namespace, odd ones in the other."""
    prefix, subnet = os.environ["WHY_HANG_LINK"].split()
    side = OWN % 2
    with Path(f"/var/run/netns/{prefix}{side}").open() as namespace:
        os.setns(namespace.fileno(), os.CLONE_NEWNET)
    os.environ["MASTER_ADDR"] = f"{subnet}.1"
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ[name] = f"{prefix}v{side}"


# The bench puts this file where its frames count as torch's: a call's place in the code is then what it
# would be without it. Code that stops is the user's.
for function in (stall, at_data):
    function.__code__ = function.__code__.replace(co_filename=USERS)
if "WHY_HANG_LINK" in os.environ:
    move_to_a_namespace()
if KIND != "none":
    training.train_step = counted(training.train_step)
    CheckpointFunction.backward = computed_again(CheckpointFunction.backward)
    for name in PROCESS_GROUP_METHODS:
        setattr(ProcessGroup, name, wrapped(getattr(ProcessGroup, name), name))
    hooks.register_module_forward_pre_hook(begin)
    hooks.register_module_forward_hook(end, always_call=True)
    if KIND in ("data", "raise"):
        RerunDataIterator.__next__ = read(RerunDataIterator.__next__)
