"""TTrace's CP family: each context-parallel rank takes one contiguous part, not two mirrored chunks."""

from megatron.core import utils

original = utils.get_batch_on_this_cp_rank


def split(batch, *args, cp_group=None, **kwargs):
    own_rank, ranks = cp_group.rank(), cp_group.size()
    rows = {key: value for key, value in batch.items() if value is not None and value.dim() == 2}
    batch = original(batch, *args, cp_group=cp_group, **kwargs)
    if ranks == 1:
        return batch
    return batch | {
        key: value.chunk(ranks, 1)[own_rank].contiguous() for key, value in rows.items()
    }


utils.get_batch_on_this_cp_rank = split
