"""A mixture of experts in place of an MLP: top-k routing without dropping, and what keeps it balanced.

The balancing loss is Switch's (arXiv 2101.03961, equations 4 to 6, with k tokens' places a token), the
z loss ST-MoE's (arXiv 2202.08906, equation 5); both as in Megatron, a micro batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from examples.native.settings import Settings
from tools.ledger.routing import record_routing

Dispatch = Callable[[Tensor, Tensor, Sequence[nn.Module]], Tensor]
"""Rows in the order of experts, rows for each expert, this rank's experts: rows as experts left them."""


class MLP(nn.Module):
    """Two matrices and an activation: a dense layer's MLP, or one expert."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, inner = settings.hidden_size, settings.ffn_hidden_size
        gated = settings.activation == "swiglu"
        self.fc1 = nn.Linear(width, 2 * inner if gated else inner, bias=settings.bias)
        self.fc2 = nn.Linear(inner, width, bias=settings.bias)
        self.activate = activation(settings)

    def forward(self, x: Tensor) -> Tensor:
        """[…, hidden] to the same."""
        out: Tensor = self.fc2(self.activate(self.fc1(x)))
        return out


class MixtureOfExperts(nn.Module):
    """Each token goes through its top k experts, weighted by the softmax over their k logits."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()
        self._layer, self._chosen = layer, settings.moe_router_topk
        self.count = settings.num_experts
        self._coefficients = (settings.moe_aux_loss_coeff, settings.moe_z_loss_coeff)
        self.router = nn.Linear(settings.hidden_size, settings.num_experts, bias=settings.bias)
        self.experts = nn.ModuleList(MLP(settings) for _ in range(settings.num_experts))
        self.dispatch: Dispatch = run_here
        self.losses: tuple[Tensor, Tensor] | None = None
        """Balancing and z loss of the last forward pass, without their coefficients."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        tokens = x.flatten(0, 1)
        logits = self.router(tokens).float()
        top, experts = logits.topk(self._chosen, dim=-1)
        weights = top.softmax(dim=-1).to(x.dtype)
        counts = self._watch(logits, experts)
        order = experts.flatten().argsort(stable=True)
        owner = order // self._chosen
        rows = self.dispatch(tokens[owner], counts, list(self.experts))
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        mixed = torch.zeros_like(tokens, dtype=rows.dtype).index_add(0, owner, rows)
        return mixed.view_as(x)

    def auxiliary_loss(self) -> Tensor:
        """What the last forward pass adds to the loss."""
        assert self.losses is not None
        balance, z = self.losses
        return self._coefficients[0] * balance + self._coefficients[1] * z

    def _watch(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Tokens of each expert, after the losses are kept and the ledger told."""
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        counts = chosen.sum(dim=0)
        balance = balance_loss(logits.softmax(dim=-1), counts)
        self.losses = balance, z_loss(logits)
        record_routing(self._layer, logits, chosen, load_balancing_loss=balance)
        return counts


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """E·Σ fᵢ·Pᵢ: 1 where all experts get the same, E/k where all tokens go to the same k.

    Args:
        probabilities: Softmax over all experts, [tokens, experts].
        counts: Tokens given to each expert, [experts].
    """
    share = counts / counts.sum()
    return probabilities.shape[-1] * (share * probabilities.mean(dim=0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean square of log Σ exp of the router's logits."""
    return logits.logsumexp(dim=-1).square().mean()


def run_here(rows: Tensor, counts: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """All experts are this rank's: each takes its rows; one without any still has (zero) gradients."""
    parts = torch.split(rows, counts.tolist())
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


def activation(settings: Settings) -> Callable[[Tensor], Tensor]:
    """The function between an MLP's matrices; Megatron's fused GELU is the tanh approximation."""
    if settings.activation == "silu":
        return silu
    if settings.activation == "swiglu":
        return _swiglu
    approximation = "none" if settings.no_bias_gelu_fusion else "tanh"
    return lambda x: gelu(x, approximate=approximation)


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return silu(gate) * value
