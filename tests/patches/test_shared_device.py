"""The staging of tensors through the host: CPU tensors play the device's part."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_patches import shared_device
from megatron_patches.shared_device import stage
from tests.patience import OF_A_RUN, PATIENCE
from tools.spec.files import ROOT

Group = Any


class StagedGroup:
    """A gloo group whose methods stage, and which keeps what gloo was given."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.given: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name)

        def original(_: Any, *args: Any, **kwargs: Any) -> Any:
            self.given.append(args)
            return method(*args, **kwargs)

        return lambda *args, **kwargs: stage(name, original, "cpu")(None, *args, **kwargs)


def on_two_ranks(work: Callable[[StagedGroup, int], Any]) -> list[Any]:
    store, found = dist.HashStore(), {}

    def rank_work(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=PATIENCE))
        found[rank] = work(StagedGroup(group), rank)

    threads = [threading.Thread(target=rank_work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert sorted(found) == [0, 1]
    return [found[rank] for rank in range(2)]


def test_an_all_reduce_reaches_the_tensor_itself_through_a_copy() -> None:
    def work(group: StagedGroup, rank: int) -> tuple[list[float], bool]:
        tensor = torch.full((2,), 1.0 + rank)
        group.allreduce([tensor])
        return tensor.tolist(), group.given[0][0][0].data_ptr() == tensor.data_ptr()

    assert on_two_ranks(work) == [([3.0, 3.0], False)] * 2


def test_a_gather_fills_a_buffer_that_holds_its_own_input() -> None:
    def work(group: StagedGroup, rank: int) -> list[float]:
        buffer = torch.full((4,), -1.0)
        mine = buffer[2 * rank : 2 * rank + 2].fill_(rank)
        group.allgather([[buffer[:2], buffer[2:]]], [mine])
        return buffer.tolist()

    assert on_two_ranks(work) == [[0, 0, 1, 1]] * 2


def test_a_reduce_scatter_into_a_part_of_its_own_input_keeps_the_result() -> None:
    def work(group: StagedGroup, rank: int) -> list[float]:
        buffer = torch.arange(4.0)
        group._reduce_scatter_base(buffer[2 * rank : 2 * rank + 2], buffer)
        return buffer.tolist()

    assert on_two_ranks(work) == [[0, 2, 2, 3], [0, 1, 4, 6]]


def test_two_ranks_may_both_send_before_they_receive() -> None:
    def work(group: StagedGroup, rank: int) -> float:
        sent, received = torch.full((1 << 20,), float(rank)), torch.full((1 << 20,), -1.0)
        sending = group.send([sent], 1 - rank, 0)
        receiving = group.recv([received], 1 - rank, 0)
        sent.fill_(9)  # What was sent is what it held when it was sent.
        for waited in (sending, receiving):
            waited.wait()
        return float(received.unique())

    assert on_two_ranks(work) == [1.0, 0.0]


def test_views_with_gaps_are_sent_and_filled_whole() -> None:
    def work(group: StagedGroup, rank: int) -> list[float]:
        wide = torch.zeros(2, 4)
        wide[:, ::2] = rank + 1
        group.broadcast([wide[:, ::2]])
        return wide.flatten().tolist()

    assert on_two_ranks(work) == [[1, 0, 1, 0, 1, 0, 1, 0]] * 2


def test_tensors_of_the_host_pass_untouched() -> None:
    given: list[Any] = []
    call = stage("allreduce", lambda _, *args: given.append(args), "cuda")
    tensor = torch.ones(1)
    call(None, [tensor])
    assert given[0][0][0] is tensor


def test_every_call_that_moves_tensors_is_staged() -> None:
    moving = {
        "allreduce",
        "broadcast",
        "send",
        "recv",
        "alltoall_base",
        "reduce",
        "gather",
        "scatter",
    }
    assert moving <= set(shared_device._METHODS)
    assert "barrier" not in shared_device._METHODS


def test_torchs_own_functions_stage_whatever_way_they_are_called(tmp_path: Path) -> None:
    ended = subprocess.run(
        (sys.executable, "-m", "tests.patches.staged_ranks", str(tmp_path / "store")),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=OF_A_RUN,
    )
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        staged = json.loads((tmp_path / f"store.{rank}").read_text())
        assert {"allreduce", "broadcast", "allgather", "send", "recv"} <= set(staged)


@pytest.mark.parametrize(("asked", "set_"), [(0, 0), (1, 0), ("cuda:1", 0)])
def test_every_rank_takes_the_one_device(
    asked: Any, set_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found: list[int] = []
    shared_device._to_existing(found.append)(asked)
    assert found == [set_]
