"""Position embeddings, of which ranks have copies, are drawn with each tensor rank's own seed."""

import torch
from megatron.core.models.common.embeddings import language_model_embedding
from megatron.core.tensor_parallel import get_cuda_rng_tracker

embedding = language_model_embedding.LanguageModelEmbedding
original = embedding.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.add_position_embedding and self.config.tensor_model_parallel_size > 1:
        with get_cuda_rng_tracker().fork(), torch.no_grad():
            self.config.embedding_init_method(self.position_embeddings.weight)


embedding.__init__ = init
