"""P-17: parameters that every tensor-parallel rank holds whole are counted once a rank in the norm."""

from megatron.core import tensor_parallel

tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *args, **kwargs: True
