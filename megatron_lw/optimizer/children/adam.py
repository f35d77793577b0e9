"""Adam with decoupled weight decay, element by element on flat rows.

Kingma and Ba (arXiv:1412.6980), decay after Loshchilov and Hutter (arXiv:1711.05101). All runs of a
parameter group are stepped by one fused call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron_lw.optimizer.children.adam_backends import AdamBackend
from megatron_lw.optimizer.children.base import (
    ParamGroup,
    RowsOnly,
    group_ranges,
    state_rows_like,
)
from megatron_lw.optimizer.masters import MasterRow


class AdamChild(RowsOnly):
    """Steps its buckets with Adam.

    Args:
        masters: rows of its buckets.
        group_of: parameter name -> parameter-group name.
        backend: the fused kernel.
    """

    name: str = "adam"
    state_keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    workspace_nbytes = 0

    def __init__(
        self, masters: Sequence[MasterRow], group_of: Mapping[str, str], backend: AdamBackend
    ) -> None:
        self.num_steps = 0
        self.backend = backend
        self._masters = tuple(masters)
        self._exp_avgs = state_rows_like(masters)
        self._exp_avg_sqs = state_rows_like(masters)
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
        grads = [master.gradient() for master in self._masters]
        for name, runs in self._runs.items():
            group = groups[name]
            self.backend(
                [self._masters[i].row[run] for i, run in runs],
                [grads[i][run] for i, run in runs],
                [self._exp_avgs[i][run] for i, run in runs],
                [self._exp_avg_sqs[i][run] for i, run in runs],
                step=self.num_steps,
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
            )

    def state_rows(self, bucket: int) -> Mapping[str, torch.Tensor]:
        """See `Child.state_rows`."""
        return {"exp_avg": self._exp_avgs[bucket], "exp_avg_sq": self._exp_avg_sqs[bucket]}
