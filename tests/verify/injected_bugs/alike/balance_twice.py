"""In every strategy: the experts' balancing loss has twice its coefficient."""

from megatron.core.transformer.moe import router

original = router.switch_load_balancing_loss_func


def twice(*args, **kwargs):
    return 2 * original(*args, **kwargs)


router.switch_load_balancing_loss_func = twice
