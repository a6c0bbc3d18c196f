"""The GPT that Megatron trains, in plain PyTorch: pre-norm, tied output layer, dense or with experts.

LayerNorm or RMSNorm, learned or rotary positions, with or without biases, as Megatron's flags say. A
mixture of experts routes each token to its top k without dropping any. Its balancing loss is Switch's
(arXiv 2101.03961, equations 4 to 6, with k choices a token), its z loss ST-MoE's (arXiv 2202.08906,
equation 5); both as in Megatron, a micro batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention, silu

from parakit.accounting import record_routing
from parakit.native.settings import Settings

EPSILON = 1e-5

Dispatch = Callable[[Tensor, Tensor, Sequence[nn.Module]], Tensor]
"""Takes rows sorted by expert, the number of rows of each expert, and this rank's experts; returns the
experts' outputs in the same order."""


class CoreAttention(nn.Module):
    """The values' means by softmax of queries and keys; a module, so that hooks see what it gets."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads, sequence, width] of each to the same."""
        p = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` lie head by head, each head's q, k and v together.

    That is Megatron's layout, and it lets tensor parallelism cut the rows between heads.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.width = settings.hidden_size // settings.num_attention_heads
        self.rotary_base = settings.rotary_base if is_rotary(settings) else None
        self.qkv = nn.Linear(settings.hidden_size, 3 * settings.hidden_size, bias=settings.bias)
        self.core = CoreAttention(settings.attention_dropout)
        self.proj = nn.Linear(settings.hidden_size, settings.hidden_size, bias=settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same; a tensor-parallel rank holds some of the heads."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.width)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        if self.rotary_base is not None:
            query, key = rotate(query, self.rotary_base), rotate(key, self.rotary_base)
        out = self.core(query, key, value)
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    """Two matrices and an activation: a dense layer's MLP, or one expert."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, inner = settings.hidden_size, settings.mlp_width
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
        self._layer = layer
        self.chosen = settings.moe_router_topk
        """Experts of each token."""
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
        top, experts = logits.topk(self.chosen, dim=-1)
        weights = top.softmax(dim=-1).to(x.dtype)
        counts = self._keep_losses(logits, experts)
        order = experts.flatten().argsort(stable=True)
        owner = order // self.chosen
        rows = self.dispatch(tokens[owner], counts, list(self.experts))
        rows = rows * weights.flatten()[order].unsqueeze(-1)
        mixed = torch.zeros_like(tokens, dtype=rows.dtype).index_add(0, owner, rows)
        return mixed.view_as(x)

    def auxiliary_loss(self) -> Tensor:
        """What the last forward pass adds to the loss."""
        assert self.losses is not None
        balance, z = self.losses
        return self._coefficients[0] * balance + self._coefficients[1] * z

    def _keep_losses(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Keep both losses, report the routing to the ledger, return the tokens of each expert."""
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        counts = chosen.sum(dim=0)
        balance = balance_loss(logits.softmax(dim=-1), counts)
        self.losses = balance, z_loss(logits)
        record_routing(self._layer, logits, chosen, load_balancing_loss=balance)
        return counts


class TransformerBlock(nn.Module):
    """One transformer layer."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()
        self.norm1 = norm(settings)
        self.attention = Attention(settings)
        self.norm2 = norm(settings)
        self.mlp = MixtureOfExperts(settings, layer) if settings.num_experts else MLP(settings)
        self.dropout = settings.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Tokens to logits over the padded vocabulary, whose padding rows take part in the softmax.

    A stage of a pipeline (`keep_stage`) is one of which parts are None: it takes hidden states where it
    has no embeddings, and returns them where it has no output layer.
    """

    word_embeddings: nn.Embedding | None
    position_embeddings: nn.Embedding | None
    norm: nn.Module | None
    output_layer: nn.Linear | None

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.word_embeddings = nn.Embedding(settings.padded_vocabulary, width)
        self.position_embeddings = (
            None if is_rotary(settings) else nn.Embedding(settings.max_position_embeddings, width)
        )
        layers = range(1, settings.num_layers + 1)
        self.blocks = nn.ModuleList(TransformerBlock(settings, layer) for layer in layers)
        self.norm = norm(settings)
        self.output_layer = nn.Linear(width, settings.padded_vocabulary, bias=False)
        self.is_tied = not settings.untie_embeddings_and_output_weights
        if self.is_tied:
            self.output_layer.weight = self.word_embeddings.weight
        self.dropout = settings.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence] to [batch, sequence, padded vocabulary]."""
        if self.word_embeddings is not None:
            tokens, x = x, self.word_embeddings(x)
            if self.position_embeddings is not None:
                places = torch.arange(tokens.shape[1], device=tokens.device)
                x = x + self.position_embeddings(places)
            x = dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        if self.output_layer is None or self.norm is None:
            return x
        logits: Tensor = self.output_layer(self.norm(x))
        return logits

    def keep_stage(self, stage: int, stages: int) -> None:
        """Drop all but one of `stages` equal parts of the layers; a tied matrix is on both ends."""
        layers = len(self.blocks) // stages
        self.blocks = self.blocks[stage * layers : (stage + 1) * layers]
        if stage > 0:
            self.word_embeddings = self.position_embeddings = None
        if stage < stages - 1:
            self.norm = self.output_layer = None


def norm(settings: Settings) -> nn.Module:
    """The model's normalisation."""
    kind = nn.RMSNorm if settings.normalization == "RMSNorm" else nn.LayerNorm
    return kind(settings.hidden_size, eps=EPSILON)


def is_rotary(settings: Settings) -> bool:
    """Whether positions are rotary instead of learned."""
    return settings.position_embedding_type == "rope"


def rotate(x: Tensor, base: int) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of queries or keys, [batch, heads, sequence, width].

    The width is even; its two halves lie side by side, as in Megatron.
    """
    length, width = x.shape[-2:]
    powers = torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width
    positions = torch.arange(length, dtype=torch.float32, device=x.device)
    angles = torch.outer(positions, base**-powers).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return (x * angles.cos() + swapped * angles.sin()).to(x.dtype)


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """E·Σ fᵢ·Pᵢ: 1 where all experts get as many tokens, E/k where all tokens go to the same k.

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
    """Without expert parallelism each expert computes its rows; one without any has zero gradients."""
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


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """Every layer's experts, in order; none of a dense model."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over all tokens of a micro batch, in fp32."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def initialise(model: GPT, settings: Settings) -> None:
    """Megatron's initialisation, for runs without the shared start: N(0, std), output layers scaled."""
    torch.manual_seed(settings.seed)
    scaled = settings.init_method_std / (2 * settings.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0)
        else:
            into_residual = name.endswith(("proj.weight", "fc2.weight"))
            nn.init.normal_(parameter, std=scaled if into_residual else settings.init_method_std)
