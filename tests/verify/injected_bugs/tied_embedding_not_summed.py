"""TTrace's tied embedding: the first and the last stage keep their own part of its gradient."""

import sys

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
finalize._allreduce_word_embedding_grads = lambda *args, **kwargs: None
