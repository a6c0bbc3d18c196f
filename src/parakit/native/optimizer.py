"""Build the optimizers of Megatron's updates, clip gradients, and compute the learning rate's schedule.

The optimizer is AdamW, or Muon for hidden matrices with AdamW for all other parameters. Parameters may be full
tensors, FSDP shards or parts of tensor parallelism.

Muon is PyTorch's (`torch.optim.Muon`, from 2.9), as Keller Jordan published it: Nesterov momentum, five
Newton–Schulz steps with the coefficients (3.4445, −4.7750, 2.0315) in bf16, and an update that is scaled by
√max(1, rows/columns).
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parakit.capturing import local_tensor
from parakit.native.parallel import COPIES_ATTRIBUTE
from parakit.native.settings import Settings

RATE_FRACTION = "rate"
"""Key of a parameter group: its learning rate as a fraction of the schedule's learning rate."""


def build_adamw(parameters: Iterable[nn.Parameter], settings: Settings) -> torch.optim.AdamW:
    """Return an AdamW with two parameter groups: matrices with weight decay, and other parameters without.

    As in Megatron, parameters with fewer than two dimensions, which are biases and the weights of norms, do not
    decay. The learning rate is 0 until the engine sets it.
    """
    all_parameters = list(parameters)
    matrices = [parameter for parameter in all_parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in all_parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2))


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients in place so that their norm is at most `limit`. Return the norm before scaling.

    As in Megatron, a limit of 0 means that nothing is scaled. All ranks must call this function, because the
    norm is summed over the ranks.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(with_gradient)
    factor = limit / (norm + 1.0e-6)
    if 0 < factor < 1.0:
        for parameter in with_gradient:
            _get_local_gradient(parameter).mul_(factor)
    return norm


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the Euclidean norm of the gradients of the whole model, summed in fp64.

    Each part of a gradient counts once, even if several ranks hold copies of the part. All parameters must have
    a gradient, and all ranks must call this function.
    """
    replicated_squares = 0.0
    distributed_squares: Tensor | None = None
    for parameter in parameters:
        gradient = _get_local_gradient(parameter)
        square = float(torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2)
        copies = _count_copies(parameter)
        if copies == 0:
            replicated_squares += square
            continue
        if distributed_squares is None:
            distributed_squares = torch.zeros((), dtype=torch.float64, device=gradient.device)
        distributed_squares += square / copies
    total = replicated_squares
    if distributed_squares is not None:
        dist.all_reduce(distributed_squares)
        total += float(distributed_squares)
    return float(total**0.5)


def _get_local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the parameter's gradient, which must exist."""
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def _count_copies(parameter: nn.Parameter) -> int:
    """Return how many ranks hold the same part of a distributed parameter.

    0 means that the parameter is not distributed, so every rank holds the full parameter. The parameter must
    have a gradient.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return int(getattr(parameter, COPIES_ATTRIBUTE, 0))
    placements = gradient.placements
    if not any(placement.is_shard() for placement in placements):
        return 0
    # The ranks along a dimension of the mesh that does not split the tensor hold the same shard.
    return math.prod(
        size
        for placement, size in zip(placements, gradient.device_mesh.shape, strict=True)
        if not placement.is_shard()
    )


class MuonAdamW(torch.optim.Optimizer):
    """Optimizer that runs a Muon and an AdamW. It has the parameter groups and the state of both."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._optimizers = (muon, adamw)
        # The constructor of Optimizer copies the groups. Here a change of a group, such as a new learning
        # rate, must reach the optimizer that uses the group, so the groups and the state are shared.
        self.param_groups = [*muon.param_groups, *adamw.param_groups]
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        muon.state = adamw.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's signature
        """Run the step of Muon, then that of AdamW; `closure` is ignored."""
        for optimizer in self._optimizers:
            optimizer.step()


