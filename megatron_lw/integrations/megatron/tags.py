"""What Megatron's layers leave unsaid of their parameters, or say wrongly, before `describe` reads.

They say how tensor parallelism divides a weight. That it fuses query, key and value is found by
Megatron's optimizer, which ours replaces.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_QKV = "linear_qkv.weight"


def complete_tags(chunk: nn.Module, config: Any, tensor_parallel: int) -> None:
    """Say of the parameters of a chunk what `describe` must know; see the two functions below.

    Args:
        chunk: a model chunk, before it is wrapped.
        config: Megatron's model configuration.
        tensor_parallel: ranks that divide the rows of a dense weight.
    """
    tag_qkv(chunk, config, tensor_parallel)
    clear_contradictions(chunk)


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


def clear_contradictions(chunk: nn.Module) -> None:
    """Drop `sequence_parallel` from the parameters of experts.

    Megatron's row-parallel layers tag every bias with it. An expert sees all of its tokens, and
    Megatron has biases in experts only where tensor parallelism does not divide those: their
    gradients are whole. Summed over tensor-parallel ranks, as the tag has them, gradients of
    different experts would be added up.

    Args:
        chunk: a model chunk, before it is wrapped.
    """
    for param in chunk.parameters():
        if not getattr(param, "allreduce", True) and getattr(param, "sequence_parallel", False):
            weight: Any = param
            weight.sequence_parallel = False


def qkv_rows(config: Any) -> list[int]:
    """Rows of query, (gate,) key and value in one query group, from Megatron's configuration."""
    query = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gate = [query] if getattr(config, "attention_output_gate", False) else []
    return [query, *gate, config.kv_channels, config.kv_channels]
