"""From the record of a parameter to the facts that a rank of another layout would describe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from megatron_lw.dist_checkpointing.manifest import ParamRecord
from megatron_lw.errors import CheckpointError
from megatron_lw.groups import Domain
from megatron_lw.optimizer.boxes import stack_boxes, tensor_parallel_boxes
from megatron_lw.optimizer.describe import ParamInfo, Role
from megatron_lw.optimizer.routing import ParamGroupSpec, Route, view_under
from megatron_lw.optimizer.tags import row_dimension
from megatron_lw.topology import RankPlace, Topology, expert_of

TIED = "tied/"


def route_of(param: ParamRecord, topology: Topology, place: RankPlace) -> Route:
    """What a rank would describe of a parameter, with the child and group that it had.

    Raises:
        CheckpointError: a size does not divide it.
        ConfigError: its blocks do not divide, or it is cut where its child cannot step it.
    """
    info = _info(param, topology, place)
    group = ParamGroupSpec(
        name=param.group, child=param.child, is_expert=param.domain == "expert", settings=()
    )
    return Route(info=info, group=group, matrix=view_under(param.child, info), reason="checkpoint")


def padded(param: ParamRecord, tp: int, multiple: int | None) -> ParamRecord:
    """A parameter with the rows that the target stores.

    Args:
        param: as the source stores it.
        tp: tensor-parallel ranks of the target.
        multiple: see `TargetPlan`.
    """
    is_vocabulary = param.role in ("embedding", "output") and param.tp_dim == 0
    if multiple is None or not is_vocabulary:
        return param
    step = multiple * tp
    return replace(param, stored_rows=-(-param.shape[0] // step) * step)


def divide_experts(params: Iterable[ParamRecord], ep: int) -> dict[str, int]:
    """For each parameter of a single expert the expert-parallel rank that holds it.

    Raises:
        CheckpointError: experts cannot be told apart, or do not divide.
    """
    single = [p for p in params if p.domain == "expert" and not p.is_stack]
    if ep == 1:
        return {}
    numbers = {param.name: expert_of(param.names[0]) for param in single}
    for name, number in numbers.items():
        if number is None:
            raise CheckpointError(
                f"parameter {name!r}: ep={ep} needs to know its expert, and its name does not say "
                "(experts.N, weightN); load and save with that layout instead"
            )
    experts = sorted({number for number in numbers.values() if number is not None})
    if len(experts) % ep:
        raise CheckpointError(f"ep={ep} does not divide the {len(experts)} experts that were saved")
    place = {number: at * ep // len(experts) for at, number in enumerate(experts)}
    return {name: place[number] for name, number in numbers.items() if number is not None}


def _info(param: ParamRecord, topology: Topology, place: RankPlace) -> ParamInfo:
    _, tensor_size = topology.sizes_of(param.domain)
    _, tensor_rank = place.of_domain(param.domain)
    rows = param.stored_rows
    stored = param.shape if rows is None else (rows, *param.shape[1:])
    parts = topology.ep if param.is_stack else 1
    tp_dim = param.tp_dim if tensor_size > 1 else None
    local = list(stored)
    if parts > 1:
        local[0] = _divided(param, local[0], "ep", parts)
    if tp_dim is not None:
        label = "etp" if param.domain == "expert" else "tp"
        local[tp_dim] = _divided(param, local[tp_dim], label, tensor_size)
    shape, boxes = tensor_parallel_boxes(
        param.name,
        tuple(local),
        tp_dim,
        param.blocks,
        tensor_size,
        tensor_rank,
        row_dimension(len(local), param.matrices),
    )
    if parts > 1:
        shape, boxes = stack_boxes(shape, boxes, parts, place.ep)
    tied = param.name.removeprefix(TIED) if param.name.startswith(TIED) else None
    return ParamInfo(
        name=param.names[0] if tied is None or place.stage == 0 else param.names[-1],
        local_name=param.names[0],
        chunk=0,
        dtype=param.dtype,
        local_shape=tuple(local),
        global_shape=shape,
        boxes=boxes,
        domain=cast(Domain, param.domain),
        tp_dim=tp_dim,
        role=cast(Role, param.role),
        matrices=None if param.matrices is None else param.matrices // parts,
        ep_size=parts,
        blocks=param.blocks,
        split_blocks=param.split_blocks,
        qkv=param.qkv,
        logical_rows=param.shape[0] if stored != param.shape else None,
        tied=tied,
    )


def _divided(param: ParamRecord, extent: int, label: str, parts: int) -> int:
    if extent % parts:
        raise CheckpointError(
            f"parameter {param.name!r} stores {extent} of shape {param.shape} along the dimension "
            f"that {label}={parts} divides: choose a divisor, or another padding of a vocabulary "
            "(--vocab-multiple)"
        )
    return extent // parts
