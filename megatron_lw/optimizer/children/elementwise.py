"""`ElementwiseChild`: steps flat slices of the fp32 rows, all runs of a parameter group at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from megatron_lw.optimizer.children.base import (
    ParamGroup,
    RowsOnly,
    group_ranges,
    state_rows_like,
)
from megatron_lw.optimizer.children.decay import with_l2
from megatron_lw.optimizer.masters import MasterRow

Runs = list[torch.Tensor]


class ElementwiseChild(RowsOnly, ABC):
    """Base of the optimizers whose rule is the same for every element.

    Args:
        masters: rows of its buckets.
        group_of: parameter name -> parameter-group name.
    """

    name: str = "elementwise"
    state_keys: tuple[str, ...] = ()
    workspace_nbytes = 0

    def __init__(self, masters: Sequence[MasterRow], group_of: Mapping[str, str]) -> None:
        self.num_steps = 0
        self._masters = tuple(masters)
        self._states = {key: state_rows_like(masters) for key in self.state_keys}
        self._runs: dict[str, list[tuple[int, slice]]] = {}
        for index, master in enumerate(masters):
            for part in group_ranges(master, group_of):
                run = (index, slice(part.start, part.stop))
                self._runs.setdefault(part.group, []).append(run)

    @property
    def num_buckets(self) -> int:
        """See `Child.num_buckets`."""
        return len(self._masters)

    @torch.no_grad()
    def step(self, groups: Mapping[str, ParamGroup]) -> None:
        """See `Child.step`. No communication."""
        self.num_steps += 1
        rows = [master.gradient() for master in self._masters]
        for name, runs in self._runs.items():
            group = groups[name]
            weights = [self._masters[i].row[run] for i, run in runs]
            grads = with_l2([rows[i][run] for i, run in runs], weights, group)
            states = {key: [row[i][run] for i, run in runs] for key, row in self._states.items()}
            self.advance(weights, grads, states, group)

    def state_rows(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """See `Child.state_rows`."""
        return {key: rows[bucket] for key, rows in self._states.items()}

    @abstractmethod
    def advance(
        self, weights: Runs, grads: Runs, states: Mapping[str, Runs], group: ParamGroup
    ) -> None:
        """Step the runs of one group in place, decay included; `num_steps` counts this step.

        Args:
            weights: fp32 masters.
            grads: fp32, of the same lengths, with the decay of "l2" in them; not written.
            states: state key -> fp32, of the same lengths.
            group: settings.
        """
