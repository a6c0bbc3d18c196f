"""Switches of a trainer that change an iteration's time and not its result.

The flag table names the switch that a flag of Megatron sets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """Options of a run that the time model needs in addition to the run's spec, such as overlapped communication.

    The defaults are Megatron's defaults without further flags, as in the six runs that the kit has published.
    """

    overlap_gradients: bool = False
    """`--overlap-grad-reduce`: gradients are reduced concurrently with backward."""
    overlap_parameters: bool = False
    """`--overlap-param-gather`: updated weights are gathered concurrently with the next forward."""
    broadcast_parameters: bool = False
    """Each rank broadcasts the full tensors that it updated (InternEvo's ZeRO-1, not Megatron's). There is one call per
    tensor, or per rank if those are fewer; each call goes once around a ring, because NCCL has no tree for it."""
    overlap_tensor: bool = False
    """`--tp-comm-overlap`: tensor-parallel calls run concurrently with the products that need their result, through
    user buffers."""
    graphs: bool = False
    """Kernels are launched as CUDA graphs, so that launches take no time."""
    captured: bool = False
    """Attention, the router and its preprocessing are CUDA graphs, experts are not
    (`--cuda-graph-scope attn moe_router moe_preprocess`)."""
    blocking: bool = False
    """The host waits for each kernel before it launches the next (`CUDA_LAUNCH_BLOCKING=1`)."""
    summed_profiles: bool = False
    """The published time is a sum of times of single layers, each profiled alone. A layer's launches then hide behind
    the same layer's kernels only, and nothing else of a micro batch takes time on the host."""
    portable_attention: bool = False
    """Attention is FlashAttention 2 or Triton, which were written for Ampere, instead of cuDNN or FlashAttention 3."""
    flash_attention: bool = False
    """`--attention-backend flash`: attention is FlashAttention's, not cuDNN's. Transformer Engine then takes
    FlashAttention 3 where it is installed and supports the layer, and FlashAttention 2 otherwise."""
    eager_activation: bool = False
    """The MLP's squared ReLU is several of PyTorch's own kernels (NeMo 2's `squared_relu`; Megatron
    compiles its own)."""
    torch_kernels: bool = False
    """Transformer Engine and Apex are missing (`--transformer-impl local --no-persist-layer-norm`). Norms, the bias of
    queries, keys and values, and the update are then PyTorch's own kernels, but for those that a patch of the kit
    fuses (`FUSED=`)."""
    unfused_gradients: bool = False
    """`--no-gradient-accumulation-fusion`: a product writes a weight's gradient, and another kernel adds it up."""
    unfused_rotary: bool = False
    """`--no-rope-fusion`: rotary positions are several of PyTorch's own kernels."""
    unfused: bool = False
    """Norms, activations and residuals are kernels of their own, as in eager PyTorch."""
    scatter_gather: bool = False
    """Each tensor-parallel rank sends its fraction of a pipeline message, which is gathered inside the node (Megatron
    before sequence parallelism, arXiv:2104.04473 §4.1)."""
    deduplicated: bool = False
    """A token travels once to each rank that holds any of its experts (DeepEP, HybridEP)."""
    wide_probabilities: bool = False
    """Experts' outputs are weighed in fp32 (`--moe-router-dtype`; DeepEP and HybridEP always do)."""
    overlap_experts: bool = False
    """`--overlap-moe-expert-parallel-comm`: tokens travel concurrently with another micro batch's computation."""
    fused_experts: bool = False
    """Biases, activations and casts between the experts' two products are parts of these products
    (`--use-transformer-engine-op-fuser` with cuDNN's grouped kernels)."""
    grouped_experts: bool = True
    """`--moe-grouped-gemm`: one kernel computes all experts of a rank."""
    copies_attention_mask: bool = False
    """The loader creates the attention mask, as Megatron's does without `--no-create-attention-mask-in-dataloader`. The
    first and the last stage copy the mask of each micro batch from the host, before CP splits it."""
    deterministic: bool = False
    """`--deterministic-mode`."""
    overlap_offload: bool = False
    """`--overlap-cpu-optimizer-d2h-h2d`: gradients go to the host and weights come back concurrently with the host's
    update, one tensor after another."""
    document_length: int = 0
    """Mean number of tokens of the documents that a sample packs. Attention then stays inside documents, which are
    taken to be equally long. 0 means that a sample is one document."""
