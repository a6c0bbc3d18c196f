"""List all patches in the order in which they are applied.

Patches of torch come first, because Megatron's modules import torch's names when they are loaded.
"""

from __future__ import annotations

from megatron_patches import (
    dataset_helpers,
    ledger,
    numpy2_compat,
    routing,
    shared_device,
    start_weights,
)
from megatron_patches.capture import step as capture
from megatron_patches.cpu import (
    cpu_factories,
    cuda_extensions,
    fake_cuda,
    fsdp,
    gradient_norm,
    loader_seed,
    no_dynamo,
    results_queue,
    variable_size_collectives,
)
from megatron_patches.fused import (
    adamw,
    attention_backend,
    bias_gelu,
    bias_gemm,
    cross_entropy,
    gradient_gemm,
    multi_tensor,
    norm,
)
from megatron_patches.logprob import rank as logprob
from megatron_patches.no_te import adam_step, attention, router_gate, sequence_parallel_norm
from megatron_patches.registry import Patch

PATCHES: tuple[Patch, ...] = (
    fake_cuda.PATCH,
    no_dynamo.PATCH,
    cpu_factories.PATCH,
    cuda_extensions.PATCH,
    adamw.PATCH,
    shared_device.PATCH,
    fsdp.MESH,
    dataset_helpers.PATCH,
    gradient_norm.PATCH,
    sequence_parallel_norm.PATCH,
    attention.PATCH,
    attention_backend.FLASH,
    attention_backend.CUDNN,
    bias_gelu.PATCH,
    bias_gemm.PATCH,
    norm.PATCH,
    cross_entropy.PATCH,
    multi_tensor.PATCH,
    gradient_gemm.PATCH,
    variable_size_collectives.SPLITS,
    variable_size_collectives.PATCH,
    router_gate.PATCH,
    ledger.PATCH,
    routing.PATCH,
    fsdp.ORDER,
    fsdp.NAMES,
    start_weights.PATCH,
    start_weights.WITH_NOISE,
    loader_seed.PATCH,
    results_queue.PATCH,
    numpy2_compat.PATCH,
    adam_step.PATCH,
    capture.PATCH,
    logprob.PATCH,
)
