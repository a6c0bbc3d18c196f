"""Flight recorder dumps of jobs that are made up call by call."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECOND = 10**9
START = 1_700_000_000 * SECOND
TENSOR, DATA, WORLD = "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP", "default_pg"


@dataclass
class Job:
    """Groups by name, with description and ranks; and each rank's calls."""

    groups: Mapping[str, tuple[str, Sequence[int]]]
    entries: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    backend: str = "nccl"
    has_status: bool = False
    """Whether dumps hold NCCL's count per group, and of the calls only those that are not done."""

    def call(
        self,
        ranks: Sequence[int],
        group: str,
        operation: str = "all_reduce",
        *,
        done: bool = True,
        size: int = 4,
        dtype: str = "Float",
        line: int = 1,
        function: str = "forward_step",
    ) -> None:
        """These ranks make the next call of a group."""
        for rank in ranks:
            mine = self.entries.setdefault(rank, [])
            number = 1 + sum(made_call["process_group"][0] == group for made_call in mine)
            mine.append(
                {
                    "record_id": len(mine),
                    "pg_id": 0,
                    "process_group": (group, self.groups[group][0]),
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "profiling_name": f"{self.backend}:{operation}",
                    "time_created_ns": START + len(mine) * SECOND // 100,
                    "input_sizes": [[size]],
                    "input_dtypes": [dtype],
                    "state": "completed" if done else "scheduled",
                    "retired": done,
                    "is_p2p": False,
                    "frames": [
                        {
                            "name": "_reduce",
                            "filename": "/x/megatron/core/mappings.py",
                            "line": line,
                        },
                        {"name": "_forward_mlp", "filename": "/x/transformer_layer.py", "line": 9},
                        {"name": function, "filename": "/x/megatron/schedules.py", "line": 5},
                    ],
                }
            )

    def dump(self, rank: int) -> dict[str, Any]:
        """What a rank leaves, a minute after the start."""
        config = {
            name: {"name": name, "desc": description, "ranks": str(list(ranks))}
            for name, (description, ranks) in self.groups.items()
            if rank in ranks
        }
        calls = self.entries.get(rank, [])
        dump = {
            "version": "2.10",
            "pg_config": config,
            "entries": calls,
            "dumped_ns": START + 60 * SECOND,
        }
        if self.has_status:
            dump["pg_status"] = {
                str(number): self.count(calls, name) for number, name in enumerate(config)
            }
            dump["entries"] = [call for call in calls if not call["retired"]]
        return dump

    def count(self, calls: Sequence[Mapping[str, Any]], group: str) -> dict[str, int]:
        """Return NCCL's count of a group: the last collectives that were enqueued and completed."""
        of_group = [call for call in calls if call["process_group"][0] == group]
        enqueued = [call["collective_seq_id"] for call in of_group]
        completed = [call["collective_seq_id"] for call in of_group if call["retired"]]
        return {
            "last_enqueued_collective": max(enqueued, default=-1),
            "last_started_collective": -1,
            "last_completed_collective": max(completed, default=-1),
        }

    def write(self, folder: Path, without: Sequence[int] = ()) -> Path:
        """A pickle for each rank."""
        folder.mkdir(exist_ok=True)
        for rank in self.entries:
            if rank not in without:
                (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(self.dump(rank)))
        return folder


def four() -> Job:
    """TP 2 × DP 2 after three equal iterations."""
    job = Job(
        {
            "0": (WORLD, range(4)),
            "1": (TENSOR, (0, 1)),
            "2": (TENSOR, (2, 3)),
            "3": (DATA, (0, 2)),
            "4": (DATA, (1, 3)),
        }
    )
    for _ in range(3):
        step(job)
    return job


def step(job: Job) -> None:
    """One iteration of all four."""
    for _ in range(4):
        job.call((0, 1), "1")
        job.call((2, 3), "2")
    job.call((0, 2), "3", size=100, line=2, function="train_step")
    job.call((1, 3), "4", size=100, line=2, function="train_step")
    job.call(range(4), "0", size=1, line=3, function="train_step")
