"""The ownership plan of a domain: which bucket a parameter lies in, and who computes what.

Integers and arrays only, no torch.distributed: every rank computes the same plan from the same
facts, and `OwnershipPlan.digest` proves it. A *bucket* belongs to one model chunk and one child
optimizer, so that matrices and element-wise parameters never share one; every row of it then holds
the same amount of every state, one fused kernel steps an element-wise bucket, and one flat momentum
serves a bucket of matrices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lw.child_names import WHOLE_CHILDREN
from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.bucketing import BucketPlan, Cost, close_domain, pack_domain
from megatron_lw.optimizer.owners import assign_kinds, newton_schulz_cost
from megatron_lw.optimizer.pieces import BoolArray, FloatArray, IntArray, Pieces
from megatron_lw.optimizer.plan_params import (
    PlanParam,
    PlanUnit,
    backward_indices,
    canonical_order,
)
from megatron_lw.optimizer.plan_report import ElementBytes, PlanMetrics, describe, measure

__all__ = ["BucketPlan", "OwnershipPlan", "PlanMetrics", "PlanParam", "PlanUnit", "plan_domain"]

DIGEST_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnershipPlan:
    """Everything decided about a domain's parameters; equal plans have equal digests.

    Ranks are those of the tensor-parallel x data-parallel group: `owner = row * tp + t`.

    Attributes:
        domain: Name of the domain, such as dense or expert.
        dp: Rows.
        tp: Tensor-parallel ranks of a row.
        alignment: Elements to which parameters and rows are aligned.
        params: Parameters in canonical (natural-sorted) order.
        buckets: Buckets in the order in which backward completes them.
        matrix_param: [matrices] index of the parameter.
        matrix_unit: [matrices] which of its `owned_units` it is.
        matrix_start: [matrices] offset in the parameter's flattened local elements.
        matrix_numel: [matrices] local elements.
        matrix_bucket: [matrices] index of the bucket.
        matrix_offset: [matrices] offset in the bucket.
        owner: [matrices] rank that computes the update.
        cost: [matrices] Newton-Schulz cost of the global matrix; `whole_cost` where it is stepped
            whole.
        pieces: Rows that hold the matrices.
        loads: [ranks] cost of what each rank orthogonalises; of what it steps whole, if nothing is.
        bound: Lower bound of the makespan of any assignment.
        lpt_makespan: Makespan of plain longest-first assignment.
    """

    domain: str
    dp: int
    tp: int
    alignment: int
    params: tuple[PlanParam, ...]
    buckets: tuple[BucketPlan, ...]
    matrix_param: IntArray
    matrix_unit: IntArray
    matrix_start: IntArray
    matrix_numel: IntArray
    matrix_bucket: IntArray
    matrix_offset: IntArray
    owner: IntArray
    cost: FloatArray
    pieces: Pieces
    loads: FloatArray
    bound: float
    lpt_makespan: float

    @property
    def makespan(self) -> float:
        """Largest cost that one rank owns."""
        return float(self.loads.max())

    @property
    def sharded(self) -> BoolArray:
        """[matrices] true where tensor parallelism cuts the matrix."""
        return np.array([self.params[i].sharded for i in self.matrix_param], dtype=np.bool_)

    def unit_of(self, matrix: int) -> PlanUnit:
        """Return the rows that matrix `matrix` of the plan is, with what is orthogonalised."""
        param = self.params[int(self.matrix_param[matrix])]
        return param.owned_units[int(self.matrix_unit[matrix])]

    def is_matrix_bucket(self, index: int) -> bool:
        """Return whether bucket `index` holds matrices, not element-wise parameters."""
        return self.params[self.buckets[index].params[0]].matrix is not None

    def facts(self) -> list[str]:
        """Return one line a parameter, in canonical order: all that is known and decided of it.

        Where two ranks' plans differ, the first differing line names the parameter.
        """
        places = {
            param: (bucket.index, place, bucket.row_length)
            for bucket in self.buckets
            for place, param in enumerate(bucket.params)
        }
        owners: list[list[tuple[int, float]]] = [[] for _ in self.params]
        for param, owner, cost in zip(
            self.matrix_param.tolist(), self.owner.tolist(), self.cost.tolist(), strict=True
        ):
            owners[param].append((owner, cost))
        return [
            json.dumps([*param.values(), places[i], owners[i]])
            for i, param in enumerate(self.params)
        ]

    def digest(self) -> str:
        """Return a SHA-256 over everything that matters, equal in every process."""
        header = [DIGEST_VERSION, self.domain, self.dp, self.tp, self.alignment, len(self.buckets)]
        state = hashlib.sha256(json.dumps(header).encode())
        for line in self.facts():
            state.update(b"\n")
            state.update(line.encode())
        return state.hexdigest()

    def metrics(
        self,
        *,
        reduce_bytes: int = 4,
        gather_bytes: int = 2,
        exchange_bytes: int = 2,
        matrix_state_bytes: int = 4,
        elementwise_state_bytes: int = 8,
    ) -> PlanMetrics:
        """Measure the plan against its promises.

        Args:
            reduce_bytes: Bytes of an element in the gradient reduce-scatter.
            gather_bytes: Bytes of an element in the weight all-gather.
            exchange_bytes: Bytes of an element in the exchange.
            matrix_state_bytes: Optimizer state of a matrix element besides the 4-byte master.
            elementwise_state_bytes: The same of an element-wise parameter.
        """
        sizes = ElementBytes(
            reduce=reduce_bytes,
            gather=gather_bytes,
            exchange=exchange_bytes,
            matrix_state=matrix_state_bytes,
            elementwise_state=elementwise_state_bytes,
        )
        return measure(self, sizes)

    def describe(self) -> str:
        """Return the plan as a table for people."""
        return describe(self)


def plan_domain(
    params: Iterable[PlanParam],
    *,
    domain: str = "dense",
    dp: int,
    tp: int = 1,
    bucket_size: int | None = None,
    alignment: int = 64,
    backward_order: Sequence[str] | None = None,
    cost: Cost = newton_schulz_cost,
) -> OwnershipPlan:
    """Plan the parameters of one domain; the order in which they are given changes nothing.

    Args:
        params: The parameters, each name once.
        domain: Name of the domain.
        dp: Rows: ranks that share the gradient reduction, context parallelism included.
        tp: Tensor-parallel ranks.
        bucket_size: Soft minimum of a bucket in elements; None for the default of `packing`.
        alignment: Elements to which parameters and rows are aligned.
        backward_order: All names in the order in which backward completes them; None for the
            reverse of the natural-sorted names.
        cost: Cost of orthogonalising one global matrix of (rows, cols).

    Raises:
        ConfigError: If a size is below 1 or a parameter contradicts itself or another; names it.
    """
    _check_sizes(dp=dp, tp=tp, bucket_size=bucket_size, alignment=alignment)
    ordered = canonical_order(params, tp)
    backward = backward_indices(ordered, backward_order)
    closed = close_domain(ordered, backward, dp=dp, bucket_size=bucket_size, alignment=alignment)
    packed = pack_domain(ordered, closed, dp=dp, alignment=alignment, cost=cost)
    units = packed.units
    sharded = np.array([ordered[i].sharded for i in units.param], dtype=np.bool_)
    whole = np.array([ordered[i].child in WHOLE_CHILDREN for i in units.param], dtype=np.bool_)
    owned = assign_kinds(units.cost, whole, packed.pieces, sharded, dp=dp, tp=tp)
    for array in (*units, owned.owner, owned.loads):
        array.flags.writeable = False
    return OwnershipPlan(
        domain=domain,
        dp=dp,
        tp=tp,
        alignment=alignment,
        params=ordered,
        buckets=packed.buckets,
        matrix_param=units.param,
        matrix_unit=units.unit,
        matrix_start=units.start,
        matrix_numel=units.numel,
        matrix_bucket=units.bucket,
        matrix_offset=units.offset,
        owner=owned.owner,
        cost=units.cost,
        pieces=packed.pieces,
        loads=owned.loads,
        bound=owned.bound,
        lpt_makespan=owned.lpt_makespan,
    )


def _check_sizes(*, dp: int, tp: int, bucket_size: int | None, alignment: int) -> None:
    sizes = {"dp": dp, "tp": tp, "bucket_size": bucket_size, "alignment": alignment}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is below 1: give a positive integer")
