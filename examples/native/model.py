"""The GPT that Megatron trains, in plain PyTorch: pre-norm, tied output layer; dense or of experts.

LayerNorm or RMSNorm, learned or rotary positions, with or without biases, as Megatron's flags say.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from examples.native.experts import MLP, MixtureOfExperts
from examples.native.rotary import rotate
from examples.native.settings import Settings

EPSILON = 1e-5


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` lie head by head, each head's q, k and v together.

    That is Megatron's layout, and it lets tensor parallelism cut the rows between heads.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.width = settings.hidden_size // settings.num_attention_heads
        self.dropout = settings.attention_dropout
        self.rotary_base = settings.rotary_base if is_rotary(settings) else None
        self.qkv = nn.Linear(settings.hidden_size, 3 * settings.hidden_size, bias=settings.bias)
        self.proj = nn.Linear(settings.hidden_size, settings.hidden_size, bias=settings.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same; a tensor-parallel rank holds some of the heads."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.width)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        if self.rotary_base is not None:
            query, key = rotate(query, self.rotary_base), rotate(key, self.rotary_base)
        p = self.dropout if self.training else 0.0
        out = scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Block(nn.Module):
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
        x = x + self._drop(self.attention(self.norm1(x)))
        return x + self._drop(self.mlp(self.norm2(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Tokens to logits over the padded vocabulary, whose padding rows take part in the softmax."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.word_embeddings = nn.Embedding(settings.padded_vocabulary, width)
        self.position_embeddings = (
            None if is_rotary(settings) else nn.Embedding(settings.max_position_embeddings, width)
        )
        layers = range(1, settings.num_layers + 1)
        self.blocks = nn.ModuleList(Block(settings, layer) for layer in layers)
        self.norm = norm(settings)
        self.output_layer = nn.Linear(width, settings.padded_vocabulary, bias=False)
        self.output_layer.weight = self.word_embeddings.weight
        self.dropout = settings.hidden_dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] to [batch, sequence, padded vocabulary]."""
        x = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(torch.arange(tokens.shape[1], device=tokens.device))
        x = dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output_layer(self.norm(x))
        return logits


def norm(settings: Settings) -> nn.Module:
    """The model's normalisation."""
    kind = nn.RMSNorm if settings.normalization == "RMSNorm" else nn.LayerNorm
    return kind(settings.hidden_size, eps=EPSILON)


def is_rotary(settings: Settings) -> bool:
    """Whether positions are turned into queries and keys instead of being learned."""
    return settings.position_embedding_type == "rope"


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """Every layer's experts, in order; none of a dense model."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over all tokens of a micro batch, in fp32."""
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def initialise(model: GPT, settings: Settings) -> None:
    """Megatron's initialisation, for a run without the shared start: N(0, std), output layers scaled."""
    torch.manual_seed(settings.seed)
    scaled = settings.init_method_std / (2 * settings.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0)
        else:
            into_residual = name.endswith(("proj.weight", "fc2.weight"))
            nn.init.normal_(parameter, std=scaled if into_residual else settings.init_method_std)
