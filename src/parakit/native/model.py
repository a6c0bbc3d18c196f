"""Define the GPT that Megatron trains, in plain PyTorch: pre-norm, dense or with a mixture of experts.

Megatron's flags (`Settings`) choose LayerNorm or RMSNorm, learned or rotary positions, biases, the activation and
a tied output layer. A mixture of experts routes each token to its top k experts, and drops no token. Its load
balancing loss is the Switch Transformer's (arXiv 2101.03961, equations 4 to 6, with k experts per token). Its z
loss is ST-MoE's (arXiv 2202.08906, equation 5). As in Megatron, both are computed per micro batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention, silu

from parakit.accounting import record_routing
from parakit.native.settings import Settings

EPSILON = 1e-5
"""Epsilon of the norms, Megatron's default (`--norm-epsilon`)."""

Dispatch = Callable[[Tensor, Tensor, Sequence[nn.Module]], Tensor]
"""Function that runs the experts, on this rank or on the ranks that hold them.

Its arguments are rows sorted by expert, [rows, hidden], the number of rows per expert, [experts], and the
experts of this rank. It returns the experts' outputs, [rows, hidden], in the order of the rows.
"""


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention. It is a separate module so that hooks see its arguments."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention output; arguments and result are [batch, heads, sequence, width]."""
        dropout_p = self.dropout if self.training else 0.0
        return scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention with Megatron's layout of the `qkv` matrix.

    The rows of `qkv` are ordered by head: query, key and value of head 0, then query, key and value of head 1,
    and so on. So tensor parallelism can split the rows between heads.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.width = settings.hidden_size // settings.num_attention_heads
        self.rotary_base = settings.rotary_base if is_rotary(settings) else None
        self.qkv = nn.Linear(settings.hidden_size, 3 * settings.hidden_size, bias=settings.bias)
        self.core = CoreAttention(settings.attention_dropout)
        self.proj = nn.Linear(settings.hidden_size, settings.hidden_size, bias=settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer; argument and result are [batch, sequence, hidden].

        Under tensor parallelism this rank computes some of the heads.
        """
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.width)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        if self.rotary_base is not None:
            query, key = rotate(query, self.rotary_base), rotate(key, self.rotary_base)
        attended = self.core(query, key, value)
        projected: Tensor = self.proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    """Two linear layers with an activation between them: the MLP of a dense layer, or one expert."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, inner = settings.hidden_size, settings.mlp_width
        is_gated = settings.activation == "swiglu"
        self.fc1 = nn.Linear(width, 2 * inner if is_gated else inner, bias=settings.bias)
        self.fc2 = nn.Linear(inner, width, bias=settings.bias)
        self.activate = choose_activation(settings)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the MLP; argument and result are […, hidden]."""
        out: Tensor = self.fc2(self.activate(self.fc1(x)))
        return out


class MixtureOfExperts(nn.Module):
    """Layer in which each token passes through its top k experts.

    The experts' outputs are weighted by the softmax over the k largest logits of the router.
    """

    def __init__(self, settings: Settings, layer: int) -> None:
        """Create router and experts; `layer` is the layer's number from 1, for the routing log."""
        super().__init__()
        self._layer = layer
        self.experts_per_token = settings.moe_router_topk
        self.num_experts = settings.num_experts
        """Experts of the layer on all ranks."""
        self._coefficients = (settings.moe_aux_loss_coeff, settings.moe_z_loss_coeff)
        self.router = nn.Linear(settings.hidden_size, settings.num_experts, bias=settings.bias)
        self.experts = nn.ModuleList(MLP(settings) for _ in range(settings.num_experts))
        """Experts that this rank holds."""
        self.dispatch: Dispatch = run_local_experts
        self.losses: tuple[Tensor, Tensor] | None = None
        """Load balancing loss and z loss of the last forward pass, before their coefficients.

        None before the first forward pass.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs; argument and result are [batch, sequence, hidden].

        Side effect: the two auxiliary losses of this call are stored in `losses`.
        """
        tokens = x.flatten(0, 1)
        logits = self.router(tokens).float()
        top_logits, experts = logits.topk(self.experts_per_token, dim=-1)
        weights = top_logits.softmax(dim=-1).to(x.dtype)
        tokens_per_expert = self._keep_losses(logits, experts)
        # Each token has k rows, one per chosen expert; the rows are sorted by expert.
        order = experts.flatten().argsort(stable=True)
        token_of_row = order // self.experts_per_token
        weight_of_row = weights.flatten()[order].unsqueeze(-1)
        outputs = self.dispatch(tokens[token_of_row], tokens_per_expert, list(self.experts))
        outputs = outputs * weight_of_row
        # The output of a token is the sum of its rows.
        mixed = torch.zeros_like(tokens, dtype=outputs.dtype).index_add(0, token_of_row, outputs)
        return mixed.view_as(x)

    def auxiliary_loss(self) -> Tensor:
        """Return the weighted sum of load balancing loss and z loss of the last forward pass."""
        assert self.losses is not None
        balance, z = self.losses
        balance_coefficient, z_coefficient = self._coefficients
        return balance_coefficient * balance + z_coefficient * z

    def _keep_losses(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Store load balancing loss and z loss in `losses`, record the routing, and return the number of tokens
        per expert.

        Args:
            logits: The router's logits, [tokens, experts].
            experts: Indices of the chosen experts, [tokens, k].
        """
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        tokens_per_expert = is_chosen.sum(dim=0)
        balance = balance_loss(logits.softmax(dim=-1), tokens_per_expert)
        self.losses = balance, z_loss(logits)
        record_routing(self._layer, logits, is_chosen, load_balancing_loss=balance)
        return tokens_per_expert


class TransformerBlock(nn.Module):
    """Transformer layer: attention and MLP (or experts), each with a norm before it and a residual."""

    def __init__(self, settings: Settings, layer: int) -> None:
        """Create the modules; `layer` is the layer's number from 1."""
        super().__init__()
        self.norm1 = build_norm(settings)
        self.attention = Attention(settings)
        self.norm2 = build_norm(settings)
        self.mlp = MixtureOfExperts(settings, layer) if settings.num_experts else MLP(settings)
        self.dropout = settings.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer; argument and result are [batch, sequence, hidden]."""
        x = x + dropout(self.attention(self.norm1(x)), self.dropout, self.training)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """Language model from token ids to logits over the padded vocabulary.

    The padding rows take part in the softmax, as in Megatron. After `keep_stage` the model is one stage of a
    pipeline, and the modules of other stages are None. A stage without embeddings takes hidden states, and a
    stage without output layer returns hidden states.
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
        self.norm = build_norm(settings)
        self.output_layer = nn.Linear(width, settings.padded_vocabulary, bias=False)
        self.is_tied = not settings.untie_embeddings_and_output_weights
        if self.is_tied:
            self.output_layer.weight = self.word_embeddings.weight
        self.dropout = settings.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, sequence, padded vocabulary] for token ids [batch, sequence].

        A pipeline stage that is not the first takes hidden states [batch, sequence, hidden] instead of token
        ids. A stage that is not the last returns hidden states.
        """
        if self.word_embeddings is not None:
            tokens = x
            x = self.word_embeddings(tokens)
            if self.position_embeddings is not None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
                x = x + self.position_embeddings(positions)
            x = dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        if self.output_layer is None or self.norm is None:
            return x
        logits: Tensor = self.output_layer(self.norm(x))
        return logits

    def keep_stage(self, stage: int, stages: int) -> None:
        """Remove all modules that do not belong to stage number `stage` (from 0) of `stages` stages.

        All stages have the same number of layers. The first stage also keeps the embeddings, and the last stage
        the final norm and the output layer. So both of these stages keep a tied matrix.
        """
        layers = len(self.blocks) // stages
        self.blocks = self.blocks[stage * layers : (stage + 1) * layers]
        if stage > 0:
            self.word_embeddings = self.position_embeddings = None
        if stage < stages - 1:
            self.norm = self.output_layer = None


def build_norm(settings: Settings) -> nn.Module:
    """Return a new RMSNorm or LayerNorm over the hidden size."""
    norm_class = nn.RMSNorm if settings.normalization == "RMSNorm" else nn.LayerNorm
    return norm_class(settings.hidden_size, eps=EPSILON)


def is_rotary(settings: Settings) -> bool:
    """Return True if the model has rotary position embeddings, False if they are learned."""
    return settings.position_embedding_type == "rope"


def rotate(x: Tensor, base: int) -> Tensor:
    """Return queries or keys with rotary position embedding (arXiv 2104.09864).

    As in Megatron, dimension i is rotated together with dimension i + width/2.

    Args:
        x: Queries or keys, [batch, heads, sequence, width]; the width is even.
        base: Base of the geometric series of wavelengths (`--rotary-base`).
    """
    length, width = x.shape[-2:]
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width
    positions = torch.arange(length, dtype=torch.float32, device=x.device)
    angles = torch.outer(positions, base**-exponents).repeat(1, 2)
    first_half, second_half = x.chunk(2, dim=-1)
    swapped = torch.cat((-second_half, first_half), dim=-1)
    return (x * angles.cos() + swapped * angles.sin()).to(x.dtype)


def balance_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """Return the load balancing loss E·Σ fᵢ·Pᵢ over the E experts i.

    fᵢ is the fraction of the routed tokens that expert i gets, and Pᵢ is the mean probability of expert i. The
    loss is 1 if all experts get equally many tokens. It is E/k if all tokens choose the same k experts with
    certainty.

    Args:
        probabilities: Softmax over all experts, [tokens, experts].
        counts: Tokens routed to each expert, [experts].
    """
    token_fractions = counts / counts.sum()
    num_experts = probabilities.shape[-1]
    return num_experts * (token_fractions * probabilities.mean(dim=0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean square of log Σ exp of the router's logits, [tokens, experts]."""
    return logits.logsumexp(dim=-1).square().mean()


def run_local_experts(rows: Tensor, counts: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """Run each expert on its rows, and return all outputs, [rows, hidden], in the order of the rows.

    This function is the `Dispatch` without expert parallelism. An expert without rows runs on an empty tensor,
    so its gradients are zero and not None.

    Args:
        rows: Inputs sorted by expert, [rows, hidden].
        counts: Number of rows per expert, [experts].
        experts: The experts in the order of `counts`.
    """
    rows_by_expert = torch.split(rows, counts.tolist())
    outputs = [
        expert(expert_rows) for expert, expert_rows in zip(experts, rows_by_expert, strict=True)
    ]
    return torch.cat(outputs)


def choose_activation(settings: Settings) -> Callable[[Tensor], Tensor]:
    """Return the activation function between the two matrices of an MLP.

    GELU is the tanh approximation, as in Megatron's fused kernel. With `--no-bias-gelu-fusion` it is exact.
    """
    if settings.activation == "silu":
        return silu
    if settings.activation == "swiglu":
        return _apply_swiglu
    approximation = "none" if settings.no_bias_gelu_fusion else "tanh"
    return lambda x: gelu(x, approximate=approximation)


def _apply_swiglu(x: Tensor) -> Tensor:
    """Return SiLU of the first half of the last dimension times the second half."""
    gate, value = x.chunk(2, dim=-1)
    return silu(gate) * value


def find_expert_layers(model: nn.Module) -> list[MixtureOfExperts]:
    """Return the mixtures of experts of all layers in order; empty for a dense model."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens of a micro batch, computed in fp32.

    Args:
        logits: Logits, [batch, sequence, vocabulary].
        labels: Token ids, [batch, sequence].
    """
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def initialise(model: GPT, settings: Settings) -> None:
    """Set random weights as Megatron does, for a run without a checkpoint of initial weights.

    Matrices are drawn from N(0, std²), where std is `--init-method-std`. For matrices that write into the
    residual stream, std is divided by √(2·layers). Biases become 0, and the weights of norms become 1. The
    function sets torch's seed.
    """
    torch.manual_seed(settings.seed)
    residual_std = settings.init_method_std / (2 * settings.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            is_norm_weight = "norm" in name and "weight" in name
            nn.init.constant_(parameter, 1.0 if is_norm_weight else 0.0)
            continue
        writes_to_residual = name.endswith(("proj.weight", "fc2.weight"))
        std = residual_std if writes_to_residual else settings.init_method_std
        nn.init.normal_(parameter, std=std)
