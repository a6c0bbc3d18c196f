"""How a trainer runs what a spec says: switches that change an iteration's time and not its result.

Flags of Megatron that set one name it in the flag table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """The defaults are Megatron's without further flags, as the published six ran."""

    overlap_gradients: bool = False
    """`--overlap-grad-reduce`: gradients are reduced beside backward."""
    overlap_parameters: bool = False
    """`--overlap-param-gather`: updated weights are gathered beside the next forward."""
    broadcast_parameters: bool = False
    """Each rank broadcasts whole tensors that it updated (InternEvo's ZeRO-1, not Megatron's): a call a
    tensor, or a rank if those are fewer, each once around a ring, for which NCCL has no tree."""
    overlap_tensor: bool = False
    """`--tp-comm-overlap`: TP's calls run beside the products that they feed, through user buffers."""
    graphs: bool = False
    """Kernels are launched as CUDA graphs: the host costs nothing."""
    captured: bool = False
    """Attention, the router and what it prepares are CUDA graphs, experts are not
    (`--cuda-graph-scope attn moe_router moe_preprocess`)."""
    blocking: bool = False
    """The host waits for each kernel before it launches the next (`CUDA_LAUNCH_BLOCKING=1`)."""
    frozen: bool = False
    """The weights are not trained (LoRA): backward computes no weight gradients, nothing is reduced."""
    portable_attention: bool = False
    """FlashAttention 2 or Triton in place of cuDNN or FlashAttention 3: written for Ampere."""
    eager_activation: bool = False
    """The MLP's squared ReLU is several of PyTorch's own kernels (NeMo 2's `squared_relu`; Megatron
    compiles its own)."""
    torch_kernels: bool = False
    """Neither Transformer Engine nor Apex is there (`--transformer-impl local --no-persist-layer-norm`):
    norms, the bias of queries, keys and values, and the update are PyTorch's own kernels, but for those
    that a patch of the kit fuses (`FUSED=`)."""
    unfused_gradients: bool = False
    """`--no-gradient-accumulation-fusion`: a product writes a weight's gradient, a kernel adds it."""
    unfused_rotary: bool = False
    """`--no-rope-fusion`: rotary positions are several of PyTorch's own kernels."""
    unfused: bool = False
    """Norms, activations and residuals are kernels of their own, as in eager PyTorch."""
    scatter_gather: bool = False
    """Each TP rank sends its share of a pipeline message, which is gathered inside the node (Megatron
    before sequence parallelism, arXiv:2104.04473 §4.1)."""
    deduplicated: bool = False
    """A token travels once to each rank that holds any of its experts (DeepEP, HybridEP)."""
    wide_probabilities: bool = False
    """Experts' outputs are weighed in fp32 (`--moe-router-dtype`; DeepEP and HybridEP always do)."""
    overlap_experts: bool = False
    """`--overlap-moe-expert-parallel-comm`: tokens travel beside another micro batch's arithmetic."""
    fused_experts: bool = False
    """Biases, activations and casts between the experts' two products are parts of these
    (`--use-transformer-engine-op-fuser` with cuDNN's grouped kernels)."""
    grouped_experts: bool = True
    """`--moe-grouped-gemm`: one kernel computes all experts of a rank."""
    deterministic: bool = False
    """`--deterministic-mode`."""
    overlap_offload: bool = False
    """`--overlap-cpu-optimizer-d2h-h2d`: gradients go to the host and weights come back beside its
    update, a tensor after the other."""
