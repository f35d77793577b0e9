"""What each rank of another layout would hold of a checkpoint: planned from its manifest alone.

The records of the parameters become the facts that a run would describe, and from there the same
functions route, plan, lay out and cut as in a run. Pipeline stages take layers as `megatron-lw
plan` divides them: evenly, embeddings on the first stage, what is outside of layers on the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lw.dist_checkpointing.copies import label, writer_among
from megatron_lw.dist_checkpointing.entries import bucket_name, place_of, takes_turn
from megatron_lw.dist_checkpointing.manifest import (
    HISTORY,
    MASTER,
    VALUE,
    Manifest,
    ParamRecord,
    RowRecord,
    TensorRecord,
)
from megatron_lw.dist_checkpointing.runs import row_content
from megatron_lw.dist_checkpointing.target_params import TIED, divide_experts, padded, route_of
from megatron_lw.errors import CheckpointError
from megatron_lw.groups import Domain
from megatron_lw.optimizer.boxes import Box
from megatron_lw.optimizer.layout import BucketLayout
from megatron_lw.optimizer.plan import OwnershipPlan, PlanParam
from megatron_lw.optimizer.plan_routes import plan_routes
from megatron_lw.optimizer.routing import Route
from megatron_lw.topology import RankPlace, Topology, divide_layers, layer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A part of a logical tensor that a rank writes.

    Attributes:
        record: the tensor, as the source has it.
        box: the part.
    """

    record: TensorRecord
    box: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTarget:
    """What one rank holds and writes.

    Attributes:
        rank: its global rank.
        params: its parameters.
        rows: its rows.
        wanted: what it writes, by name, state and place.
    """

    rank: int
    params: tuple[ParamRecord, ...]
    rows: tuple[RowRecord, ...]
    wanted: tuple[Wanted, ...]


