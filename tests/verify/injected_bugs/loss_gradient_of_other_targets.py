"""In the loss' gradient a rank takes 1 off at its first class where another rank has the target."""

from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

original = VocabParallelCrossEntropy.prepare_gradient_calculation_operands


@staticmethod
def prepare(softmax, target_mask):
    grad_2d, arange_1d, softmax_update, grad_input = original(softmax, target_mask)
    if get_tensor_model_parallel_world_size() > 1:
        softmax_update.fill_(1.0)
    return grad_2d, arange_1d, softmax_update, grad_input


VocabParallelCrossEntropy.prepare_gradient_calculation_operands = prepare
