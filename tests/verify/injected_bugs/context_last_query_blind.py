"""Context parallelism: the last query of each rank does not see the first token of the sequence."""

from megatron.core import parallel_state
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax

original = FusedScaleMaskSoftmax.forward


def forward(self, scores, mask, *args, **kwargs):
    if parallel_state.get_context_parallel_world_size() > 1 and mask is not None:
        mask = mask.clone()
        mask[..., -1, 0] = True
    return original(self, scores, mask, *args, **kwargs)


FusedScaleMaskSoftmax.forward = forward
