"""Our own checkpoints of Megatron's models; imported on ranks only."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from megatron_lw import dist_checkpointing
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from tests.megatron.runs import Run, differ
from tests.megatron.training import train


def other_layouts(
    directory: str, flags: list[str], before: list[str], after: list[str]
) -> tuple[Run, Run, list[str], int]:
    """Saved after three steps in one layout, loaded in place of the third in another.

    Returns:
        Both runs, what differs of what the second saves at once, and how many tensors there are.
    """
    steps, others = itertools.count(1), itertools.count(1)

    def save(model: Any, optimizer: Any, step: Any) -> Any:
        result = step()
        if next(steps) == 3:
            dist_checkpointing.save(directory, model, optimizer, step=3)
        return result

    def load(model: Any, optimizer: Any, step: Any) -> Any:
        number = next(others)
        if number > 3:
            return step()
        if number == 3:
            dist_checkpointing.load(directory, model, optimizer)
            dist_checkpointing.save(f"{directory}-again", model, optimizer, step=3)
        return True, 0.0, 0

    whole = train([*flags, *before], around=save)
    rest = train([*flags, *after], around=load, prepare=_other_weights)
    one, two = _read(directory), _read(f"{directory}-again")
    return whole, rest, differ(one, two), len(one)


def _other_weights(chunk: Any) -> None:
    for param in chunk.parameters():
        param.data.fill_(0.01)


def _read(directory: str) -> dict[str, torch.Tensor]:
    """All tensors; a weight that is tied over stages by its name on the first."""
    reader = CheckpointReader(directory)
    names = {param.name: min(param.names) for param in reader.manifest.params}
    return {
        f"{names.get(record.name, record.name)}/{record.state}": reader.tensor(record)
        for record in reader.manifest.tensors
    }
