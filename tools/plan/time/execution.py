"""How a trainer runs what a spec says: switches that change an iteration's time and not its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """The defaults are Megatron's without further flags, as the published six ran."""

    overlap_gradients: bool = False
    """`--overlap-grad-reduce`: gradients are reduced beside backward."""
    overlap_parameters: bool = False
    """`--overlap-param-gather`: updated weights are gathered beside the next forward."""
    overlap_tensor: bool = False
    """`--tp-comm-overlap`: TP's calls run beside the products that they feed, through user buffers."""
    graphs: bool = False
    """Kernels are launched as CUDA graphs: the host costs nothing."""
    frozen: bool = False
    """The weights are not trained (LoRA): backward computes no weight gradients, nothing is reduced."""
    portable_attention: bool = False
    """FlashAttention 2 or Triton in place of cuDNN or FlashAttention 3: written for Ampere."""
    unfused: bool = False
    """Norms, activations and residuals are kernels of their own, as in eager PyTorch."""
    scatter_gather: bool = False
    """Each TP rank sends its share of a pipeline message, which is gathered inside the node (Megatron
    before sequence parallelism, arXiv:2104.04473 §4.1)."""
    deduplicated: bool = False
    """A token travels once to each rank that holds any of its experts (DeepEP, HybridEP)."""
    grouped_experts: bool = True
    """`--moe-grouped-gemm`: one kernel computes all experts of a rank."""
    deterministic: bool = False
    """`--deterministic-mode`."""
    fused_loss: bool = False
    """`--cross-entropy-loss-fusion`: one kernel reads the logits and writes their gradient in place."""
