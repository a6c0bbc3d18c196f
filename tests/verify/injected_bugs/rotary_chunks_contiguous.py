"""CP with rotary positions: the angles are those of one contiguous part, the tokens of two chunks."""

from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding


def part(angles, dimension, cp_group):
    return angles.chunk(cp_group.size(), dimension)[cp_group.rank()]


rotary_pos_embedding.get_pos_emb_on_this_cp_rank = part
yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = part