class TargetPlan:
    """Plans the ranks of another layout.

    Args:
        manifest: of the source.
        topology: of the target.
        bucket_size: as in `DDPConfig`.
        vocab_multiple: rows of embeddings and output layers that tensor parallelism divides are
            padded to a multiple of this times its size; None: as they are stored.

    Raises:
        CheckpointError: something cannot be planned from the manifest; it is named.
        ConfigError: there are more stages than layers.
    """

    def __init__(
        self,
        manifest: Manifest,
        topology: Topology,
        *,
        bucket_size: int | None = None,
        vocab_multiple: int | None = None,
    ) -> None:
        self._manifest = manifest
        self._topology = topology
        self._bucket_size = bucket_size
        self._params = [padded(p, topology.tp, vocab_multiple) for p in manifest.params]
        layers = (layer_of(param.names[0]) for param in self._params)
        self._stages = divide_layers([n for n in layers if n is not None], topology.pp)
        self._experts = divide_experts(self._params, topology.ep)
        self._plans: dict[tuple[int, int], Mapping[Domain, OwnershipPlan]] = {}
        self._records: dict[str, dict[str, TensorRecord]] = {}
        self._history_writers: Mapping[int, list[Wanted]] | None = None
        for record in manifest.tensors:
            self._records.setdefault(record.name, {})[record.state] = record

    def rank(self, rank: int) -> RankTarget:
        """What a rank holds and writes.

        Raises:
            CheckpointError: a state is missing, or a size does not divide a parameter.
            ConfigError: a parameter is cut where its child cannot step it.
        """
        place = self._topology.place(rank)
        params = [param for param in self._params if self._is_on(param, place)]
        routes = {
            route.info.name: route
            for route in (route_of(param, self._topology, place) for param in params)
        }
        rows: list[RowRecord] = []
        wanted = [*self._values(rank), *self._histories(rank)]
        for domain, plan in self._plan(place, tuple(routes.values())).items():
            for index in range(len(plan.buckets)):
                row, found = self._bucket(place, domain, plan, index, routes)
                rows.append(row)
                wanted += found
            wanted += self._owned(place, domain, plan, routes)
        return RankTarget(
            rank=rank,
            params=tuple(params),
            rows=tuple(rows),
            wanted=tuple(
                sorted(wanted, key=lambda w: (w.record.name, w.record.state, w.box.start))
            ),
        )

    def _is_on(self, param: ParamRecord, place: RankPlace) -> bool:
        """Whether a rank holds a part of a parameter."""
        expert = self._experts.get(param.name)
        if expert is not None and expert != place.ep:
            return False
        layer, last = layer_of(param.names[0]), self._topology.pp - 1
        if layer is not None:
            return self._stages[layer] == place.stage
        if param.name.startswith(TIED):
            return place.stage in (0, last)
        return place.stage == (0 if param.role == "embedding" else last)

    def _plan(self, place: RankPlace, routes: Sequence[Route]) -> Mapping[Domain, OwnershipPlan]:
        """Plans of a rank's domains; the same for all ranks of a stage with the same experts."""
        key = (place.stage, place.ep)
        if key not in self._plans:
            self._plans[key] = plan_routes(routes, self._topology.sizes_of, self._bucket_size)
        return self._plans[key]

    def _bucket(
        self,
        place: RankPlace,
        domain: Domain,
        plan: OwnershipPlan,
        index: int,
        routes: Mapping[str, Route],
    ) -> tuple[RowRecord, list[Wanted]]:
        """A rank's row of a bucket, and what of it the rank writes."""
        layout = BucketLayout.build(plan, index)
        infos = [routes[plan.params[i].name].info for i in layout.params]
        (row, tensor_rank), (_, tensor_size) = (
            place.of_domain(domain),
            self._topology.sizes_of(domain),
        )
        places = [place_of(info) for info in infos]
        content = row_content(layout, row, places)
        child = plan.buckets[index].child
        writes = {
            its_place.name
            for its_place, info in zip(places, infos, strict=True)
            if (info.tied is None or place.stage == 0)
            and takes_turn(info, tensor_size, tensor_rank)
        }
        wanted = [
            Wanted(record=record, box=part.box)
            for part in content.parts
            if part.place.name in writes
            for record in self._row_records(part.place.name, child)
        ]
        record = RowRecord(
            bucket=bucket_name(domain, child, infos[0]),
            rank=place.rank,
            length=layout.row_lengths[row],
            runs=content.runs,
            padding=content.padding,
        )
        return record, wanted

    def _row_records(self, name: str, child: str) -> Iterator[TensorRecord]:
        """Master and states of a parameter that lie in rows."""
        for state in (MASTER, *self._manifest.children[child].state_keys):
            record = self._records.get(name, {}).get(state)
            if record is None:
                raise CheckpointError(f"the checkpoint has no '{name}/{state}'")
            yield record

    def _owned(
        self, place: RankPlace, domain: Domain, plan: OwnershipPlan, routes: Mapping[str, Route]
    ) -> Iterator[Wanted]:
        """States that lie whole at the owner of their matrix."""
        _, tensor_size = self._topology.sizes_of(domain)
        row, tensor_rank = place.of_domain(domain)
        here = row * tensor_size + tensor_rank
        for index, param in enumerate(plan.params):
            info, child = routes[param.name].info, param.child
            if info.tied is not None and place.stage > 0:
                continue
            keys = (MASTER, VALUE, HISTORY, *self._manifest.children[child].state_keys)
            owners = plan.owner[np.flatnonzero(plan.matrix_param == index)].tolist() or [0]
            for state, record in self._records[place_of(info).name].items():
                if state not in keys:
                    part = place.ep if info.ep_size > 1 else 0
                    boxes = _matrix_boxes(record, param.count, info.ep_size, part)
                    mine = owners[_unit_of(state, param) :: max(1, len(param.owned_units))]
                    for owner, box in zip(mine, boxes, strict=False):
                        if owner == here:
                            yield Wanted(record=record, box=box)

    def _values(self, rank: int) -> Iterator[Wanted]:
        """Frozen parameters, buffers, tensors aside and what has no elements that a rank writes."""
        stage_size = self._topology.dp * self._topology.tp
        for record in self._manifest.tensors:
            if record.state != VALUE and 0 not in record.shape:
                continue
            layer = layer_of(record.name)
            holders = range(self._topology.world)
            if layer in self._stages:
                first = self._stages[layer] * stage_size
                holders = range(first, first + stage_size)
            for piece in record.pieces:
                if writer_among(holders, label(record.key, piece.box.start)) == rank:
                    yield Wanted(record=record, box=piece.box)

    def _histories(self, rank: int) -> Iterator[Wanted]:
        """Histories that a rank writes, of the weights that it holds a part of."""
        if self._history_writers is None:
            self._history_writers = self._assign_histories()
        yield from self._history_writers.get(rank, ())

    def _assign_histories(self) -> Mapping[int, list[Wanted]]:
        """Writers of histories, as a save would choose them, each part as it was saved."""
        found: dict[int, list[Wanted]] = {}
        places = [self._topology.place(rank) for rank in range(self._topology.world)]
        for param in self._params:
            record = self._records.get(param.name, {}).get(HISTORY)
            if record is None:
                continue
            holders = [place for place in places if self._is_on(param, place)]
            _, tensor_size = self._topology.sizes_of(param.domain)
            for piece in record.pieces:
                at = piece.box.start[0]
                mine = [p.rank for p in holders if p.of_domain(param.domain)[1] == at]
                divided = record.shape[0] == tensor_size > 1
                among = mine if divided else [p.rank for p in holders]
                writer = writer_among(among, label(record.key, piece.box.start))
                found.setdefault(writer, []).append(Wanted(record=record, box=piece.box))
        return found


def _unit_of(state: str, param: PlanParam) -> int:
    """Which unit of a stored matrix a state belongs to: its key ends in the number of the part."""
    of_part = [number for number, unit in enumerate(param.owned_units) for _ in unit.matrices]
    if len(of_part) < 2:
        return 0
    return of_part[int(state.rpartition(".")[2])]


def _matrix_boxes(record: TensorRecord, count: int, parts: int, part: int) -> list[Box]:
    """Which part of a state belongs to each matrix of a parameter, on one expert-parallel rank.

    Args:
        record: the state.
        count: matrices of the parameter on this rank.
        parts: ranks over which the parameter is stacked.
        part: this rank among them.
    """
    shape, total = record.shape, count * parts
    if total > 1 and shape and shape[0] % total == 0:
        step = shape[0] // total
        first = part * count
        rest = tuple(0 for _ in shape[1:])
        return [Box(((first + i) * step, *rest), (step, *shape[1:])) for i in range(count)]
    # It does not divide by matrices: the owner of the first one keeps all of it.
    return [Box((0,) * len(shape), shape)] if part == 0 else []
