"""The GPT that Megatron trains, in plain PyTorch: pre-norm, learned positions, tied output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention

from examples.native.settings import Settings


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` lie head by head, each head's q, k and v together.

    That is Megatron's layout, and it lets tensor parallelism cut the rows between heads.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.width = settings.hidden_size // settings.num_attention_heads
        self.dropout = settings.attention_dropout
        self.qkv = nn.Linear(settings.hidden_size, 3 * settings.hidden_size)
        self.proj = nn.Linear(settings.hidden_size, settings.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same; a tensor-parallel rank holds some of the heads."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.width)
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        p = self.dropout if self.training else 0.0
        out = scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.norm1 = nn.LayerNorm(width, eps=1e-5)
        self.attention = Attention(settings)
        self.norm2 = nn.LayerNorm(width, eps=1e-5)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.approximation = "none" if settings.no_bias_gelu_fusion else "tanh"
        self.dropout = settings.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self._drop(self.attention(self.norm1(x)))
        return x + self._drop(
            self.fc2(gelu(self.fc1(self.norm2(x)), approximate=self.approximation))
        )

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Tokens to logits over the padded vocabulary, whose padding rows take part in the softmax."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.word_embeddings = nn.Embedding(settings.padded_vocabulary, width)
        self.position_embeddings = nn.Embedding(settings.max_position_embeddings, width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(width, eps=1e-5)
        self.output_layer = nn.Linear(width, settings.padded_vocabulary, bias=False)
        self.output_layer.weight = self.word_embeddings.weight
        self.dropout = settings.hidden_dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] to [batch, sequence, padded vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = dropout(
            self.word_embeddings(tokens) + self.position_embeddings(places),
            self.dropout,
            self.training,
        )
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output_layer(self.norm(x))
        return logits


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
