"""P-4 (twin of A11, #7452): each rank keeps the gradient that its own heads give to q_layernorm."""

import sys

finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
finalize._allreduce_non_tensor_model_parallel_grads = lambda *args, **kwargs: None
