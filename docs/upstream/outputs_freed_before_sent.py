"""Cures outputs-freed-before-sent: the memory of the last outputs is kept until they were sent."""

from collections import deque

import torch
from megatron.core.pipeline_parallel import schedules

deallocate = schedules.deallocate_output_tensor
kept = deque(maxlen=64)


def keeping(out, *args, **kwargs):
    if torch.is_tensor(out):
        kept.append(out.data)
    deallocate(out, *args, **kwargs)


schedules.deallocate_output_tensor = keeping
