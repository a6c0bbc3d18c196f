"""Cures balance-by-token-over-sequence-ranks: a sequence has the tokens of all its ranks."""

from megatron.core import parallel_state
from megatron.core.transformer.moe import router
from megatron.training import get_args

attach = router.MoEAuxLossAutoScaler.apply


def attached(activation, loss):
    ranks = 1
    if get_args().calculate_per_token_loss:
        ranks = parallel_state.get_tensor_and_context_parallel_group().size()
    return attach(activation, loss * ranks)


router.MoEAuxLossAutoScaler.apply = attached
