"""What a native model may say of a parameter, and which of it contradicts the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megatron_lw.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """What a native model says of one parameter; see `describe.annotate`."""

    tp_dim: int | None = None
    blocks: tuple[int, ...] | None = None
    split_blocks: bool = True
    qkv: tuple[int, ...] | None = None
    expert: bool = False
    tied: str | None = None
    matrices: int | None = None
    logical_rows: int | None = None
    sequence_parallel: bool = False
    embedding: bool = False
    output: bool = False
    use_muon: bool | None = None
    keep_fp32: bool = False


def check_tags(what: str, param: nn.Parameter, tags: Annotation) -> None:
    """Refuse tags that contradict the shape or each other.

    Raises:
        ConfigError: naming the parameter, the first tag that is wrong and its value.
    """
    for problem in (*_contradicting_tags(param, tags), *_misfitting_tags(param, tags)):
        raise ConfigError(f"{what}: {problem}")


def _contradicting_tags(param: nn.Parameter, tags: Annotation) -> Iterator[str]:
    """What is wrong with the tags by themselves and with the kind of parameter."""
    if param.is_meta:
        yield "it is on the meta device; materialise the model before wrapping it"
    if param.requires_grad and not param.is_floating_point():
        yield f"its dtype is {param.dtype}; only floating-point weights are stepped"
    if tags.embedding and tags.output:
        yield "it is tagged both embedding and output; drop one, and tie copies with tied=NAME"
    if tags.use_muon and (tags.embedding or tags.output):
        yield "use_muon=True contradicts the embedding or output tag; drop one of them"
    if tags.use_muon and param.dim() < 2:
        yield f"use_muon=True, but shape {tuple(param.shape)} is not a matrix"
    if tags.expert and tags.sequence_parallel:
        yield "the tags expert and sequence_parallel exclude each other; drop one of them"
    if tags.keep_fp32 and tags.tp_dim is not None:
        yield "keep_fp32 means a full replica, which contradicts tp_dim; drop one of them"
    if tags.keep_fp32 and param.dtype != torch.float32:
        yield f"keep_fp32 is set but its dtype is {param.dtype}; make it float32 first"


def _misfitting_tags(param: nn.Parameter, tags: Annotation) -> Iterator[str]:
    """What in the tags does not fit the shape."""
    shape = tuple(param.shape)
    rows = shape[0] if shape else 0
    matrices = tags.matrices or 1
    if tags.tp_dim is not None and not 0 <= tags.tp_dim < len(shape):
        yield f"tp_dim = {tags.tp_dim} is not a dimension of shape {shape}"
    if tags.matrices == 0 or matrices < 1 or (shape and rows % matrices):
        yield f"matrices = {tags.matrices} does not divide the rows of {shape}"
    elif matrices > 1 and len(shape) < 2:
        yield f"matrices = {tags.matrices}, but shape {shape} has no matrix"
    else:
        yield from _misfitting_rows(shape, tags)
    if tags.logical_rows is not None and tags.tp_dim is None and not 0 < tags.logical_rows <= rows:
        yield f"logical_rows = {tags.logical_rows}, but it stores {rows} rows"


def _misfitting_rows(shape: tuple[int, ...], tags: Annotation) -> Iterator[str]:
    """What in the division of a matrix's rows does not fit; sums only where its rows are whole."""
    row_dim = row_dimension(len(shape), stack_size(shape, tags.matrices))
    rows = shape[row_dim] if shape else 0
    if row_dim == 0 and tags.matrices:
        rows //= tags.matrices
    whole = tags.tp_dim != row_dim
    if tags.blocks is not None and (not tags.blocks or min(tags.blocks) < 1):
        yield f"blocks = {tags.blocks} must be positive row counts"
    elif tags.blocks is not None and whole and sum(tags.blocks) > rows:
        yield f"blocks {tags.blocks} sum to {sum(tags.blocks)}, but it has {rows} rows"
    if tags.blocks is not None and tags.qkv is not None:
        yield f"blocks {tags.blocks} and qkv {tags.qkv} both divide its rows; drop one of them"
    if tags.blocks is None and not tags.split_blocks:
        yield "split_blocks=False says nothing without blocks; declare them or drop it"
    if tags.qkv is not None and (len(tags.qkv) < 2 or min(tags.qkv) < 1):
        yield f"qkv = {tags.qkv} must be the positive row counts of one query group"
    elif tags.qkv is not None and whole and (tags.logical_rows or rows) % sum(tags.qkv):
        yield (
            f"qkv {tags.qkv} are {sum(tags.qkv)} rows a query group, which do not divide its "
            f"{tags.logical_rows or rows} rows"
        )


def row_dimension(dims: int, matrices: int | None) -> int:
    """The dimension that counts the rows of one matrix: the second of a stack `[N, rows, cols]`."""
    return 1 if matrices is not None and dims >= 3 else 0


def stack_size(shape: tuple[int, ...], matrices: int | None) -> int | None:
    """How many matrices a parameter stacks; None: it is no stack.

    One matrix says nothing, except of `[1, rows, cols]`, which would be a convolution otherwise.
    """
    is_stack_of_one = len(shape) == 3 and shape[0] == 1
    return None if matrices == 1 and not is_stack_of_one else matrices
