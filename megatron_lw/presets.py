"""Shapes of public models, as Megatron names and fuses their parameters.

Sources: the configurations that are published with the models (GPT-2 124M, Llama 3 8B and 70B,
Qwen3-30B-A3B, DeepSeek-V3). Weights only: no data and no download. DeepSeek-V3 is without its
multi-token-prediction module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_lw.errors import ConfigError

Kind = Literal["matrix", "vector", "embedding", "output", "conv", "expert_matrix", "expert_vector"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParam:
    """One parameter of a model, before any parallelism.

    Attributes:
        name: Global name.
        shape: Global shape; an `expert_matrix` of three dimensions is a stack of experts.
        kind: What it is; matrices and convolutions go to Muon, the rest to Adam.
        sharded: Whether tensor parallelism (of experts: expert tensor parallelism) cuts it.
        layer: Layer that it belongs to; None outside the layers.
        expert: Number of the expert it belongs to; None outside experts and for a stack.
        tied: Name under which an embedding is shared with the output layer.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    sharded: bool = False
    layer: int | None = None
    expert: int | None = None
    tied: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: ranks of compressed query and key-value, widths of a head."""

    q_rank: int
    kv_rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: number, width, width of the shared expert, dense layers before."""

    number: int
    ffn: int
    shared_ffn: int = 0
    first_dense: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that fix every shape of a decoder.

    Attributes:
        layers: Decoder layers.
        hidden: Model width.
        ffn: Width of a dense feed-forward block.
        heads: Attention heads.
        kv_heads: Key-value heads.
        head_dim: Width of a head.
        vocab: Words, before padding.
        positions: Learned positions; 0 for rotary ones.
        gated: Whether the feed-forward block has a gate.
        bias: Whether linear layers and norms have biases.
        tied: Whether embedding and output layer share one weight.
        qk_norm: Whether queries and keys are normalised by head.
        experts: The mixture of experts, or None.
        latent: Latent attention, or None.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int = 0
    gated: bool = True
    bias: bool = False
    tied: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        "gpt2-124m": ModelShape(
            layers=12,
            hidden=768,
            ffn=3072,
            heads=12,
            kv_heads=12,
            head_dim=64,
            vocab=50257,
            positions=1024,
            gated=False,
            bias=True,
            tied=True,
        ),
        "llama3-8b": ModelShape(
            layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
        ),
        "llama3-70b": ModelShape(
            layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256
        ),
        "qwen3-30b-a3b": ModelShape(
            layers=48,
            hidden=2048,
            ffn=6144,
            heads=32,
            kv_heads=4,
            head_dim=128,
            vocab=151936,
            qk_norm=True,
            experts=Experts(number=128, ffn=768),
        ),
        "deepseek-v3": ModelShape(
            layers=61,
            hidden=7168,
            ffn=18432,
            heads=128,
            kv_heads=128,
            head_dim=128,
            vocab=129280,
            experts=Experts(number=256, ffn=2048, shared_ffn=2048, first_dense=3),
            latent=LatentAttention(q_rank=1536, kv_rank=512, rope=64, nope=128, value=128),
        ),
    }
)


