"""Apply data, fully sharded, tensor and expert parallelism to a model through PyTorch's own APIs.

Ranks are placed as in Megatron: the ranks of an expert-parallel group are neighbours. The ranks that hold the same
experts, one of each expert-parallel group, average the gradients of these experts.
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
"""Attribute of parameters that not all ranks hold: the number of ranks that hold the same parameter.

Parameters of experts and of pipeline stages have this attribute; parameters that all ranks hold do not.
"""


@dataclass(frozen=True)
class RankLayout:
    """Position of this process among the ranks.

    The data-parallel size is the number of ranks divided by the tensor- and pipeline-parallel sizes.
    """

    rank: int
    world_size: int
    tensor_size: int
    device: torch.device
    pipeline_size: int = 1

    @property
    def data_size(self) -> int:
        """Number of model replicas, whether their state is sharded or not."""
        return self.world_size // (self.tensor_size * self.pipeline_size)

    @property
    def data_rank(self) -> int:
        """Data-parallel rank, which decides the micro batches that this rank reads."""
        return self.rank // (self.tensor_size * self.pipeline_size)

    @property
    def tensor_rank(self) -> int:
        """Tensor-parallel rank, which decides the part of each matrix that this rank holds."""
        return self.rank % self.tensor_size

    @property
    def pipeline_rank(self) -> int:
        """Pipeline-parallel rank, which decides the stages that this rank holds."""
        return self.rank if self.pipeline_size > 1 else 0

    @property
    def writes(self) -> bool:
        """True if this rank writes the log: it is the last rank, the only one with a pipeline's loss."""
        return self.rank == self.world_size - 1

    def average(self, losses: Tensor) -> Tensor:
        """Return the losses averaged over all ranks. `losses` is changed in place.

        Under pipeline parallelism the losses are returned unchanged. They are valid only on the rank that
        writes the log.
        """
        if self.pipeline_size > 1:
            return losses
        dist.all_reduce(losses)
        return losses / self.world_size


def refuse_combinations(settings: Settings, world_size: int) -> None:
    """Exit with one sentence if this backend does not implement the run's combination of settings."""
    _refuse_pipeline(settings, world_size)
    _refuse_tensor_parallelism(settings, world_size)
    expert_size = settings.expert_model_parallel_size
    if settings.muon_rule == "pytorch" and settings.muon_fp32_matmul_prec != "medium":
        sys.exit(
            f"--muon-fp32-matmul-prec {settings.muon_fp32_matmul_prec}: PyTorch's Muon makes its "
            "steps in bf16; use OPTIMIZER=megatron-muon."
        )
    needs_whole_matrices = expert_size > 1 or settings.optimizer == "muon"
    if settings.use_torch_fsdp2 and needs_whole_matrices:
        sys.exit(
            "The native backend has fsdp2 without expert parallelism and Muon, which needs whole "
            "matrices; use dpN or epN."
        )
    divides_experts = world_size % expert_size == 0 and settings.num_experts % expert_size == 0
    if expert_size > 1 and not divides_experts:
        sys.exit(
            f"EP {expert_size} does not divide {world_size} ranks and {settings.num_experts} experts; "
            "use another EP."
        )
    tensor_size = settings.tensor_model_parallel_size
    if settings.num_attention_heads % tensor_size:
        sys.exit(
            f"TP {tensor_size} does not divide {settings.num_attention_heads} heads; use another TP."
        )


def _refuse_tensor_parallelism(settings: Settings, world_size: int) -> None:
    """Exit with one sentence if the run splits tensors in a way that this backend does not implement."""
    tensor_size = settings.tensor_model_parallel_size
    if tensor_size == 1:
        return
    if tensor_size != world_size or settings.use_torch_fsdp2:
        sys.exit(
            f"The native backend splits tensors over all ranks or none, not TP {tensor_size} of "
            f"{world_size} ranks with data parallelism; use BACKEND=megatron for products."
        )
    if settings.num_experts or settings.optimizer == "muon":
        sys.exit(
            "The native backend splits tensors of dense models under AdamW only; use dpN or epN."
        )


def _refuse_pipeline(settings: Settings, world_size: int) -> None:
    """Exit with one sentence if the run has a pipeline that this backend does not implement."""
    pipeline_size = settings.pipeline_model_parallel_size
    if pipeline_size == 1:
        return
    is_implemented = (
        pipeline_size == world_size
        and settings.pipeline_schedule
        and not settings.num_experts
        and settings.optimizer != "muon"
        and settings.engine == "torch"
    )
    if not is_implemented:
        sys.exit(
            f"The native backend has pipelines of dense models under AdamW over all ranks, not PP "
            f"{pipeline_size} of {world_size} ranks with {settings.engine} and {settings.optimizer}; "
            f"use one of gpipe{world_size}, 1f1b{world_size} or pipedream{world_size}."
        )


