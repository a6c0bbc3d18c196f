"""Two ranks whose groups stage CPU tensors: `python -m tests.patches.staged_ranks STORE`."""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_patches import shared_device

calls: list[str] = []


def install() -> None:
    """As the patch does, with the host's tensors in the device's part, and count the calls."""
    for name in shared_device._METHODS:
        original = getattr(ProcessGroup, name)

        @functools.wraps(original, updated=())
        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(*args, **kwargs)

        setattr(ProcessGroup, name, shared_device.stage(name, counted, "cpu"))


def point_to_point(rank: int) -> None:
    """As Megatron's pipeline: a batch of both directions, and a plain pair."""
    received = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert received.tolist() == [1.0 - rank] * 3
    if rank == 0:
        dist.send(received + 5, 1)
    else:
        dist.recv(received, 0)
        assert received.tolist() == [6.0] * 3


def collectives(rank: int) -> None:
    """Those that Megatron's TP, SP, DP and expert parallelism make, waited for or not."""
    summed = torch.full((2,), 1.0 + rank)
    dist.all_reduce(summed)
    assert summed.tolist() == [3.0, 3.0]
    gathered = torch.zeros(4)
    handle = dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)), async_op=True)
    assert handle is not None
    handle.wait()
    assert gathered.tolist() == [0, 0, 1, 1]
    scattered = torch.zeros(2)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0))
    assert scattered.tolist() == [[0, 2], [4, 6]][rank]
    exchanged = torch.zeros(2)
    dist.all_to_all_single(exchanged, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert exchanged.tolist() == [float(rank), 10.0 + rank]
    told = torch.full((1,), float(rank))
    dist.broadcast(told, 1)
    assert told.item() == 1.0
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.full((1,), 7.0 + rank))
    assert [part.item() for part in parts] == [7.0, 8.0]


def main(rank: int, store: str) -> None:
    """Run both parts and write which methods were staged to `STORE.RANK`.

    Not printed: gloo prints to the same pipe, and its words can stand between two of ours.
    """
    install()
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    point_to_point(rank)
    collectives(rank)
    dist.barrier()
    dist.destroy_process_group()
    Path(f"{store}.{rank}").write_text(json.dumps(sorted(set(calls))))


if __name__ == "__main__":
    second = os.fork()
    main(0 if second else 1, sys.argv[1])
    if second:
        assert os.waitpid(second, 0)[1] == 0