def muon_adamw(model: nn.Module, settings: Settings) -> MuonAdamW:
    """Return the optimizer of `--optimizer muon` for a model.

    Under `--muon-rule pytorch`, Muon updates the matrices that `muon_parameters` returns, with the learning rate
    `--lr` and without weight decay. AdamW updates all other parameters with `--decoupled-lr` and `--weight-decay`.
    Under `--muon-rule megatron`, `_build_megatron_muon` builds the optimizer.

    Exit with one sentence if this PyTorch has no Muon.
    """
    if settings.muon_rule == "megatron":
        return _build_megatron_muon(model, settings)
    if not hasattr(torch.optim, "Muon"):
        sys.exit(f"torch {torch.__version__} has no Muon, 2.9 has; use OPTIMIZER=adamw.")
    hidden_matrices = muon_parameters(model)
    muon = torch.optim.Muon(
        hidden_matrices,
        lr=0.0,
        weight_decay=0.0,
        momentum=settings.muon_momentum,
        nesterov=True,
        adjust_lr_fn="original",
    )
    hidden_ids = set(map(id, hidden_matrices))
    other_parameters = [
        parameter for parameter in model.parameters() if id(parameter) not in hidden_ids
    ]
    adamw = build_adamw(other_parameters, settings)
    for group in adamw.param_groups:
        group[RATE_FRACTION] = settings.adamw_rate
    return MuonAdamW(muon, adamw)


def _build_megatron_muon(model: nn.Module, settings: Settings) -> MuonAdamW:
    """Return the optimizer that Megatron 0.19 builds (`megatron.core.optimizer.emerging_optimizers`).

    Muon updates all matrices except the word embeddings and the output layer, with weight decay. So position
    embeddings are updated by Muon. AdamW updates all other parameters. It uses `--decoupled-lr` for the word
    embeddings and the output layer, and Muon's learning rate for norms and biases.
    """
    from emerging_optimizers.orthogonalized_optimizers import Muon  # type: ignore[import-untyped]

    vocabulary_matrices: list[nn.Parameter] = []
    inner_matrices: list[nn.Parameter] = []
    inner_vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        # DDP adds the part `module` before the names, so any part of a name may match.
        name_parts = name.split(".")
        if "word_embeddings" in name_parts or "output_layer" in name_parts:
            vocabulary_matrices.append(parameter)
        elif parameter.dim() == 2:
            inner_matrices.append(parameter)
        else:
            inner_vectors.append(parameter)
    muon = Muon(
        inner_matrices,
        lr=0.0,
        momentum=settings.muon_momentum,
        weight_decay=settings.weight_decay,
        nesterov=True,
        fp32_matmul_prec=settings.muon_fp32_matmul_prec,
        coefficient_type="simple",
        num_ns_steps=5,
        scale_mode="shape_scaling",
    )
    adamw = build_adamw([*vocabulary_matrices, *inner_vectors], settings)
    # The first group of `build_adamw` has the matrices, which are those of the vocabulary here.
    adamw.param_groups[0][RATE_FRACTION] = settings.adamw_rate
    return MuonAdamW(muon, adamw)


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all matrices except embeddings and the output layer. The matrices of routers are included."""
    excluded_ids: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            excluded_ids.add(id(module.weight))
    for name, parameter in model.named_parameters():
        if "output_layer" in name:
            excluded_ids.add(id(parameter))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return [parameter for parameter in matrices if id(parameter) not in excluded_ids]


def learning_rate(settings: Settings, updates: int) -> float:
    """Return the learning rate after `updates` updates: linear warm-up, then decay to `--min-lr`.

    As in Megatron, the progress is counted in samples. The first update uses the learning rate for `updates` =
    0, which is 0 if there is a warm-up.
    """
    decay_samples = settings.lr_decay_iters * settings.global_batch_size
    warmup_samples = settings.lr_warmup_fraction * decay_samples
    samples = updates * settings.global_batch_size
    if warmup_samples > 0 and samples <= warmup_samples:
        return settings.lr * samples / warmup_samples
    if settings.lr_decay_style == "constant":
        return settings.lr
    if samples > decay_samples:
        return settings.min_lr
    progress = (samples - warmup_samples) / (decay_samples - warmup_samples)
    remaining = 1 - progress
    if settings.lr_decay_style != "linear":
        remaining = 0.5 * (math.cos(math.pi * progress) + 1)
    return settings.min_lr + remaining * (settings.lr - settings.min_lr)
