"""What a run of Megatron's loop gave; imported by tests and by ranks, without Megatron."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class Run:
    """What a run gave on this rank.

    Attributes:
        losses: mean loss of each step; empty but on the last pipeline stage.
        norms: gradient norm of each step; None where a step had none.
        zeros: number of zero gradient elements of each step.
        skipped: steps that updated nothing.
        weights: every parameter at the end, by chunk and name, in fp32.
        extra: what the caller's probe returned after each step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    zeros: list[int | None] = field(default_factory=list)
    skipped: int = 0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: list[Any] = field(default_factory=list)


def last_stage(results: list[tuple[Run, ...]]) -> tuple[Run, ...]:
    """The runs of a rank of the last pipeline stage, the only ones that have losses."""
    return next(runs for runs in results if runs[0].losses)
