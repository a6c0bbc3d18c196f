"""Cures muon-sharded-in-fp32: without bf16 the layer-wise optimizer wraps its optimizers as well."""

from megatron.core.optimizer import layer_wise_optimizer as module

optimizer = module.LayerWiseDistributedOptimizer
build = optimizer.__init__


def wrapped(self, optimizers, config, *args, init_state_fn_list=None, model_chunks=None):
    given = {"init_state_fn_list": init_state_fn_list, "model_chunks": model_chunks}
    build(self, optimizers, config, *args, **given)
    if not config.bf16:
        pairs = zip(optimizers, init_state_fn_list, strict=True)
        inner = [module.FP32Optimizer(one, config, state) for one, state in pairs]
        module.ChainedOptimizer.__init__(self, inner)
        self.model_chunks = model_chunks


optimizer.__init__ = wrapped
