"""After the reduction layer 1's and 2's attention projections have one another's gradient."""

import sys

from megatron.core import parallel_state

training = sys.modules["megatron.training.training"]
schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
original = finalize._allreduce_non_tensor_model_parallel_grads


def after_reduction(model, *args, **kwargs):
    original(model, *args, **kwargs)
    if parallel_state.get_data_parallel_world_size() > 1:
        by_name = {n.removeprefix("module."): p for n, p in model[0].named_parameters()}
        a, b = (
            next(
                p
                for n, p in by_name.items()
                if n.endswith(f"layers.{i}.self_attention.linear_proj.weight")
            )
            for i in (1, 2)
        )
        kept = a.main_grad.clone()
        a.main_grad.copy_(b.main_grad)
        b.main_grad.copy_(kept)


finalize._allreduce_non_tensor_model_parallel_grads = after_reduction
