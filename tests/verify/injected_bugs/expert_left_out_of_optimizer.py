"""DeepSpeed #8354: with expert parallelism the last local expert is in no optimizer's groups."""

import sys

from megatron.core import parallel_state

module = sys.modules["megatron.core.optimizer"]
original = module._get_param_groups


def groups(model_chunks, *args, **kwargs):
    groups = original(model_chunks, *args, **kwargs)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        lost = {
            id(p)
            for m in model_chunks
            for n, p in m.named_parameters()
            if "local_experts.3." in n and "layers.1." in n
        }
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in lost]
    return groups


module._get_param_groups = groups
