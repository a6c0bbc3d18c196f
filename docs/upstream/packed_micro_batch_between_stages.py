"""Cures packed-micro-batch-between-stages: a stage expects the one sequence into which a micro batch is packed."""

from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args

shapes = schedules.get_tensor_shapes


def of_packed(*, seq_length, micro_batch_size, **others):
    if get_args().dataloader_inter_document_masking:
        seq_length, micro_batch_size = seq_length * micro_batch_size, 1
    return shapes(seq_length=seq_length, micro_batch_size=micro_batch_size, **others)


schedules.get_tensor_shapes = of_packed
