"""Every bucket with all that a rank holds of it, for whoever reads or writes state as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.groups import Domain
from megatron_lw.optimizer.children.base import Child
from megatron_lw.optimizer.masters import MasterRow
from megatron_lw.optimizer.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A bucket with everything that this rank holds of it.

    Attributes:
        domain: whose groups it uses.
        bucket: weights and gradients.
        master: this rank's fp32 row.
        states: state key -> row of the child that steps it.
        kind: what routing calls the child that steps it.
        child: that child.
    """

    domain: Domain
    bucket: BucketBuffer
    master: MasterRow
    states: Mapping[str, torch.Tensor]
    kind: str
    child: Child

    @property
    def rows(self) -> Mapping[str, torch.Tensor]:
        """Master and states by name."""
        return {"master": self.master.row, **self.states}

    def named_at(self, index: int) -> str:
        """The parameter and element that lie at a place of the row."""
        for name, slot in self.bucket.row_slots():
            if slot.row_start <= index < slot.row_start + slot.numel:
                return f"parameter {name!r}, element {slot.param_start + index - slot.row_start}"
        return f"{self.bucket.label}, padding at {index} of its row"


def held_buckets(runtime: Runtime) -> list[Held]:
    """All buckets with what belongs to them, in the order in which they were built."""
    publishers, children = iter(runtime.publishers), iter(runtime.children)
    held: list[Held] = []
    for domain, plan in runtime.plans.items():
        child_of = {kind: next(children) for kind in sorted({b.child for b in plan.buckets})}
        place: Counter[str] = Counter()
        for planned in plan.buckets:
            master, child = next(publishers).master, child_of[planned.child]
            held.append(
                Held(
                    domain=domain,
                    bucket=master.bucket,
                    master=master,
                    states=child.state_rows(place[planned.child]),
                    kind=planned.child,
                    child=child,
                )
            )
            place[planned.child] += 1
    return held
