"""C11 (cac8d1a3), for the z loss: each rank's is not divided by the ranks that share the sequence."""

from types import SimpleNamespace

from megatron.core.transformer.moe.router import TopKRouter

original = TopKRouter.apply_z_loss


def apply(self, *args, **kwargs):
    group = self.tp_cp_group
    self.tp_cp_group = SimpleNamespace(size=lambda: 1)
    try:
        return original(self, *args, **kwargs)
    finally:
        self.tp_cp_group = group


TopKRouter.apply_z_loss = apply
