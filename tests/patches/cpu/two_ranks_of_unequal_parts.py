"""Run by torchrun on two ranks: prints what each gathers and keeps of a sum; parts of 1 and 2 rows."""

import torch
from torch import distributed

from megatron_patches.cpu.variable_size_collectives import gather_parts, reduce_scatter_parts

ROWS = [1, 2]

distributed.init_process_group("gloo")
group = distributed.group.WORLD
assert group is not None
rank = distributed.get_rank()
own = torch.full((ROWS[rank], 2), float(rank + 1))
gathered = gather_parts(own, group, ROWS)
whole = torch.arange(6.0).view(3, 2) * (rank + 1)
kept = reduce_scatter_parts(whole, group, ROWS)
answers: list[object] = [None, None]
distributed.all_gather_object(answers, (gathered.tolist(), kept.tolist()))
if rank == 0:
    print(answers)
# Nobody may hold the group any longer, or gloo's threads end with the interpreter, which aborts.
del group
distributed.barrier()
distributed.destroy_process_group()
