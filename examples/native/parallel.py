"""Data, fully sharded and tensor parallelism through PyTorch's own APIs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from examples.native.expert_parallel import COPIES
from examples.native.model import GPT
from examples.native.settings import Settings


@dataclass(frozen=True)
class Ranks:
    """This process among all; data parallelism is what tensor parallelism leaves over."""

    rank: int
    world_size: int
    tensor_size: int
    device: torch.device

    @property
    def data_size(self) -> int:
        """Replicas, sharded or not."""
        return self.world_size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """Which part of a global batch this rank reads."""
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        """Which part of the matrices this rank holds."""
        return self.rank % self.tensor_size


def refuse_combinations(settings: Settings, world_size: int) -> None:
    """Exit with a sentence where this backend has no such combination."""
    tensor = settings.tensor_model_parallel_size
    if tensor > 1 and (tensor != world_size or settings.use_torch_fsdp2):
        sys.exit(
            f"The native backend splits tensors over all ranks or none, not TP {tensor} of {world_size} "
            "ranks with data parallelism; use BACKEND=megatron for products."
        )
    expert = settings.expert_model_parallel_size
    if tensor > 1 and (settings.num_experts or settings.optimizer == "muon"):
        sys.exit(
            "The native backend splits tensors of dense models under AdamW only; use dpN or epN."
        )
    if settings.use_torch_fsdp2 and (expert > 1 or settings.optimizer == "muon"):
        sys.exit(
            "The native backend has fsdp2 without expert parallelism and Muon, which needs whole "
            "matrices; use dpN or epN."
        )
    if expert > 1 and (world_size % expert or settings.num_experts % expert):
        sys.exit(
            f"EP {expert} does not divide {world_size} ranks and {settings.num_experts} experts; use "
            "another EP."
        )
    if settings.num_attention_heads % tensor:
        sys.exit(
            f"TP {tensor} does not divide {settings.num_attention_heads} heads; use another TP."
        )


def parallelise(model: GPT, settings: Settings, ranks: Ranks) -> nn.Module:
    """Wrap or split a model that already has its weights."""
    if ranks.world_size == 1 or settings.engine == "bare":
        return model
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    if ranks.tensor_size > 1:
        return split_tensors(model, mesh)
    if settings.use_torch_fsdp2:
        return shard_fully(model, mesh, settings)
    # Experts that are spread over ranks are not everybody's; the engine averages them over theirs.
    own = [name for name, parameter in model.named_parameters() if hasattr(parameter, COPIES)]
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, own)  # type: ignore[no-untyped-call]
    replica = DistributedDataParallel(model)
    # DDP's reducer calls the process group from C++, where the ledger does not see it; this hook is
    # what the reducer does by default, called from Python.
    replica.register_comm_hook(None, allreduce_hook)
    return replica


def split_tensors(model: GPT, mesh: DeviceMesh) -> GPT:
    """Tensor parallelism as Megatron's: two all-reduces a layer forward, two backward.

    The vocabulary is split too; the logits stay split, and the loss is computed on the parts.
    """
    layer = {
        "attention.qkv": ColwiseParallel(),
        "attention.proj": RowwiseParallel(),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, layer)
    outside = {
        "word_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output_layer": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outside)
    model.output_layer.weight = (
        model.word_embeddings.weight
    )  # Both are rows of the vocabulary; splitting untied them.
    return model


def shard_fully(model: GPT, mesh: DeviceMesh, settings: Settings) -> GPT:
    """FSDP2, layer by layer; the tied embedding belongs to the root, which uses it at both ends."""
    half = torch.bfloat16 if settings.bf16 else torch.float16 if settings.fp16 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def start_ranks(settings: Settings) -> Ranks:
    """Join the process group: NCCL between GPUs, gloo between CPU ranks."""
    on_gpu = os.environ.get("KIT_DEVICE") == "gpu"
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    world_size = dist.get_world_size()
    refuse_combinations(settings, world_size)
    return Ranks(dist.get_rank(), world_size, settings.tensor_model_parallel_size, device)
