"""Cures experts-of-two-stages-alike: each pipeline stage seeds its experts apart from all others."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_expert_parallel_rng_tracker_name,
)

add = CudaRNGStatesTracker.add


def apart(self, name, seed):
    if name == get_expert_parallel_rng_tracker_name():
        seed += 1_000_000 * parallel_state.get_pipeline_model_parallel_rank()
    add(self, name, seed)


CudaRNGStatesTracker.add = apart
