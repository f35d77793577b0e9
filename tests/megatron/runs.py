"""What a run of Megatron's loop gave; imported by tests and by ranks, without Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lw.errors import ConfigError

MOE = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
"""Four experts, whose router is left alone by losses of its own."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What a run gave on this rank.

    Attributes:
        losses: mean loss of each step; empty but on the last pipeline stage.
        norms: gradient norm of each step; None where a step had none.
        zeros: number of zero gradient elements of each step.
        skipped: steps that updated nothing.
        weights: every plain parameter at the end, by chunk and name, in fp32.
        extra: what the caller's probe returned after each step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    zeros: list[int | None] = field(default_factory=list)
    skipped: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: list[Any] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Part:
    """A box of a parameter.

    Attributes:
        name: of the parameter.
        shape: of the whole parameter.
        start: where the box begins in it.
        values: the box.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    values: torch.Tensor


def assembled(parts: Iterable[Part]) -> dict[str, torch.Tensor]:
    """Whole parameters; copies of a part must be equal, and an element that is missing is NaN."""
    whole: dict[str, torch.Tensor] = {}
    for part in parts:
        found = whole.setdefault(part.name, torch.full(part.shape, torch.nan))
        place = tuple(slice(s, s + n) for s, n in zip(part.start, part.values.shape, strict=True))
        assert bool((found[place].isnan() | (found[place] == part.values)).all()), part.name
        found[place] = part.values
    return whole


def last_stage(results: list[tuple[Run, ...]]) -> tuple[Run, ...]:
    """The runs of a rank of the last pipeline stage, the only ones that have losses."""
    return next(runs for runs in results if runs[0].losses)


def refusal(call: Callable[[], Any]) -> str:
    """What a `ConfigError` says that a call raises; empty where nothing is raised."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def differ(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> list[str]:
    """Keys whose values differ by a bit, or that only one has."""
    return sorted(
        key
        for key in one.keys() | two.keys()
        if key not in one or key not in two or not torch.equal(one[key], two[key])
    )
