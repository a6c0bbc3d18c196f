"""Bytes that a library sends, as counted by the network interface."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.config.run import Transport
from parakit.costs.operations import Operation, describe_algorithm, wire_bytes
from tests.patience import OF_A_RUN

PAYLOAD = 24_000_000
AT_THE_ROOT = ("gather", "scatter")
"""Operations that are counted on a single rank, because the other ranks have no list of tensors."""
CAN_COUNT = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")

# The ranks are in a separate network without other traffic, so the loopback counts the bytes of all ranks.
COUNT = """
import json, sys
import torch
import torch.distributed as dist

def sent():
    line = next(line for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
    return int(line.split()[9])

dist.init_process_group("gloo")
rank, ranks, elements = dist.get_rank(), dist.get_world_size(), int(sys.argv[1]) // 4
whole, part = torch.ones(elements), torch.ones(elements // ranks)
pieces = list(whole.chunk(ranks))
other = torch.empty(elements)
calls = {
    "all_reduce": lambda: dist.all_reduce(whole),
    "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    "all_to_all": lambda: dist.all_to_all_single(other, whole),
    "broadcast": lambda: dist.broadcast(whole, 0),
    "reduce": lambda: dist.reduce(whole, 0),
    "gather": lambda: dist.gather(part, pieces if rank == 0 else None, 0),
    "scatter": lambda: dist.scatter(part, pieces if rank == 0 else None, 0),
}
found = {}
for name, call in calls.items():
    dist.barrier()
    before = sent()
    dist.barrier()
    call()
    dist.barrier()
    found[name] = sent() - before
    dist.barrier()
if rank == 0:
    open(sys.argv[2], "w").write(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(not CAN_COUNT, reason="needs root, unshare and ip")
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_sent_by_gloo_equal_the_communication_log(tmp_path: Path, ranks: int) -> None:
    program, result = tmp_path / "count.py", tmp_path / "sent.json"
    program.write_text(COUNT)
    run = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {ranks}"
    script = f"ip link set lo up && exec {run} {program} {PAYLOAD} {result}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ("unshare", "-n", "sh", "-c", script)
    subprocess.run(command, check=True, env=environment, timeout=OF_A_RUN)
    for name, sent in json.loads(result.read_text()).items():
        counting = 1 if name in AT_THE_ROOT else ranks
        expected = counting * wire_bytes(Operation(name), PAYLOAD, ranks, Transport.GLOO)
        # Headers, barriers and retransmissions of a busy machine add to the bytes.
        assert expected <= sent < 1.06 * expected, name


def test_reduce_scatter_costs_twice_as_much_under_gloo() -> None:
    sent = [wire_bytes(Operation.REDUCE_SCATTER, 4000, 4, transport) for transport in Transport]
    assert sent == [3000, 6000]
    assert "all-reduce" in describe_algorithm(Operation.REDUCE_SCATTER, Transport.GLOO)


@given(st.integers(2, 64), st.integers(0, 2**24))
def test_an_all_gather_and_an_all_reduce_cost_the_same_under_both(ranks: int, payload: int) -> None:
    for operation in (Operation.ALL_GATHER, Operation.ALL_REDUCE, Operation.ALL_TO_ALL):
        gloo_or_nccl_bytes, other = (
            wire_bytes(operation, payload, ranks, transport) for transport in Transport
        )
        assert gloo_or_nccl_bytes == other
