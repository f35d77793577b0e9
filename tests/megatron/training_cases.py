"""Runs of Megatron's loop that the tests compare; imported on ranks only."""

from __future__ import annotations

from tests.megatron.runs import Run
from tests.megatron.training import BASE, train

SPREAD_OPTIMIZER = ("--use-distributed-optimizer", "--overlap-param-gather")


def side_by_side(flags: list[str], fp32: bool = False) -> tuple[Run, Run]:
    """Megatron's own optimizer, then ours: same flags, seed and data.

    Megatron's layer-wise optimizer knows BF16 only; for FP32 its own Muon runs without it.
    """
    base = [flag for flag in BASE if flag not in SPREAD_OPTIMIZER] if fp32 else BASE
    kept = [flag for flag in flags if flag not in SPREAD_OPTIMIZER] if fp32 else flags
    theirs = train(kept, base=base, ours=False)
    ours = train(flags)
    return theirs, ours


def with_spread(flags: list[str]) -> tuple[Run, Run, Run]:
    """Megatron's own, the same under another micro-batching, and ours."""
    theirs = train(flags, ours=False)
    other = train([*flags, "--micro-batch-size", "1"], ours=False)
    return theirs, other, train(flags)
