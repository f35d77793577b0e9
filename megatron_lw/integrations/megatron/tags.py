"""Facts that Megatron's own optimizer finds out by name, put where `describe` reads them.

Its layers say how tensor parallelism divides a weight. That a weight fuses query, key and value is
found by its optimizer, which ours replaces.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_QKV = "linear_qkv.weight"


def tag_qkv(chunk: nn.Module, config: Any, tensor_parallel: int) -> None:
    """Tag the weights that fuse query, (gate,) key and value: `is_qkv`, `qkv_split_shapes`.

    They are those that Megatron's optimizer tags: two dimensions, and rows of the whole weight that
    are a number of query groups. Megatron asks for whole groups on each tensor-parallel rank; here
    the owner sees the whole weight, so that the tag does not depend on the layout.

    Args:
        chunk: a model chunk, before it is wrapped.
        config: Megatron's model configuration; one without attention heads tags nothing.
        tensor_parallel: ranks that divide the rows.
    """
    if getattr(config, "num_attention_heads", None) is None:
        return
    sizes = qkv_rows(config)
    for name, param in chunk.named_parameters():
        if _QKV in name and param.dim() == 2 and param.shape[0] * tensor_parallel % sum(sizes) == 0:
            weight: Any = param
            weight.is_qkv = True
            weight.qkv_split_shapes = sizes


def qkv_rows(config: Any) -> list[int]:
    """Rows of query, (gate,) key and value in one query group, from Megatron's configuration."""
    query = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gate = [query] if getattr(config, "attention_output_gate", False) else []
    return [query, *gate, config.kv_channels, config.kv_channels]