def parallelise(model: nn.Module, settings: Settings, ranks: RankLayout) -> nn.Module:
    """Apply tensor parallelism, FSDP2 or DDP to a model that already has its weights, and return the result.

    On one rank, and for the engine `bare`, the model is returned unchanged.
    """
    if ranks.world_size == 1 or settings.engine == "bare":
        return model
    assert isinstance(model, GPT)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    if ranks.tensor_size > 1:
        return split_tensors(model, mesh)
    if settings.use_torch_fsdp2:
        return _shard_fully(model, settings, mesh)
    # DDP averages parameters over all ranks, so it must ignore experts that only some ranks hold; the
    # engine averages their gradients.
    expert_names = [
        name for name, parameter in model.named_parameters() if hasattr(parameter, COPIES_ATTRIBUTE)
    ]
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, expert_names)  # type: ignore[no-untyped-call]
    replica = DistributedDataParallel(model)
    # By default DDP's reducer calls the process group from C++, where the kit's communication log does not
    # see the call. This hook does the same all-reduce from Python.
    replica.register_comm_hook(None, allreduce_hook)
    return replica


def half_precision_dtype(settings: Settings) -> torch.dtype | None:
    """Return the 16-bit type of the run's matrix products, or None for a run in fp32."""
    if settings.bf16:
        return torch.bfloat16
    return torch.float16 if settings.fp16 else None


