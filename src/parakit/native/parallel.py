"""Data, fully sharded, tensor and expert parallelism through PyTorch's own APIs.

Ranks are laid out as Megatron lays them out: EP groups are neighbours, and the ranks that hold the same
experts, one from each EP group, average those experts' gradients.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from parakit.config import variables
from parakit.native.model import GPT, MixtureOfExperts, run_local_experts
from parakit.native.settings import Settings

COPIES_ATTRIBUTE = "expert_copies"
"""Attribute of an expert's parameters: how many ranks hold the same; absent on all others."""


@dataclass(frozen=True)
class RankLayout:
    """This process's place; data parallelism takes the ranks that tensor parallelism leaves."""

    rank: int
    world_size: int
    tensor_size: int
    device: torch.device
    pipeline_size: int = 1

    @property
    def data_size(self) -> int:
        """Replicas, sharded or not."""
        return self.world_size // (self.tensor_size * self.pipeline_size)

    @property
    def data_rank(self) -> int:
        """Which part of a global batch this rank reads."""
        return self.rank // (self.tensor_size * self.pipeline_size)

    @property
    def tensor_rank(self) -> int:
        """Which part of the matrices this rank holds."""
        return self.rank % self.tensor_size

    @property
    def pipeline_rank(self) -> int:
        """Which stage this rank holds."""
        return self.rank if self.pipeline_size > 1 else 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes the log; in a pipeline the last one alone knows the loss."""
        return self.rank == self.world_size - 1

    def average(self, losses: Tensor) -> Tensor:
        """Means over all replicas, on the rank that writes."""
        if self.pipeline_size > 1:
            return losses
        dist.all_reduce(losses)
        return losses / self.world_size


def refuse_combinations(settings: Settings, world_size: int) -> None:
    """Exit with a sentence where this backend has no such combination."""
    tensor, pipeline = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    if pipeline > 1 and (
        pipeline != world_size
        or not settings.pipeline_schedule
        or settings.num_experts
        or settings.optimizer == "muon"
        or settings.engine != "torch"
    ):
        sys.exit(
            f"The native backend has pipelines of dense models under AdamW over all ranks, not PP "
            f"{pipeline} of {world_size} ranks with {settings.engine} and {settings.optimizer}; use "
            f"one of gpipe{world_size}, 1f1b{world_size} or pipedream{world_size}."
        )
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
    if settings.muon_rule == "pytorch" and settings.muon_fp32_matmul_prec != "medium":
        sys.exit(
            f"--muon-fp32-matmul-prec {settings.muon_fp32_matmul_prec}: PyTorch's Muon makes its "
            "steps in bf16; use OPTIMIZER=megatron-muon."
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


def parallelise(model: nn.Module, settings: Settings, ranks: RankLayout) -> nn.Module:
    """Wrap or split a model that already has its weights."""
    if ranks.world_size == 1 or settings.engine == "bare":
        return model
    assert isinstance(model, GPT)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    if ranks.tensor_size > 1:
        return split_tensors(model, mesh)
    if settings.use_torch_fsdp2:
        # FSDP2, layer by layer; the tied embedding belongs to the root, which uses it at both ends.
        half = torch.bfloat16 if settings.bf16 else torch.float16 if settings.fp16 else None
        policy = MixedPrecisionPolicy(
            param_dtype=half, reduce_dtype=torch.float32 if half else None
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    # DDP must leave out the experts that only some ranks hold; the engine averages those.
    own = [
        name for name, parameter in model.named_parameters() if hasattr(parameter, COPIES_ATTRIBUTE)
    ]
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
    if model.is_tied and model.output_layer and model.word_embeddings:
        # Both are rows of the vocabulary; splitting untied them.
        model.output_layer.weight = model.word_embeddings.weight
    return model


def start_ranks(settings: Settings) -> RankLayout:
    """Join the process group: NCCL between GPUs, gloo between CPU ranks."""
    on_gpu = os.environ.get(variables.DEVICE) == "gpu"
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if settings.engine == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        # Before the group: a default of its `barrier` keeps one that exists when it is imported, and
        # gloo's threads then abort the process at its end (pytorch/pytorch#190489).
        import deepspeed  # type: ignore[import-not-found]  # noqa: F401
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    world_size = dist.get_world_size()
    refuse_combinations(settings, world_size)
    return RankLayout(
        dist.get_rank(),
        world_size,
        settings.tensor_model_parallel_size,
        device,
        settings.pipeline_model_parallel_size,
    )


def end_ranks(settings: Settings) -> None:
    """Destroy the process group; DeepSpeed releases the groups that it made when asked itself."""
    if settings.engine == "deepspeed":
        import deepspeed

        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


class ExpertGroups(NamedTuple):
    """The two groups of this rank."""

    parallel: dist.ProcessGroup
    """Its ranks hold different experts."""
    replicas: dist.ProcessGroup
    """Its ranks hold the same experts."""


def make_expert_groups(size: int) -> ExpertGroups:
    """Make the groups for EP `size`; every rank must call it.

    Named as Megatron names them, so that the ledger calls them `ep` and `expert_dp`.
    """
    ranks = torch.arange(dist.get_world_size()).view(-1, size)
    members = {"EXPERT_MODEL_PARALLEL_GROUP": ranks, "EXPERT_DATA_PARALLEL_GROUP": ranks.t()}
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(each.tolist(), group_desc=name)[0]
        for name, each in members.items()
    ]
    return ExpertGroups(*groups)


def keep_local_experts(model: nn.Module, ranks: ExpertGroups) -> list[nn.Parameter]:
    """Leave each rank its experts; return their parameters, which only their replicas share."""
    kept: list[nn.Parameter] = []
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            local = layer.count // ranks.parallel.size()
            first = ranks.parallel.rank() * local
            layer.experts = layer.experts[first : first + local]
            layer.dispatch = partial(_run_there, ranks.parallel)
            kept += layer.experts.parameters()
    for parameter in kept:
        setattr(parameter, COPIES_ATTRIBUTE, ranks.replicas.size())
    return kept


def average_experts(parameters: Sequence[nn.Parameter], ranks: ExpertGroups) -> None:
    """Sum gradients over replicas and divide by all data ranks, whose tokens reached the experts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    if ranks.replicas.size() > 1:
        dist.all_reduce(flat, group=ranks.replicas)
    flat /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, part in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


def _run_there(
    group: dist.ProcessGroup, rows: Tensor, counts: Tensor, experts: Sequence[nn.Module]
) -> Tensor:
    """Send each row to the rank that holds its expert, and the result back; of a group a `Dispatch`."""
    local = len(experts)
    sent = counts.view(-1, local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, here = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived: Tensor = _Exchange.apply(rows, here, there, group)
    # Rows arrive sorted by rank, then by expert; an expert needs its own together.
    numbers = torch.arange(local, device=rows.device).repeat(len(received))
    order = numbers.repeat_interleave(received.flatten()).argsort(stable=True)
    done = run_local_experts(arrived[order], received.sum(0), experts)
    answer: Tensor = _Exchange.apply(done[order.argsort()], there, here, group)
    return answer


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows; backward is the same with the splits exchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, into: list[int], outof: list[int], group: Any) -> Tensor:
        ctx.into, ctx.outof, ctx.group = into, outof, group
        return _exchange(rows, into, outof, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.outof, ctx.into, ctx.group), None, None, None


def _exchange(rows: Tensor, into: list[int], outof: list[int], group: Any) -> Tensor:
    received = rows.new_empty((sum(into), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), into, outof, group=group)
    return received
