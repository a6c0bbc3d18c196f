"""CP with rotary positions: each rank counts from 0, as if its tokens were the whole sequence."""

from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding


def part(angles, dimension, cp_group):
    return angles.chunk(cp_group.size(), dimension)[0]


rotary_pos_embedding.get_pos_emb_on_this_cp_rank = part
yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = part
