"""Do boxes tile a tensor: every element in exactly one of them?

A box is the sum of orthants at its corners, with signs: in two dimensions, plus at the upper left,
minus at the upper right and the lower left, plus at the lower right. Corners determine a sum of
boxes, so boxes tile a tensor if and only if their corners, with signs, are those of the tensor.
That is exact, takes n log n time in any number of dimensions, and the least corner that differs is
an element that lies in no box or in too many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_lw.optimizer.boxes import Box

Ints = NDArray[np.int64]


def tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should tile a tensor; None if nothing is.

    Only a tensor without elements may have empty boxes, any number of them.

    Args:
        shape: of the tensor; any number of dimensions, none too.
        boxes: in any order.
    """
    if len(boxes) == 1 and boxes[0] == Box((0,) * len(shape), shape) and 0 not in shape:
        return None
    for box in boxes:
        problem = _box_problem(shape, box)
        if problem is not None:
            return problem
    if 0 in shape:
        return None
    starts, extents = _arrays(boxes, len(shape))
    whole = np.array([shape], dtype=np.int64).reshape(1, len(shape))
    corners, signs = _corners(np.concatenate([np.zeros_like(whole), starts]), whole, extents)
    signs[: 1 << len(shape)] *= -1  # the tensor itself, taken away
    differing = _least_difference(corners, signs)
    if differing is None:
        return None
    index, surplus = differing
    if surplus < 0:
        return f"element {index} is in no piece"
    return f"element {index} is in {surplus + 1} pieces"


def _box_problem(shape: tuple[int, ...], box: Box) -> str | None:
    if len(box.start) != len(shape) or len(box.shape) != len(shape):
        return f"{box} has another number of dimensions than shape {shape}"
    for first, extent, size in zip(box.start, box.shape, shape, strict=True):
        if first < 0 or extent < 0 or first + extent > size:
            return f"{box} reaches outside shape {shape}"
    if 0 in box.shape and 0 not in shape:
        return f"{box} is empty; leave it out"
    return None


def _arrays(boxes: Sequence[Box], ndim: int) -> tuple[Ints, Ints]:
    starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    extents = np.array([box.shape for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    return starts, extents


def _corners(starts: Ints, whole: Ints, extents: Ints) -> tuple[Ints, Ints]:
    """All corners and their signs: first those of the tensor, then those of the boxes."""
    points = starts[:, None, :]
    shapes = np.concatenate([whole, extents])[:, None, :]
    signs = np.ones(1, dtype=np.int64)
    for dim in range(starts.shape[1]):
        far = points.copy()
        far[..., dim] += shapes[..., dim]
        points = np.concatenate([points, far], axis=1)
        signs = np.concatenate([signs, -signs])
    return points.reshape(len(starts) * len(signs), starts.shape[1]), np.tile(signs, len(starts))


def _least_difference(corners: Ints, signs: Ints) -> tuple[tuple[int, ...], int] | None:
    """The first corner, in row-major order, at which the signs do not sum to zero."""
    order = np.lexsort(corners.T[::-1]) if corners.shape[1] else np.arange(len(corners))
    corners, signs = corners[order], signs[order]
    new = np.ones(len(corners), dtype=bool)
    new[1:] = (corners[1:] != corners[:-1]).any(axis=1)
    firsts = np.flatnonzero(new)
    sums = np.add.reduceat(signs, firsts)
    wrong = np.flatnonzero(sums)
    if not len(wrong):
        return None
    index = corners[firsts[wrong[0]]]
    return tuple(index.tolist()), int(sums[wrong[0]])
