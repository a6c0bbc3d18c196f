"""The loss' gradient is multiplied by the number of tensor ranks, as if it had been a mean over them."""

from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

original = VocabParallelCrossEntropy.calculate_gradients


@staticmethod
def calculate(*args):
    ranks = get_tensor_model_parallel_world_size()
    gradient = original(*args)
    return gradient if ranks == 1 else gradient.mul_(ranks)


VocabParallelCrossEntropy.calculate_gradients = calculate
