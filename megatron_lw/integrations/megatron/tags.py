"""What Megatron's layers leave unsaid of their parameters, or say wrongly, before `describe` reads.

Most say how tensor parallelism divides a weight; the rest is in the model's sharded state dict.
That a weight fuses query, key and value is found by Megatron's optimizer, which ours replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import nn

from megatron_lw.errors import ConfigError
from megatron_lw.integrations.megatron.names import prefix_of
from megatron_lw.integrations.megatron.sharding import Entry

_QKV = "linear_qkv.weight"


def complete_tags(
    chunk: nn.Module, config: Any, tensor_parallel: int, entries: Mapping[str, Entry]
) -> None:
    """Say of the parameters of a chunk what `describe` must know; see the functions below.

    Args:
        chunk: a model chunk, before it is wrapped.
        config: Megatron's model configuration.
        tensor_parallel: ranks that divide the rows of a dense weight.
        entries: what the chunk's sharded state dict has, by name.
    """
    tag_qkv(chunk, config, tensor_parallel)
    tag_shards(chunk, tensor_parallel, entries)
    clear_contradictions(chunk)


def tag_shards(chunk: nn.Module, tensor_parallel: int, entries: Mapping[str, Entry]) -> None:
    """Tag dense parameters that tensor parallelism divides and whose layer does not say so.

    The offsets of a learned softmax (--softmax-type learnable) are such: one a head, and each rank
    has those of its heads. Their checkpoint entry is divided, and Megatron's own norm counts the
    first rank's alone.

    Args:
        chunk: a model chunk, before it is wrapped.
        tensor_parallel: ranks that divide a dense weight.
        entries: what the chunk's sharded state dict has, by name.

    Raises:
        ConfigError: an untagged parameter is divided in another way.
    """
    prefix = prefix_of(chunk)
    for name, param in chunk.named_parameters():
        weight: Any = param
        entry = entries.get(name.removeprefix(prefix))
        tagged = getattr(param, "tensor_model_parallel", False)
        if tagged or not getattr(param, "allreduce", True) or not isinstance(entry, ShardedTensor):
            continue
        whole = entry.global_shape[entry.prepend_axis_num :]
        divided = [dim for dim, size in enumerate(param.shape) if size != whole[dim]]
        if not divided:
            continue
        [dim, *more] = divided
        if more or whole[dim] != param.shape[dim] * tensor_parallel:
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(param.shape)} is a part of {tuple(whole)}, "
                f"not by the {tensor_parallel} ranks of tensor parallelism; set its attributes "
                "tensor_model_parallel and partition_dim"
            )
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1


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
