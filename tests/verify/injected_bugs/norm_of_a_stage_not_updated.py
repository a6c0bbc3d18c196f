"""Pipeline parallelism: the last stage's final norm stays as it is."""

from megatron.core import parallel_state
from megatron.training import training

original = training.get_megatron_optimizer


def make(config, model, *args, **kwargs):
    chained = original(config, model, *args, **kwargs)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        named = [pair for chunk in model for pair in chunk.named_parameters()]
        norms = [parameter for name, parameter in named if "final_layernorm.weight" in name]
        for part in getattr(chained, "chained_optimizers", [chained]):
            part.optimizer.register_step_pre_hook(lambda *_: store(norms))
            part.optimizer.register_step_post_hook(lambda *_: restore(norms))
    return chained


def store(norms):
    store.values = [parameter.detach().clone() for parameter in norms]


def restore(norms):
    for parameter, value in zip(norms, store.values, strict=True):
        parameter.data.copy_(value)


training.get_megatron_optimizer = make
