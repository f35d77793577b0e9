"""Boxes: which part of a local tensor is which part of the global one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lw.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor: `start[d] <= index[d] < start[d] + shape[d]`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxPair:
    """One box of the local tensor and the box of the global tensor that it is; equal shapes."""

    local: Box
    world: Box


def tensor_parallel_boxes(
    name: str,
    local_shape: tuple[int, ...],
    tp_dim: int | None,
    blocks: tuple[int, ...] | None,
    tp_size: int,
    tp_rank: int,
    row_dim: int = 0,
) -> tuple[tuple[int, ...], tuple[BoxPair, ...]]:
    """Global shape and local-to-global boxes of a parameter divided over tensor parallelism.

    Args:
        name: for messages.
        local_shape: shape on this rank.
        tp_dim: the divided dimension, or None for a replicated parameter.
        blocks: global row counts of fused matrices; where the rows are divided, each block is
            divided by itself, so that a rank holds a part of every block (gate and up), and so are
            the rows beyond the blocks.
        tp_size: ranks that divide it.
        tp_rank: this rank among them.
        row_dim: dimension that counts the rows of a matrix.

    Raises:
        ConfigError: the blocks are more than the rows or do not divide by `tp_size`.
    """
    origin = (0,) * len(local_shape)
    if tp_dim is None or tp_size == 1:
        whole = Box(origin, local_shape)
        return local_shape, (BoxPair(whole, whole),)
    extent = local_shape[tp_dim] * tp_size
    global_shape = (*local_shape[:tp_dim], extent, *local_shape[tp_dim + 1 :])
    parts: tuple[int, ...] = (extent,)
    if blocks is not None and tp_dim == row_dim:
        rest = extent - sum(blocks)
        parts = (*blocks, rest) if rest else blocks
    if any(part < 0 or part % tp_size for part in parts):
        raise ConfigError(
            f"parameter {name!r}: blocks {blocks} must sum to at most its {extent} rows "
            f"and each divide by {tp_size} tensor-parallel ranks"
        )
    pairs: list[BoxPair] = []
    local_start = global_start = 0
    for part in parts:
        length = part // tp_size
        shape = (*local_shape[:tp_dim], length, *local_shape[tp_dim + 1 :])
        local = (*origin[:tp_dim], local_start, *origin[tp_dim + 1 :])
        at = global_start + tp_rank * length
        pairs.append(
            BoxPair(Box(local, shape), Box((*origin[:tp_dim], at, *origin[tp_dim + 1 :]), shape))
        )
        local_start += length
        global_start += part
    return global_shape, tuple(pairs)


def stack_boxes(
    shape: tuple[int, ...], pairs: tuple[BoxPair, ...], parts: int, part: int
) -> tuple[tuple[int, ...], tuple[BoxPair, ...]]:
    """Shape and boxes of a stack whose first dimension is divided over `parts` ranks, evenly.

    Args:
        shape: shape of one part.
        pairs: boxes of one part.
        parts: ranks over which the stack is divided.
        part: this rank among them.
    """
    offset = part * shape[0]
    shifted = tuple(
        BoxPair(p.local, Box((p.world.start[0] + offset, *p.world.start[1:]), p.world.shape))
        for p in pairs
    )
    return (shape[0] * parts, *shape[1:]), shifted
