"""What the layer-wise optimizer and its children agree on.

A child steps whole buckets: every bucket belongs to one child, so a child's state is flat rows
beside the master row. Settings come from live parameter groups, read at every step, so that any
scheduler drives them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_lw.optimizer.masters import MasterRow

ParamGroup = dict[str, Any]
OwnedValue = float | int | str | tuple[float, ...] | None
"""What of a state is no tensor: goes into a manifest as it is."""


@dataclass(frozen=True, slots=True)
class GroupRange:
    """A run of a row whose parameters share one parameter group.

    Attributes:
        group: name of the parameter group.
        start: first element in the row.
        stop: one past the last; padding behind a parameter belongs to its range, since it is zero
            and stays zero under every element-wise rule.
    """

    group: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedState:
    """A box of a state that is no row: shaped like a matrix, at the owner of its parameter.

    Each element of the logical tensor is on exactly one of the ranks that share the plan, like the
    elements of a row. A load writes into `tensor`; it is valid until the next step.

    Attributes:
        param: global name of the parameter.
        key: name of the state; (param, key) names the logical tensor.
        tensor: the box that this rank holds, any dtype.
        global_shape: of the logical tensor.
        start: where the box begins in it, one index a dimension.
    """

    param: str
    key: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    start: tuple[int, ...]


class Child(Protocol):
    """An optimizer under the layer-wise one.

    Attributes:
        name: what routing and checkpoints call it.
        state_keys: names of its per-element states, known before any state exists.
        num_steps: steps taken; it belongs to the child and advances on ranks that own nothing.
    """

    name: str
    state_keys: tuple[str, ...]
    num_steps: int

    def step(self, groups: Mapping[str, ParamGroup]) -> None:
        """Advance the masters of all its buckets by one step.

        Args:
            groups: parameter groups by name, with their current settings.
        """

    def state_rows(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """State key -> fp32 row of its bucket of that position."""

    def owned_states(self) -> Sequence[OwnedState]:
        """Every state that is no row, from construction on: what this rank owns of it."""

    def owned_values(self) -> Mapping[str, Mapping[str, OwnedValue]]:
        """Parameter name -> state key -> value, of what this rank owns and what is no tensor."""

    def load_owned_values(self, values: Mapping[str, Mapping[str, OwnedValue]]) -> None:
        """Set what `owned_values` gave, for parameters that this rank owns; others are passed over.

        With `num_steps` and the tensors of `owned_states` written too, in any order, the child goes
        on from there.
        """

    def restart(self, params: Collection[str]) -> None:
        """Let what this rank owns of these parameters be as before the first step.

        Args:
            params: global names; another child stepped them until a load.
        """

    @property
    def num_buckets(self) -> int:
        """Number of buckets it steps."""

    @property
    def workspace_nbytes(self) -> int:
        """Bytes allocated besides states."""


class RowsOnly:
    """A child, or part of one, whose states are rows and nothing else."""

    def owned_states(self) -> Sequence[OwnedState]:
        """See `Child.owned_states`: none."""
        return ()

    def restart(self, params: Collection[str]) -> None:
        """See `Child.restart`: rows are zero before the first step, which a load sees to."""

    def owned_values(self) -> Mapping[str, Mapping[str, OwnedValue]]:
        """See `Child.owned_values`: none."""
        return {}

    def load_owned_values(self, values: Mapping[str, Mapping[str, OwnedValue]]) -> None:
        """See `Child.load_owned_values`: nothing to set."""


def group_ranges(master: MasterRow, group_of: Mapping[str, str]) -> tuple[GroupRange, ...]:
    """Divide a row into the fewest runs of one parameter group each.

    Args:
        master: the row.
        group_of: parameter name -> parameter-group name.
    """
    slots = list(master.bucket.row_slots())
    ranges: list[GroupRange] = []
    for index, (name, slot) in enumerate(slots):
        last = index + 1 == len(slots)
        stop = master.row.numel() if last else slots[index + 1][1].row_start
        group = group_of[name]
        if ranges and ranges[-1].group == group:
            ranges[-1] = GroupRange(group, ranges[-1].start, stop)
        else:
            ranges.append(GroupRange(group, slot.row_start, stop))
    return tuple(ranges)


def state_rows_like(masters: Sequence[MasterRow]) -> list[torch.Tensor]:
    """One zero fp32 row for each master row."""
    return [torch.zeros_like(master.row) for master in masters]