def preset(name: str) -> ModelShape:
    """Return the shape of a public model.

    Raises:
        ConfigError: If there is no preset of that name.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def model_params(shape: ModelShape, *, fused: bool = True, tp: int = 1) -> list[ModelParam]:
    """List the parameters of a model.

    Args:
        shape: Its sizes.
        fused: One matrix for query, key and value, one for gate and up, as Megatron has them; False
            for one each.
        tp: Tensor-parallel size; where it does not divide the vocabulary, that is padded to a
            multiple of 128 x tp as Megatron does.
    """
    vocab = shape.vocab if shape.vocab % tp == 0 else -(-shape.vocab // (128 * tp)) * 128 * tp
    words = "embedding.word_embeddings.weight"
    params = [
        ModelParam(
            name=words,
            shape=(vocab, shape.hidden),
            kind="embedding",
            sharded=True,
            tied=words if shape.tied else None,
        )
    ]
    if shape.positions:
        name = "embedding.position_embeddings.weight"
        params.append(
            ModelParam(name=name, shape=(shape.positions, shape.hidden), kind="embedding")
        )
    for layer in range(shape.layers):
        params.extend(_Layer(shape, layer, fused).params())
    params.extend(_norm(shape, "decoder.final_layernorm", shape.hidden, None))
    if not shape.tied:
        name, size = "output_layer.weight", (vocab, shape.hidden)
        params.append(ModelParam(name=name, shape=size, kind="output", sharded=True))
    return params


def _norm(shape: ModelShape, name: str, width: int, layer: int | None) -> Iterator[ModelParam]:
    for part in ("weight", "bias") if shape.bias else ("weight",):
        yield ModelParam(name=f"{name}.{part}", shape=(width,), kind="vector", layer=layer)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parameters of one decoder layer."""

    shape: ModelShape
    layer: int
    fused: bool

    def params(self) -> Iterator[ModelParam]:
        """Yield them in the order of forward."""
        shape = self.shape
        yield from self._norm("input_layernorm", shape.hidden)
        yield from self._attention() if shape.latent is None else self._latent(shape.latent)
        yield from self._norm("pre_mlp_layernorm", shape.hidden)
        experts = shape.experts
        if experts is None or self.layer < experts.first_dense:
            yield from self._feed_forward("mlp", shape.ffn)
            return
        yield from self._linear("mlp.router", experts.number, shape.hidden, sharded=False)
        if experts.shared_ffn:
            yield from self._feed_forward("mlp.shared_experts", experts.shared_ffn)
        for expert in range(experts.number):
            yield from self._feed_forward("mlp.experts", experts.ffn, expert)

    def _attention(self) -> Iterator[ModelParam]:
        shape = self.shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parts = {"qkv": queries + 2 * keys} if self.fused else {"q": queries, "k": keys, "v": keys}
        for part, rows in parts.items():
            yield from self._linear(f"self_attention.linear_{part}", rows, shape.hidden)
        if shape.qk_norm:
            yield from self._norm("self_attention.q_layernorm", shape.head_dim)
            yield from self._norm("self_attention.k_layernorm", shape.head_dim)
        yield from self._linear("self_attention.linear_proj", shape.hidden, queries, by_row=True)

    def _latent(self, latent: LatentAttention) -> Iterator[ModelParam]:
        shape, at = self.shape, "self_attention"
        q_rows = shape.heads * (latent.nope + latent.rope)
        kv_rows = shape.heads * (latent.nope + latent.value)
        kv_down = latent.kv_rank + latent.rope
        yield from self._linear(
            f"{at}.linear_q_down_proj", latent.q_rank, shape.hidden, sharded=False
        )
        yield from self._norm(f"{at}.q_layernorm", latent.q_rank)
        yield from self._linear(f"{at}.linear_q_up_proj", q_rows, latent.q_rank)
        yield from self._linear(f"{at}.linear_kv_down_proj", kv_down, shape.hidden, sharded=False)
        yield from self._norm(f"{at}.kv_layernorm", latent.kv_rank)
        yield from self._linear(f"{at}.linear_kv_up_proj", kv_rows, latent.kv_rank)
        inner = shape.heads * latent.value
        yield from self._linear(f"{at}.linear_proj", shape.hidden, inner, by_row=True)

    def _feed_forward(self, name: str, ffn: int, expert: int | None = None) -> Iterator[ModelParam]:
        hidden = self.shape.hidden
        parts = {"fc1": ffn}
        if self.shape.gated:
            parts = {"fc1": 2 * ffn} if self.fused else {"fc1_gate": ffn, "fc1_up": ffn}
        for part, rows in parts.items():
            yield from self._linear(f"{name}.linear_{part}", rows, hidden, expert=expert)
        yield from self._linear(f"{name}.linear_fc2", hidden, ffn, by_row=True, expert=expert)

    def _linear(
        self,
        name: str,
        rows: int,
        cols: int,
        *,
        sharded: bool = True,
        by_row: bool = False,
        expert: int | None = None,
    ) -> Iterator[ModelParam]:
        """Yield a weight and its bias; a row-parallel layer's bias is not cut."""
        prefix = f"decoder.layers.{self.layer}.{name}"
        suffix = "" if expert is None else str(expert)
        yield ModelParam(
            name=f"{prefix}.weight{suffix}",
            shape=(rows, cols),
            kind="matrix" if expert is None else "expert_matrix",
            sharded=sharded,
            layer=self.layer,
            expert=expert,
        )
        if self.shape.bias:
            yield ModelParam(
                name=f"{prefix}.bias{suffix}",
                shape=(rows,),
                kind="vector" if expert is None else "expert_vector",
                sharded=sharded and not by_row,
                layer=self.layer,
                expert=expert,
            )

    def _norm(self, name: str, width: int) -> Iterator[ModelParam]:
        return _norm(self.shape, f"decoder.layers.{self.layer}.{name}", width, self.layer)
