"""Cures expert-gradients-scaled-again: gradients that no other rank has are scaled as they come in."""

from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module

init = module.ParamAndGradBuffer.__init__


def scaled_once(self, *args, **kwargs):
    init(self, *args, **kwargs)
    for group in self.parameter_groups:
        buffer = group.main_grad_buffer
        if buffer is None or buffer.data_parallel_group.size() > 1:
            continue
        factor, buffer.gradient_scaling_factor = buffer.gradient_scaling_factor, None
        if factor is not None:
            for parameter in group.params:
                parameter.register_hook(lambda gradient, factor=factor: gradient * factor)


module.ParamAndGradBuffer.__init__ = scaled_once
