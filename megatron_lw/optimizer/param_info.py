"""`ParamInfo`: everything that is known of one parameter, as facts; nothing later asks it again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Literal

import torch

from megatron_lw.groups import Domain
from megatron_lw.optimizer.boxes import BoxPair

Role = Literal["matrix", "vector", "embedding", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Everything that is known of one trainable parameter on this rank.

    Attributes:
        name: global name, the same on every rank that holds a part.
        local_name: name inside its model chunk.
        chunk: index of the model chunk.
        dtype: dtype of the weight as the model holds it, e.g. "bfloat16".
        local_shape: shape on this rank, in elements.
        global_shape: logical shape of the whole parameter.
        boxes: which local box is which global box; several where a parameter is divided by blocks.
        domain: "dense", "expert", or "replicated" (a copy on every rank of its pipeline stage).
        tp_dim: dimension divided over tensor parallelism; None: replicated over it.
        divisible_dim: dimension that tensor parallelism divides where its size is above 1.
        role: "embedding" and "output" weights are stepped element by element, whatever their shape.
        matrices: matrices stacked along the first dimension(s) of it, on this rank; None: it is
            no stack.
        ep_size: expert-parallel ranks over which such a stack of experts is divided; 1: not
        divided.
        blocks: rows of the fused matrices inside it (e.g. gate and up); rows beyond are padding.
        split_blocks: whether these are orthogonalised each by itself.
        qkv: rows of query, (gate,) key and value in each query group; None: no fused attention.
        logical_rows: rows before padding, where the parameter itself is padded; else None.
        tied: name shared by the copies of one logical weight; None if it has one copy.
        sequence_parallel: used under sequence parallelism, so replicas' gradients are summed.
        use_muon: an explicit choice for or against the matrix child; None: decided by shape.
        keep_fp32: stays FP32 and is replicated over every rank that holds a copy.
        depthwise: whether it is the weight of a convolution with a group for each input channel;
            None: of no convolution that is a module.
        recipe: how it is quantised, as text; None for a plain weight.
    """

    name: str
    local_name: str
    chunk: int
    dtype: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    boxes: tuple[BoxPair, ...]
    domain: Domain = "dense"
    tp_dim: int | None = None
    divisible_dim: int | None = None
    role: Role = "vector"
    matrices: int | None = None
    ep_size: int = 1
    blocks: tuple[int, ...] | None = None
    split_blocks: bool = True
    qkv: tuple[int, ...] | None = None
    logical_rows: int | None = None
    tied: str | None = None
    sequence_parallel: bool = False
    use_muon: bool | None = None
    keep_fp32: bool = False
    depthwise: bool | None = None
    recipe: str | None = None

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return torch.Size(self.local_shape).numel()

    @property
    def is_stack(self) -> bool:
        """Whether it is declared to be a stack of matrices, be it of one."""
        return self.matrices is not None

    def facts(self) -> tuple[object, ...]:
        """What must agree on every rank that holds a part of the same parameter.

        The local name and the boxes are left out; boxes follow from the rest and the rank's place.
        """
        local = ("local_name", "boxes")
        return tuple(attrgetter(f.name)(self) for f in fields(self) if f.name not in local)


def logical_numel(info: ParamInfo, tp_rank: int) -> int:
    """Leading local elements of a parameter that are not its own padding rows.

    Args:
        info: the parameter.
        tp_rank: this rank among those that divide it.
    """
    if info.logical_rows is None:
        return info.numel
    rows = info.local_shape[0]
    if info.tp_dim != 0:
        kept = info.logical_rows
    elif info.blocks is not None:
        kept = info.logical_rows * rows // info.global_shape[0]
    else:
        kept = info.logical_rows - tp_rank * rows
    return min(rows, max(0, kept)) * (info.numel // rows)
