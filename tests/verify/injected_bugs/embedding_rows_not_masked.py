"""P-1: rows of other ranks' tokens are not zeroed, so each rank adds a row of its own for them."""

from megatron.core.tensor_parallel import layers
from torch.nn import functional

original = layers.VocabParallelEmbedding.forward


def forward(self, input_):
    if self.tp_group.size() == 1:
        return original(self, input_)
    local = (input_ - self.vocab_start_index).clamp(0, self.num_embeddings_per_partition - 1)
    rows = functional.embedding(local, self.weight)
    return layers.reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)


layers.VocabParallelEmbedding.forward = forward
