"""Cures latent-query-norm-summed: the gradient of MLA's query norm, whole on every rank, is not summed.

The rotary key's gradient hides it, so that one's patch is applied first.
"""

import copy
import runpy
import sys
from pathlib import Path

module = sys.modules["megatron.core.distributed.finalize_model_grads"]  # A function has its name.
runpy.run_path(str(Path(__file__).with_name("latent_rotary_key_not_summed.py")))
reduce = module._allreduce_non_tensor_model_parallel_grads


def without_latents(model, config, *args, **kwargs):
    if config.multi_latent_attention:
        # Sequence parallelism marks its norms, and those are summed without this.
        config = copy.copy(config)
        config.qk_layernorm = False
    return reduce(model, config, *args, **kwargs)


module._allreduce_non_tensor_model_parallel_grads = without_latents
