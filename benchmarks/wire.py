"""Calls and bytes of collectives, counted at the functions of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Wire:
    """Counts what goes through the functions of torch.distributed while it is on.

    Attributes:
        calls: collectives.
        nbytes: bytes that this rank has sent.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.nbytes = 0.0
        self.is_on = False
        for name, sent in _SENT.items():
            if name in vars(dist):
                setattr(dist, name, self._counted(vars(dist)[name], sent))

    def over(self, action: Callable[[], Any]) -> tuple[int, float]:
        """Calls and bytes of an action."""
        self.calls, self.nbytes, self.is_on = 0, 0.0, True
        action()
        self.is_on = False
        return self.calls, self.nbytes

    def _counted(self, call: Callable[..., Any], sent: Callable[..., float]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                self.calls += 1
                group = kwargs.get("group") or next(
                    (arg for arg in args if isinstance(arg, dist.ProcessGroup)), dist.group.WORLD
                )
                place = (dist.get_world_size(group), dist.get_rank(group))
                self.nbytes += sent(place, *args)
            return call(*args, **kwargs)

        return counted


Place = tuple[int, int]


def _gather(place: Place, output: Any, row: torch.Tensor, *_: Any) -> float:
    return float((place[0] - 1) * row.nbytes)


def _scatter(place: Place, output: torch.Tensor, given: torch.Tensor, *_: Any) -> float:
    return (place[0] - 1) * given.nbytes / place[0]


def _reduce(place: Place, tensor: torch.Tensor, *_: Any) -> float:
    return 2 * (place[0] - 1) * tensor.nbytes / place[0]


def _exchange(
    place: Place, out: Any, given: torch.Tensor, came: Any, went: Sequence[int], *_: Any
) -> float:
    return float((sum(went) - went[place[1]]) * given.element_size())


_SENT: dict[str, Callable[..., float]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "all_gather_into_tensor": _gather,
    "_all_gather_base": _gather,
    "all_gather_single": _gather,
    "reduce_scatter_tensor": _scatter,
    "_reduce_scatter_base": _scatter,
    "reduce_scatter_single": _scatter,
    "all_to_all_single": _exchange,
    "broadcast": lambda place, tensor, *_: float(tensor.nbytes),
    "all_gather_object": lambda *_: 0.0,
}
