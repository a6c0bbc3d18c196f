"""The gradient of the MTP loss counts once for each tensor-parallel rank."""

from megatron.core import parallel_state
from megatron.core.transformer import multi_token_prediction

original = multi_token_prediction.MTPLossAutoScaler.set_loss_scale


def scale(value):
    original(value * parallel_state.get_tensor_model_parallel_world_size())


multi_token_prediction.MTPLossAutoScaler.set_loss_scale = staticmethod(scale)
