"""Runs of Megatron's loop that the tests compare; imported on ranks only."""

from __future__ import annotations

from tests.megatron.runs import Run
from tests.megatron.training import BASE, run_script, train

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
    """Megatron's own, ten steps of the same under another micro-batching, and ours."""
    theirs = train(flags, ours=False)
    other = train([*flags, "--micro-batch-size", "1", "--train-iters", "10"], ours=False)
    return theirs, other, train(flags)


def layout(
    flags: list[str], fp32: list[str], bf16: list[str], unseen: list[str]
) -> tuple[Run, ...]:
    """All runs of one layout: in FP32 two, in BF16 three, and in BF16 two in which nothing learns.

    Args:
        flags: of the layout.
        fp32: more of them for FP32.
        bf16: more of them for BF16.
        unseen: more of them for the last two.
    """
    still = [*flags, *unseen, "--bf16", "--lr", "0", "--train-iters", "3"]
    return (
        *side_by_side([*flags, *fp32], fp32=True),
        *with_spread([*flags, *bf16, "--bf16"]),
        *side_by_side(still),
    )


def example(path: str, flags: list[str]) -> Run:
    """The example as a user starts it."""
    return run_script(path, flags)
