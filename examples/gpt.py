"""A small GPT over bytes in plain torch, with nothing in it that knows about the optimizer.

Pre-norm blocks, rotary positions, fused query/key/value, gated MLP. The matrices inside the blocks
are the ones Muon orthogonalises; the embedding, the output layer and the norm gains are for Adam.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads; `width / heads` is the even size of one head.
        sequence: bytes of context, the longest input.
        tied: whether the output layer is the embedding's own parameter.
        dtype: dtype of every weight and activation; the loss is always taken in fp32.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    sequence: int = 256
    tied: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together.

        Raises:
            ValueError: naming the size.
        """
        sizes = {"layers": self.layers, "width": self.width, "heads": self.heads}
        for name, size in (sizes | {"sequence": self.sequence}).items():
            if size < 1:
                raise ValueError(f"{name} is {size}: it must be at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width is {self.width}: it must be a multiple of 2 x heads = {2 * self.heads}"
            )


def rotary_tables(sequence: int, head: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    Args:
        sequence: number of positions.
        head: features of one attention head.

    Returns:
        Two fp32 tensors of shape [sequence, head / 2].
    """
    frequency = 10000.0 ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    angle = torch.arange(sequence, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the feature pairs of `x`, [batch, heads, sequence, head], by their position's angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Self-attention, causal or not, with one fused projection for query, key and value."""

    def __init__(self, config: GPTConfig, *, causal: bool = True) -> None:
        """Build the two projections."""
        super().__init__()
        self.causal = causal
        self.head = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over the positions of `x`, [batch, sequence, width]."""
        fused = self.qkv(x).unflatten(-1, (3, -1, self.head))  # [batch, sequence, 3, heads, head]
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=self.causal
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP (SwiGLU, Shazeer 2020, arXiv:2002.05202) with a fused gate and up projection."""

    def __init__(self, config: GPTConfig) -> None:
        """Build the two projections; the hidden size is 3 x width."""
        super().__init__()
        self.gate_up = nn.Linear(config.width, 6 * config.width, bias=False)
        self.down = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the last dimension of `x`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, *, causal: bool = True) -> None:
        """Build the block's parts; `causal` is whether a position sees only those before it."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config, causal=causal)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream `x`, [batch, sequence, width], after this block."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew.

        Muon's update has the same size in every direction whatever the weight is, so a block starts
        as the identity (its output projections are zero) and the first updates set their scale. A
        layer that reads the stream has variance 1 / fan-in. Norm gains are one.
        """
        for norm in (self.attention_norm, self.mlp_norm):
            norm.reset_parameters()
        for layer in (self.attention.qkv, self.mlp.gate_up):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        for layer in (self.attention.output, self.mlp.down):
            nn.init.zeros_(layer.weight)


class GPT(nn.Module):
    """The language model: bytes in, mean cross-entropy in nats a byte out."""

    def __init__(self, config: GPTConfig) -> None:
        """Build and initialise the model from torch's current random state."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()
        self.to(config.dtype)
        cos, sin = rotary_tables(config.sequence, config.width // config.heads)
        self.register_buffer("cos", cos.to(config.dtype), persistent=False)
        self.register_buffer("sin", sin.to(config.dtype), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew.

        The embedding is small enough for Adam to move it, and smaller yet where it is the output
        layer too.
        """
        for block in self.blocks:
            block.reset_parameters()
        self.norm.reset_parameters()
        nn.init.normal_(self.embedding.weight, std=0.2)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `targets` after `tokens`.

        Args:
            tokens: byte values, int64 [batch, sequence].
            targets: the byte after each of them, same shape.

        Returns:
            fp32 scalar, nats a byte.
        """
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
