"""What a rank holds of a model and its optimizer, in the terms of logical tensors.

The same entries are written by a save and filled by a load: views of masters, states, frozen
parameters and buffers, each with the box of the logical tensor that it is.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_lw.dist_checkpointing.dtypes import dtype_name
from megatron_lw.dist_checkpointing.frozen import FrozenWeight
from megatron_lw.dist_checkpointing.manifest import VALUE, ParamRecord, RowRecord
from megatron_lw.dist_checkpointing.runs import (
    Place,
    logical_parts,
    padding_inside,
    row_content,
)
from megatron_lw.distributed.group import Group
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.boxes import Box
from megatron_lw.optimizer.describe import ParamInfo, describe_frozen
from megatron_lw.optimizer.held import Held, held_buckets
from megatron_lw.optimizer.names import NameMap
from megatron_lw.optimizer.routing import Route

if TYPE_CHECKING:
    from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A part of a logical tensor on this rank.

    Attributes:
        name: identity of the parameter or buffer.
        state: `master`, `value`, `amax_history` or a state key of the child.
        shape: logical shape of the whole tensor.
        box: which part this is.
        tensor: its elements, of shape `box.shape`; a view of what the optimizer or the model holds.
        copies: groups whose ranks hold equal copies of it; compared before it is saved.
        writes: whether this rank writes it, of all that hold a copy.
    """

    name: str
    state: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    copies: tuple[Group, ...]
    writes: bool

    @property
    def key(self) -> str:
        """What messages call it; the same as `TensorRecord.key`."""
        return f"{self.name}/{self.state}"

    @property
    def dtype(self) -> str:
        """Its dtype without the module's name."""
        return dtype_name(self.tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What this rank holds.

    Attributes:
        params: its stepped parameters.
        tied: identity -> global name on this rank, of tied weights, frozen ones too.
        entries: masters and states.
        values: what several ranks may hold without saying so: frozen parameters, persistent
            buffers, and stepped parameters without elements, which lie in no row.
        rows: its rows, with their declared padding.
        frozen: copies of the frozen weights that are kept as FP8, of which `values` has views.
    """

    params: tuple[ParamRecord, ...]
    tied: Mapping[str, str]
    entries: tuple[Entry, ...]
    values: tuple[Entry, ...]
    rows: tuple[RowRecord, ...]
    frozen: tuple[FrozenWeight, ...]


def holdings(optimizer: LayerWiseDistributedOptimizer) -> Holdings:
    """Collect what this rank holds of an optimizer and its model. No communication."""
    runtime, groups = optimizer.runtime, optimizer.groups
    routes = {route.info.name: route for route in runtime.routing.routes}
    held = held_buckets(runtime)
    rank = groups.world.ranks[groups.world.rank]
    frozen = {
        info.name: FrozenWeight.of(identity(info), info, param, groups)
        for info, param in _frozen_parameters(optimizer)
        if info.recipe is not None
    }
    return Holdings(
        params=tuple(_param_record(route, groups) for route in routes.values()),
        tied={
            identity(info): info.name
            for info in (
                *(route.info for route in routes.values()),
                *(info for info, _ in _frozen_parameters(optimizer)),
            )
            if info.tied is not None
        },
        entries=(
            *(entry for each in held for entry in _bucket_entries(each, routes, groups)),
            *_owned_entries(held, routes, groups),
        ),
        values=(
            *_frozen(optimizer, frozen),
            *_buffers(optimizer),
            *_without_elements(held, routes),
        ),
        rows=tuple(_row_record(each, routes, rank) for each in held),
        frozen=tuple(frozen.values()),
    )


def identity(info: ParamInfo) -> str:
    """What a parameter is called in checkpoints: one name for all copies of a tied weight."""
    return info.name if info.tied is None else f"tied/{info.tied}"


def bucket_name(domain: str, child: str, first: ParamInfo) -> str:
    """What a bucket is called, from its first parameter: names do not move, list positions do."""
    return f"{domain}/{child}/{identity(first)}"


def place_of(info: ParamInfo) -> Place:
    """Where this rank's part of a parameter lies in the logical tensor."""
    return Place(
        name=identity(info),
        local_shape=info.local_shape,
        pairs=info.boxes,
        shape=_logical_shape(info),
    )


def _logical_shape(info: ParamInfo) -> tuple[int, ...]:
    if info.logical_rows is None:
        return info.global_shape
    return (info.logical_rows, *info.global_shape[1:])


def _param_record(route: Route, groups: ParallelGroups) -> ParamRecord:
    info = route.info
    matrices = None if info.matrices is None else info.matrices * info.ep_size
    return ParamRecord(
        name=identity(info),
        names=(info.name,),
        dtype=info.dtype,
        shape=_logical_shape(info),
        stored_rows=info.global_shape[0] if info.global_shape else None,
        child=route.child,
        group=route.group.name,
        domain=info.domain,
        tp_dim=info.divisible_dim,
        blocks=info.blocks,
        split_blocks=info.split_blocks,
        qkv=info.qkv if route.matrix is not None and len(route.matrix.shapes) > 1 else None,
        matrices=matrices,
        is_stack=info.domain == "expert" and (matrices or 1) > 1,
        role=info.role,
    )


def _bucket_entries(
    held: Held, routes: Mapping[str, Route], groups: ParallelGroups
) -> Iterator[Entry]:
    """Masters and states of one bucket's row."""
    bucket = held.bucket
    infos = [routes[name].info for name in bucket.names]
    copies = {identity(info): _copies(info, groups) for info in infos}
    content = row_content(bucket.layout, bucket.group.rank, [place_of(info) for info in infos])
    for part in content.parts:
        where, writes = copies[part.place.name]
        for key, row in held.rows.items():
            run = row[part.start : part.start + _numel(part.box)]
            yield Entry(
                name=part.place.name,
                state=key,
                shape=part.place.shape,
                box=part.box,
                tensor=run.view(part.box.shape),
                copies=where,
                writes=writes,
            )


def _without_elements(held: list[Held], routes: Mapping[str, Route]) -> Iterator[Entry]:
    """Masters and states of stepped parameters that have no elements."""
    for each in held:
        for place in (place_of(routes[name].info) for name in each.bucket.names):
            if 0 in place.shape:
                whole = Box((0,) * len(place.shape), place.shape)
                for key, row in each.rows.items():
                    yield _value(place.name, place.shape, whole, row[:0].view(place.shape), key)


def _owned_entries(
    held: list[Held], routes: Mapping[str, Route], groups: ParallelGroups
) -> Iterator[Entry]:
    """States that lie at the owner of a matrix; the first stage writes those of a tied weight."""
    for child in {id(each.child): each.child for each in held}.values():
        for state in child.owned_states():
            info = routes[state.param].info
            yield Entry(
                name=identity(info),
                state=state.key,
                shape=state.global_shape,
                box=Box(state.start, tuple(state.tensor.shape)),
                tensor=state.tensor,
                copies=(),
                writes=info.tied is None or groups.embedding.rank == 0,
            )


def _copies(info: ParamInfo, groups: ParallelGroups) -> tuple[tuple[Group, ...], bool]:
    """Which ranks hold the same part of a stepped parameter, and whether this one writes it."""
    tensor = groups.domain(info.domain).tensor
    over = [tensor] if info.tp_dim is None else []
    is_first = takes_turn(info, tensor.size, tensor.rank)
    if info.tied is not None:
        over.append(groups.embedding)
        is_first = is_first and groups.embedding.rank == 0
    return tuple(group for group in over if group.size > 1), is_first


def takes_turn(info: ParamInfo, size: int, rank: int) -> bool:
    """Whether a rank writes for its tensor-parallel group; the writers take turns by name.

    Args:
        info: a stepped parameter.
        size: tensor-parallel ranks of its domain.
        rank: which of them.
    """
    whole = info.tp_dim is None and size > 1
    return not whole or rank == zlib.crc32(info.name.encode()) % size


def _row_record(held: Held, routes: Mapping[str, Route], rank: int) -> RowRecord:
    bucket = held.bucket
    infos = [routes[name].info for name in bucket.names]
    content = row_content(bucket.layout, bucket.group.rank, [place_of(info) for info in infos])
    return RowRecord(
        bucket=bucket_name(held.domain, held.kind, infos[0]),
        rank=rank,
        length=held.master.row.numel(),
        runs=content.runs,
        padding=content.padding,
    )


def _frozen(
    optimizer: LayerWiseDistributedOptimizer, quantised: Mapping[str, FrozenWeight]
) -> Iterator[Entry]:
    for info, param in _frozen_parameters(optimizer):
        place = place_of(info)
        kept = quantised.get(info.name)
        values = param.detach() if kept is None else kept.values
        for part in logical_parts(place, 0, info.numel):
            local = _local_view(values, part.start, part.box)
            yield _value(place.name, place.shape, part.box, local)
        for name, tensor in () if kept is None else kept.tensors():
            shape = tuple(tensor.shape)
            yield _value(name, shape, Box((0,) * len(shape), shape), tensor)


def frozen_padding(
    optimizer: LayerWiseDistributedOptimizer, held: Holdings
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and view of the padding rows inside frozen parameters; those of rows are in their rows.

    A load makes them zero.
    """
    copies = {each.name: each.values for each in held.frozen}
    for info, param in _frozen_parameters(optimizer):
        place = place_of(info)
        inner = math.prod(place.local_shape[1:])
        for low, high in padding_inside(place):
            values = copies[place.name] if place.name in copies else param.detach()
            yield place.name, values[low // inner : high // inner]


def _frozen_parameters(
    optimizer: LayerWiseDistributedOptimizer,
) -> Iterable[tuple[ParamInfo, torch.nn.Parameter]]:
    chunks, groups = optimizer.model_chunks, optimizer.groups

    def to_global(chunk: int, name: str) -> str:
        return chunks[chunk].names.to_global(chunk, name)

    found = describe_frozen([chunk.module for chunk in chunks], groups, NameMap(to_global))
    return found.values()


def _buffers(optimizer: LayerWiseDistributedOptimizer) -> Iterator[Entry]:
    """Persistent buffers; where chunks have one of the same name, those of all chunks."""
    for index, chunk in enumerate(optimizer.model_chunks):
        persistent = chunk.module.state_dict(keep_vars=True)
        for local_name, buffer in chunk.module.named_buffers():
            name = chunk.names.to_global(index, local_name)
            if local_name in persistent:
                shape = tuple(buffer.shape)
                whole = Box((0,) * len(shape), shape)
                yield _value(name, shape, whole, buffer.detach())


def _value(
    name: str,
    shape: tuple[int, ...],
    box: Box,
    tensor: torch.Tensor,
    state: str = VALUE,
) -> Entry:
    """An entry that any rank may hold; who writes it is agreed on at save."""
    return Entry(
        name=name,
        state=state,
        shape=shape,
        box=box,
        tensor=tensor,
        copies=(),
        writes=False,
    )


def _local_view(tensor: torch.Tensor, start: int, box: Box) -> torch.Tensor:
    """The part of a local tensor, contiguous in row-major order, that a logical box is."""
    index: list[slice] = []
    rest = start
    for dim, extent in enumerate(box.shape):
        inner = tensor.shape[dim + 1 :].numel()
        at, rest = divmod(rest, inner) if inner else (0, 0)
        index.append(slice(at, at + extent))
    return tensor[tuple(index)]


def _numel(box: Box) -> int:
    return torch.Size(box.shape).numel()