def _shard_fully(model: GPT, settings: Settings, mesh: DeviceMesh) -> GPT:
    """Shard a model in place with FSDP2, layer by layer, and return it.

    Embeddings, final norm and output layer form one unit of FSDP together, because a tied matrix is used at
    both ends of the model.
    """
    half_precision = half_precision_dtype(settings)
    policy = MixedPrecisionPolicy(
        param_dtype=half_precision, reduce_dtype=torch.float32 if half_precision else None
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def split_tensors(model: GPT, mesh: DeviceMesh) -> GPT:
    """Apply tensor parallelism in place, as Megatron does, and return the model.

    A layer has two all-reduces in the forward pass and two in the backward pass. The vocabulary is split as
    well. The logits are a DTensor that is split by vocabulary, as `loss_parallel` needs it.
    """
    layer_plan = {
        "attention.qkv": ColwiseParallel(),
        "attention.proj": RowwiseParallel(),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, layer_plan)
    vocabulary_plan = {
        "word_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output_layer": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, vocabulary_plan)
    if model.is_tied and model.output_layer and model.word_embeddings:
        # parallelize_module has given the two modules separate weights. Both are split by rows of the
        # vocabulary, so they can share one weight again.
        model.output_layer.weight = model.word_embeddings.weight
    return model


def start_ranks(settings: Settings) -> RankLayout:
    """Join the process group, NCCL on GPUs and gloo on CPUs, and return this rank's position.

    The environment variables of torchrun are read. Exit with one sentence if the run's combination of settings
    is not implemented.
    """
    on_gpu = os.environ.get(variables.DEVICE) == "gpu"
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if settings.engine == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        # DeepSpeed must be imported before the process group exists. Otherwise a default argument of its
        # `barrier` keeps the group alive, and gloo's threads abort the process when it ends
        # (pytorch/pytorch#190489).
        import deepspeed  # type: ignore[import-not-found]  # noqa: F401
    if on_gpu:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    refuse_combinations(settings, world_size)
    return RankLayout(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor_size=settings.tensor_model_parallel_size,
        device=device,
        pipeline_size=settings.pipeline_model_parallel_size,
    )


def end_ranks(settings: Settings) -> None:
    """Destroy all process groups. With DeepSpeed, the groups that DeepSpeed made are destroyed too."""
    if settings.engine == "deepspeed":
        import deepspeed

        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


class ExpertGroups(NamedTuple):
    """Process groups of this rank for expert parallelism."""

    parallel: dist.ProcessGroup
    """Group whose ranks hold different experts."""
    replicas: dist.ProcessGroup
    """Group whose ranks hold the same experts."""


def make_expert_groups(size: int) -> ExpertGroups:
    """Make the process groups for the expert-parallel size `size`, and return this rank's groups.

    Every rank must call this function. The groups have Megatron's names, which the communication log shows as
    `ep` and `expert_dp`.
    """
    # A row has the ranks that share all experts. A column has the ranks that hold the same experts.
    ranks = torch.arange(dist.get_world_size()).view(-1, size)
    own_parallel_group: Any
    own_parallel_group, _ = dist.new_subgroups_by_enumeration(
        ranks.tolist(), group_desc="EXPERT_MODEL_PARALLEL_GROUP"
    )
    own_replica_group: Any
    own_replica_group, _ = dist.new_subgroups_by_enumeration(
        ranks.t().tolist(), group_desc="EXPERT_DATA_PARALLEL_GROUP"
    )
    return ExpertGroups(own_parallel_group, own_replica_group)


def keep_local_experts(model: nn.Module, groups: ExpertGroups) -> list[nn.Parameter]:
    """Remove the experts of other ranks from all layers, and return the parameters of this rank's experts.

    From then on, the layers send rows to the ranks that hold the experts. The returned parameters get the
    attribute COPIES_ATTRIBUTE, the number of ranks that hold copies. Only these ranks may average their
    gradients (`average_experts`).
    """
    expert_parameters: list[nn.Parameter] = []
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            num_local_experts = layer.num_experts // groups.parallel.size()
            first = groups.parallel.rank() * num_local_experts
            layer.experts = layer.experts[first : first + num_local_experts]
            layer.dispatch = partial(_run_remote_experts, groups.parallel)
            expert_parameters += layer.experts.parameters()
    for parameter in expert_parameters:
        setattr(parameter, COPIES_ATTRIBUTE, groups.replicas.size())
    return expert_parameters


def average_experts(parameters: Sequence[nn.Parameter], groups: ExpertGroups) -> None:
    """Average the gradients of this rank's experts in place.

    Gradients are summed over the replicas of the experts. They are divided by the number of all ranks, because the
    tokens of all ranks have reached the experts. Parameters without a gradient are left out.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    if groups.replicas.size() > 1:
        dist.all_reduce(flat, group=groups.replicas)
    flat /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, average in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(average.view_as(gradient))


def _run_remote_experts(
    group: dist.ProcessGroup, rows: Tensor, counts: Tensor, experts: Sequence[nn.Module]
) -> Tensor:
    """Send each row to the rank that holds its expert, run the experts, and send the results back.

    `counts` has the number of this rank's rows for each expert of all ranks, and `experts` are the experts of
    this rank. With `group` bound by `functools.partial`, the function is a `Dispatch`.
    """
    num_local_experts = len(experts)
    # Rows per rank and expert of that rank, [ranks, local experts].
    sent_counts = counts.view(-1, num_local_experts)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts, group=group)
    send_sizes, receive_sizes = sent_counts.sum(1).tolist(), received_counts.sum(1).tolist()
    received: Tensor = _AllToAllRows.apply(rows, receive_sizes, send_sizes, group)
    # Rows arrive sorted by sending rank and then by expert. Each expert needs its rows together.
    expert_indices = torch.arange(num_local_experts, device=rows.device)
    expert_of_row = expert_indices.repeat(len(received_counts)).repeat_interleave(
        received_counts.flatten()
    )
    order = expert_of_row.argsort(stable=True)
    outputs = run_local_experts(received[order], received_counts.sum(0), experts)
    returned: Tensor = _AllToAllRows.apply(
        outputs[order.argsort()], send_sizes, receive_sizes, group
    )
    return returned


class _AllToAllRows(torch.autograd.Function):
    """All-to-all of rows. Its backward pass sends the gradients the opposite way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, receive_sizes: list[int], send_sizes: list[int], group: Any
    ) -> Tensor:
        ctx.receive_sizes, ctx.send_sizes, ctx.group = receive_sizes, send_sizes, group
        return _exchange_rows(rows, receive_sizes, send_sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent_back = _exchange_rows(gradients[0], ctx.send_sizes, ctx.receive_sizes, ctx.group)
        return sent_back, None, None, None


def _exchange_rows(
    rows: Tensor, receive_sizes: list[int], send_sizes: list[int], group: Any
) -> Tensor:
    """Send rows to all ranks of a group, and return the received rows in the order of the ranks.

    `receive_sizes` and `send_sizes` are the numbers of rows from and to each rank.
    """
    received = rows.new_empty((sum(receive_sizes), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receive_sizes, send_sizes, group=group)
    return received
