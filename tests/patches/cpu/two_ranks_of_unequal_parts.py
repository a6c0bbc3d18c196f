"""Two ranks, the second forked from the first: prints what each gathers and keeps of a sum.

The parts have 1 and 2 rows. The argument is a file in which the ranks find each other.
"""

import os
import sys

import torch
from torch import distributed

from megatron_patches.cpu.variable_size_collectives import (
    gather_list,
    gather_parts,
    reduce_scatter_parts,
)

ROWS = [1, 2]

second = os.fork()
rank = 0 if second else 1
distributed.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=2)
group = distributed.group.WORLD
assert group is not None
part = torch.full((ROWS[rank], 2), float(rank + 1))
gathered = gather_parts(part, group, ROWS)
whole = torch.arange(6.0).view(3, 2) * (rank + 1)
kept = reduce_scatter_parts(whole, group, ROWS)
listed = [part if number == rank else torch.empty(rows, 2) for number, rows in enumerate(ROWS)]
gather_list(listed, part, group)
answers: list[object] = [None, None]
distributed.all_gather_object(
    answers, (gathered.tolist(), kept.tolist(), torch.cat(listed).tolist())
)
if rank == 0:
    print(answers)
# No reference to the group may remain, or gloo's threads end with the interpreter, which then aborts.
del group
distributed.barrier()
distributed.destroy_process_group()
if second:
    assert os.waitpid(second, 0)[1] == 0
