"""Scratch memory of a Newton-Schulz call: how much it needs, and how it is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.workspace import BATCH_BELOW

MAX_PADDING = 0.2
"""Share of a padded batch that may be zeros."""
_ALIGNMENT = 64  # elements: every part starts on a cache line if the workspace does


def workspace_numel(batch: int, rows: int, columns: int) -> int:
    """Return how many elements of scratch memory `batch` matrices of rows x columns need.

    Two places for X and two for matrices of the size of X X^T, in the compute dtype.
    """
    short = min(rows, columns)
    return 2 * _aligned(batch * rows * columns) + 2 * _aligned(batch * short * short)


def max_batch(rows: int, columns: int, budget_numel: int) -> int:
    """Return the largest batch of rows x columns matrices whose workspace fits the budget.

    Args:
        rows: of each matrix, at least 1.
        columns: of each matrix, at least 1.
        budget_numel: elements of the compute dtype that the workspace may have.

    Raises:
        ConfigError: not even one matrix fits.
    """
    short = min(rows, columns)
    batch = budget_numel // (2 * rows * columns + 2 * short * short)
    while batch > 0 and workspace_numel(batch, rows, columns) > budget_numel:
        batch -= 1
    if batch == 0:
        raise ConfigError(
            f"budget_numel = {budget_numel} elements cannot hold one {rows} x {columns} matrix; "
            f"give at least {workspace_numel(1, rows, columns)}"
        )
    return batch


def group_into_batches(shapes: Sequence[tuple[int, int]], pad: bool) -> list[list[int]]:
    """Say which matrices are orthogonalised together.

    Args:
        shapes: (rows, columns) of each matrix.
        pad: whether small matrices (short side below `BATCH_BELOW`) of one short side and any long
            sides go into one batch, as long as zeros fill at most `MAX_PADDING` of it.

    Returns:
        Indices of each batch; of equal shapes in the given order, else the longest first.
    """
    batches: list[list[int]] = []
    kinds: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        padded = pad and min(shape) < BATCH_BELOW
        kinds.setdefault((min(shape),) if padded else shape, []).append(index)
    for kind, members in kinds.items():
        if len(kind) == 2:
            batches.append(members)
            continue
        longest_first = sorted(members, key=lambda i: -max(shapes[i]))
        filled = 0
        for index in longest_first:
            long = max(shapes[index])
            if filled:
                batch = batches[-1]
                room = max(shapes[batch[0]]) * (len(batch) + 1)
                if filled + long >= (1 - MAX_PADDING) * room:
                    batch.append(index)
                    filled += long
                    continue
            batches.append([index])
            filled = long
    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """The parts of a workspace for one matrix [short, long], or for a batch [batch, short, long].

    Attributes:
        wide: the two places of X, each [..., short, long]; a step reads one and writes the other.
        gram: takes X X^T, [..., short, short].
        update: takes b A + c A^2 for the Gram matrix A, [..., short, short].
    """

    wide: tuple[Tensor, Tensor]
    gram: Tensor
    update: Tensor

    def start(self, like: Tensor) -> Tensor:
        """Return the first place of X, seen in the orientation and memory order of `like`.

        Args:
            like: [..., rows, columns].
        """
        rows, columns = like.shape[-2:]
        lead = self.gram.shape[:-2]
        if like.stride(-2) < like.stride(-1):
            return self.wide[0].view(*lead, columns, rows).mT
        return self.wide[0].view(*lead, rows, columns)


def carve(
    workspace: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Scratch:
    """Divide a workspace for a call on a tensor of `shape`; allocate one if none is given.

    Args:
        workspace: 1-D, contiguous, of `workspace_numel` elements or more.
        shape: (rows, columns) or (batch, rows, columns).
        dtype: the compute dtype.
        device: where the products run.

    Raises:
        ConfigError: a workspace that is too small or of another kind.
    """
    *lead, rows, columns = shape
    batch = lead[0] if lead else 1
    needed = workspace_numel(batch, rows, columns)
    if workspace is None:
        workspace = torch.empty(needed, dtype=dtype, device=device)
    if workspace.dtype != dtype or workspace.device != device or workspace.ndim != 1:
        raise ConfigError(
            f"workspace is {workspace.ndim}-D, {workspace.dtype}, on {workspace.device}; "
            f"give a 1-D tensor of {dtype} on {device}"
        )
    if workspace.numel() < needed or not workspace.is_contiguous():
        raise ConfigError(
            f"workspace has {workspace.numel()} elements, stride {workspace.stride(0)}; "
            f"{batch} x {rows} x {columns} needs {needed} contiguous ones"
        )
    short, long = sorted((rows, columns))
    x_numel, gram_numel = batch * rows * columns, batch * short * short
    x_room, gram_room = _aligned(x_numel), _aligned(gram_numel)
    xs, grams = workspace[: 2 * x_room], workspace[2 * x_room :]
    return Scratch(
        wide=(
            xs[:x_numel].view(*lead, short, long),
            xs[x_room : x_room + x_numel].view(*lead, short, long),
        ),
        gram=grams[:gram_numel].view(*lead, short, short),
        update=grams[gram_room : gram_room + gram_numel].view(*lead, short, short),
    )


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
