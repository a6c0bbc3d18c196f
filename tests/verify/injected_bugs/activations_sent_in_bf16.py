"""Activations lose precision between stages: an fp32 run sends what bf16 can hold."""

import sys

p2p = sys.modules["megatron.core.pipeline_parallel.p2p_communication"].P2PCommunicator
original = p2p._communicate


def communicate(self, *, tensor_send_next, **kwargs):
    if tensor_send_next is not None:
        tensor_send_next = tensor_send_next.detach().bfloat16().float()
    return original(self, tensor_send_next=tensor_send_next, **kwargs)


p2p._communicate = communicate
