"""QK-clip: query and key weights are scaled down where attention logits have grown too large.

After a step, with S the largest logit of a head over all ranks and micro-batches of the step and t
the threshold, `g = min(1, t / S)` (MuonClip; Kimi K2, arXiv:2507.20534). Rows of queries and keys
of the head are multiplied by sqrt(g), so its logits by g. In multi-head latent attention that goes
for the compressed parts, the rotary part of a query takes g itself, and the rotary key, which all
heads share, stays: that is what `HeadRows.power` is for. A key head that serves several query heads
takes the smallest of their g.

The model measures the logits, since nobody else sees them:

    clip = QKClip(optimizer, {"layers.0": HeadRows.of_heads(...)}, num_heads=8)
    clip.observe("layers.0", maxima)     # in the forward, for the heads that this rank has
    optimizer.step()                     # scales the masters, then publishes
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_lw.distributed.agreement import Kept, attempt
from megatron_lw.distributed.collectives import all_reduce
from megatron_lw.errors import ConfigError, StateError
from megatron_lw.optimizer.agree import agree_on_plan
from megatron_lw.optimizer.describe import ParamInfo
from megatron_lw.optimizer.held import held_buckets
from megatron_lw.optimizer.runtime import Runtime
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """A run of rows of one weight, and the heads whose logits they make.

    Attributes:
        param: global name of the weight.
        start: first row of the whole (global) weight.
        stop: one past the last.
        heads: query heads of the layer; the smallest factor among them counts.
        power: of the factor: 0.5 for rows of which both queries and keys are scaled, 1 where only
            one of the two is.
    """

    param: str
    start: int
    stop: int
    heads: tuple[int, ...]
    power: float = 0.5

    @staticmethod
    def of_heads(param: str, head_dim: int, num_heads: int, served: int = 1) -> list[HeadRows]:
        """The rows of a weight that stacks heads of one width.

        Args:
            param: global name.
            head_dim: rows of a head.
            num_heads: heads in this weight.
            served: query heads that each of them serves: 1 for queries, more for grouped keys.
        """
        return [
            HeadRows(
                param=param,
                start=head * head_dim,
                stop=(head + 1) * head_dim,
                heads=tuple(range(head * served, (head + 1) * served)),
            )
            for head in range(num_heads)
        ]


class QKClip:
    """Scales query and key weights after each step, by the logits that the model has seen.

    Collective: all-gathers of digests over `groups.tp_dp` and `groups.world`, at construction.

    Args:
        optimizer: whose masters are scaled; it calls `apply` in every step from now on.
        layers: name of each attention layer of this stage -> its rows.
        num_heads: query heads of a layer, over all tensor-parallel ranks.
        threshold: logits are brought down to this.

    Raises:
        ConfigError: on every rank: unknown weights, rows or heads out of range, a threshold that is
            not above 0.
        PlanMismatchError: ranks of a stage declare different rows.
    """

    name = "qk-clip"

    def __init__(
        self,
        optimizer: LayerWiseDistributedOptimizer,
        layers: Mapping[str, Sequence[HeadRows]],
        num_heads: int,
        threshold: float = 100.0,
    ) -> None:
        groups = optimizer.groups
        self.threshold = threshold
        self._optimizer = optimizer
        self._num_heads = num_heads
        self._place = {layer: index for index, layer in enumerate(layers)}
        self._rows = [(layer, rows) for layer, found in layers.items() for rows in found]
        infos = {route.info.name: route.info for route in optimizer.runtime.routing.routes}
        attempt(lambda: self._check(infos), groups.world)
        facts: list[tuple[str, object]] = [("threshold", threshold), ("heads", num_heads)]
        facts += [(f"{layer}: {rows.param}", repr(rows)) for layer, rows in self._rows]
        agree_on_plan("rows of QK-clip", facts, groups.tp_dp, groups.world)
        device = optimizer.runtime.device
        self._maxima = torch.full((len(layers), num_heads), -math.inf, device=device)
        self._runtime: Runtime | None = None
        self._runs: list[tuple[int, HeadRows, torch.Tensor]] = []
        optimizer.weight_rules.append(self)

    @torch.no_grad()
    def observe(self, layer: str, maxima: torch.Tensor, first_head: int = 0) -> None:
        """Note the largest logits of some heads; the largest of all notes since a step counts.

        Args:
            layer: one of `layers`.
            maxima: [heads] largest logit before softmax, of heads that lie side by side.
            first_head: the first of them.

        Raises:
            ConfigError: unknown layer, or heads that it does not have.
        """
        last = first_head + maxima.numel()
        if layer not in self._place or first_head < 0 or last > self._num_heads:
            raise ConfigError(
                f"observe({layer!r}) of heads {first_head} to {last - 1}: the layers are "
                f"{', '.join(self._place)}, each with {self._num_heads} heads"
            )
        seen = self._maxima[self._place[layer], first_head:last]
        torch.maximum(seen, maxima.detach().reshape(-1).to(seen.dtype), out=seen)

    @torch.no_grad()
    def apply(self, kept: Kept) -> None:
        """Agree on the maxima, scale this rank's masters, and forget the maxima.

        Collective: all-reduce of [layers, heads] fp32 over `groups.tp_dp`, on every rank.

        Args:
            kept: takes a failure.
        """
        all_reduce(self._maxima, self._optimizer.groups.tp_dp, "max", label=self.name)
        with kept.keeping(self.name):
            factors = self._factors()
            for place, rows, run in self._runs_now():
                factor = min(factors[place][head] for head in rows.heads) ** rows.power
                if factor < 1.0:
                    run.mul_(factor)
            self._maxima.fill_(-math.inf)

    def _factors(self) -> list[list[float]]:
        """For each layer and head what its logits are to be multiplied with."""
        found: list[list[float]] = []
        for layer, maxima in zip(self._place, self._maxima.tolist(), strict=True):
            if any(math.isnan(value) or value == math.inf for value in maxima):
                raise StateError(f"logits of {layer!r} are not finite: the largest are {maxima}")
            found.append([min(1.0, self.threshold / v) if v > 0 else 1.0 for v in maxima])
        return found

    def _runs_now(self) -> list[tuple[int, HeadRows, torch.Tensor]]:
        """Views of the masters, made anew where the plan was."""
        runtime = self._optimizer.runtime
        if self._runtime is not runtime:
            self._runtime = runtime
            self._runs = list(self._find_runs(runtime))
        return self._runs

    def _find_runs(self, runtime: Runtime) -> Iterator[tuple[int, HeadRows, torch.Tensor]]:
        infos = {route.info.name: route.info for route in runtime.routing.routes}
        wanted: dict[str, list[tuple[int, HeadRows]]] = {}
        for layer, rows in self._rows:
            wanted.setdefault(rows.param, []).append((self._place[layer], rows))
        for held in held_buckets(runtime):
            for name, slot in held.bucket.row_slots():
                for place, rows in wanted.get(name, ()):
                    for start, stop in _local_runs(infos[name], rows):
                        first = max(start, slot.param_start)
                        last = min(stop, slot.param_start + slot.numel)
                        if first < last:
                            shift = slot.row_start - slot.param_start
                            yield place, rows, held.master.row[first + shift : last + shift]

    def _check(self, infos: Mapping[str, ParamInfo]) -> None:
        if not self.threshold > 0:
            raise ConfigError(f"threshold = {self.threshold}: give a logit above 0")
        for layer, rows in self._rows:
            if rows.param not in infos:
                raise ConfigError(
                    f"QK-clip of {layer!r} names {rows.param!r}, which is no trainable parameter "
                    "of this stage; give global names"
                )
            height = infos[rows.param].global_shape[0]
            heads = all(0 <= head < self._num_heads for head in rows.heads)
            if not (0 <= rows.start < rows.stop <= height and heads and rows.heads):
                raise ConfigError(
                    f"QK-clip of {layer!r}: {rows} does not fit {height} rows and "
                    f"{self._num_heads} heads"
                )


def _local_runs(info: ParamInfo, rows: HeadRows) -> Iterator[tuple[int, int]]:
    """Where the rows lie among the flattened elements that this rank has of the parameter."""
    width = math.prod(info.local_shape[1:])
    for pair in info.boxes:
        first = max(rows.start, pair.world.start[0])
        last = min(rows.stop, pair.world.start[0] + pair.world.shape[0])
        if first < last:
            shift = pair.local.start[0] - pair.world.start[0]
            yield (first + shift) * width, (last + shift) * width
