"""Muon that is split by layers: the gradient norm of a rank is that of the layers which the rank updates."""

from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer


def get_grad_norm(self):
    gradients = []
    for part in self.chained_optimizers:
        gradients += part.get_grads_for_grad_norm()
    return sum(float(gradient.norm()) ** 2 for gradient in gradients) ** 0.5


LayerWiseDistributedOptimizer.get_grad_norm = get_grad_norm
