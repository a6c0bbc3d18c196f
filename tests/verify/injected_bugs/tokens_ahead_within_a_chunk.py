"""Multi-token prediction under context parallelism: tokens ahead come from a rank's own chunks alone."""

import sys

mtp = sys.modules["megatron.core.transformer.multi_token_prediction"]
original = mtp.roll_tensor


def roll(tensor, *args, cp_group=None, **kwargs):
    return original(tensor, *args, cp_group=None, **kwargs)


mtp.roll_tensor = roll
