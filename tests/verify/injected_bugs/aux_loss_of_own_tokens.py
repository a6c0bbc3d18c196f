"""C9 (!3279): the load-balancing loss counts a rank's own tokens for each expert, not the group's."""

from megatron.core.transformer.moe import router

original = router.get_tokens_per_expert_and_token_count


def count(routing_map, reduce_group, **kwargs):
    _, own_tokens, total = original(routing_map, reduce_group, **kwargs)
    return routing_map.sum(dim=0) * reduce_group.size(), own_tokens, total


router.get_tokens_per_expert_and_token_count = count
