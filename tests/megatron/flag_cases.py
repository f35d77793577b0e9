"""Flags of Megatron's command line that change what is built; imported on ranks only."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lw.errors import ConfigError
from tests.megatron.runs import Run
from tests.megatron.stand_ins import MeasuringAttention
from tests.megatron.training import BASE, train

NOT_SPREAD = [flag for flag in BASE if flag != "--use-distributed-optimizer"]


def side_by_side(flags: list[str]) -> tuple[Run, Run]:
    """Megatron's own optimizer in FP32, then ours."""
    return train(flags, base=NOT_SPREAD, ours=False), train(flags)


def refused(flags: list[str]) -> str:
    """What is said of flags before the first step."""

    def probe(model: Any, optimizer: Any) -> None:
        raise AssertionError("a step was taken")

    try:
        train(flags, probe=probe)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def clipped(flags: list[str], threshold: float) -> tuple[Run, Run, dict[str, torch.Tensor]]:
    """With --qk-clip, which wants Transformer Engine: Megatron's own, ours, and weights before."""
    before: dict[str, torch.Tensor] = {}

    def prepare(chunk: Any) -> None:
        chunk.config.qk_clip, chunk.config.qk_clip_threshold = True, threshold
        chunk.config.qk_clip_alpha = 0.25
        before.update({name: p.detach().clone() for name, p in chunk.named_parameters()})

    def amend(args: Any) -> None:
        args.qk_clip = True

    def run(ours: bool) -> Run:
        return train(
            flags, base=NOT_SPREAD, ours=ours, prepare=prepare, amend=amend, core=MeasuringAttention
        )

    return run(False), run(True), before


def unmeasured(flags: list[str]) -> str:
    """What is said of --qk-clip where attention does not measure its logits."""

    def prepare(chunk: Any) -> None:
        chunk.config.qk_clip = True

    try:
        train(flags, prepare=prepare)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"
