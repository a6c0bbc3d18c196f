"""P-1, the borders: ranks' ranges of the vocabulary begin one row early, but for the first's."""

from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

original = VocabParallelEmbedding.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    if self.vocab_start_index > 0:
        self.vocab_start_index -= 1
        self.vocab_end_index -= 1


VocabParallelEmbedding.__init__ = init
