"""All patches, in the order they are applied: torch first, because Megatron imports its names."""

from __future__ import annotations

from megatron_patches import (
    adam_step,
    attention,
    cuda_extensions,
    dataset_helpers,
    device_mesh,
    experts,
    fsdp_in_order,
    gradient_norm,
    host_device,
    ledger,
    loader_seed,
    routing,
    sequence_parallel_norm,
    shared_device,
    start_weights,
    tensors_on_host,
    uncompiled,
    uneven_parts,
)
from megatron_patches.fused import (
    adamw,
    attention_backend,
    bias_gelu,
    cross_entropy,
    gradient_gemm,
    multi_tensor,
    norm,
)
from megatron_patches.registry import Patch

PATCHES: tuple[Patch, ...] = (
    host_device.PATCH,
    uncompiled.PATCH,
    tensors_on_host.PATCH,
    cuda_extensions.PATCH,
    adamw.PATCH,
    shared_device.PATCH,
    device_mesh.PATCH,
    dataset_helpers.PATCH,
    gradient_norm.PATCH,
    sequence_parallel_norm.PATCH,
    attention.PATCH,
    attention_backend.FLASH,
    attention_backend.CUDNN,
    bias_gelu.PATCH,
    norm.PATCH,
    cross_entropy.PATCH,
    multi_tensor.PATCH,
    gradient_gemm.PATCH,
    experts.SPLITS,
    uneven_parts.PATCH,
    experts.GATE,
    ledger.PATCH,
    routing.PATCH,
    fsdp_in_order.PATCH,
    start_weights.PATCH,
    loader_seed.PATCH,
    adam_step.PATCH,
)
