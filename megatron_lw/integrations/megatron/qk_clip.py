"""`--qk-clip`: the logits that Megatron's attention has seen scale the masters, inside the step.

Megatron scales weights after its step, and masters that a rank has whole. Here the rule of
`optimizer/qk_clip.py` does, before the weights are published; Megatron's `clip_qk` only logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import get_attr_wrapped_model
from torch import nn

from megatron_lw.distributed.agreement import Kept, attempt
from megatron_lw.errors import ConfigError
from megatron_lw.integrations.megatron.tags import qkv_rows
from megatron_lw.optimizer.qk_clip import HeadRows, QKClip
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer


class MegatronQKClip(QKClip):
    """Scales queries and keys of the layers that Megatron's `clip_qk` does, by the same factors.

    Collective: see `QKClip`.

    Args:
        optimizer: whose masters are scaled.
        chunks: this rank's chunks, in whatever wrapper.
        config: Megatron's model configuration.

    Raises:
        ConfigError: on every rank: attention that does not measure its logits.
    """

    def __init__(
        self, optimizer: LayerWiseDistributedOptimizer, chunks: Sequence[nn.Module], config: Any
    ) -> None:
        names = {id(param): name for name, param in optimizer.runtime.model.params.items()}
        self._attentions = attempt(
            lambda: dict(_attentions(chunks, names)), optimizer.groups.control
        )
        layers = {
            layer: list(_head_rows(attention, names, config))
            for layer, attention in self._attentions.items()
        }
        self._first = optimizer.groups.tp.rank
        heads = int(config.num_attention_heads)
        super().__init__(optimizer, layers, heads, float(config.qk_clip_threshold))

    def apply(self, kept: Kept) -> None:
        """Note what the attention of each layer has measured, then see `QKClip.apply`."""
        with kept.keeping(self.name):
            for layer, attention in self._attentions.items():
                seen = attention.core_attention.current_max_attn_logits
                if seen is not None:
                    self.observe(layer, seen, self._first * seen.numel())
        super().apply(kept)


def _attentions(chunks: Sequence[nn.Module], names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    """Attention of each layer by the name of its query weight, unless that is frozen."""
    for chunk in chunks:
        for layer in get_attr_wrapped_model(chunk, "decoder").layers:
            attention = getattr(layer, "self_attention", None)
            if not isinstance(attention, SelfAttention | MLASelfAttention):
                continue
            name = names.get(id(_query_weight(attention)))
            if name is None:
                continue
            if not hasattr(attention.core_attention, "current_max_attn_logits"):
                raise ConfigError(
                    f"qk_clip=True, but the attention that {name!r} belongs to, "
                    f"{type(attention.core_attention).__name__}, does not measure its logits; pass "
                    "--transformer-impl transformer_engine (2.9 or newer), or drop --qk-clip"
                )
            yield name, attention


def _query_weight(attention: Any) -> nn.Parameter:
    if isinstance(attention, SelfAttention):
        weight: nn.Parameter = attention.linear_qkv.weight
    elif attention.config.q_lora_rank is None:
        weight = attention.linear_q_proj.weight
    else:
        weight = attention.linear_q_up_proj.weight
    return weight


def _head_rows(attention: Any, names: dict[int, str], config: Any) -> Iterator[HeadRows]:
    """Rows of queries and keys, and the powers that `qk_clip_alpha` gives them."""
    alpha, query = float(config.qk_clip_alpha), names[id(_query_weight(attention))]
    if isinstance(attention, SelfAttention):
        sizes = qkv_rows(config)
        served = config.num_attention_heads // config.num_query_groups
        for group in range(config.num_query_groups):
            heads = tuple(range(group * served, (group + 1) * served))
            start = group * sum(sizes)
            yield _rows(query, start, sizes[0], heads, alpha)
            yield _rows(query, start + sum(sizes[:-2]), sizes[-2], heads, 1 - alpha)
        return
    plain, turned = config.qk_head_dim, config.qk_pos_emb_head_dim
    key = names.get(id(attention.linear_kv_up_proj.weight))
    for head in range(config.num_attention_heads):
        start = head * (plain + turned)
        yield _rows(query, start, plain, (head,), alpha)
        yield _rows(query, start + plain, turned, (head,), 1.0)
        if key is not None:
            start = head * (plain + config.v_head_dim)
            yield _rows(key, start, plain, (head,), 1 - alpha)


def _rows(param: str, start: int, count: int, heads: tuple[int, ...], power: float) -> HeadRows:
    return HeadRows(param=param, start=start, stop=start + count, heads=heads, power=power)
