"""Tilings are told from everything else, against a count of every element."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lw.dist_checkpointing.tiling import tiling_problem
from megatron_lw.optimizer.boxes import Box


def divided(shape: tuple[int, ...], pieces: int, chance: random.Random) -> list[Box]:
    """A random tiling: cut one box in two, again and again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(pieces - 1):
        box = boxes.pop(chance.randrange(len(boxes)))
        dims = [d for d, extent in enumerate(box.shape) if extent > 1]
        if not dims:
            boxes.append(box)
            continue
        d = chance.choice(dims)
        cut = chance.randrange(1, box.shape[d])
        low, high = list(box.shape), list(box.shape)
        low[d], high[d] = cut, box.shape[d] - cut
        start = list(box.start)
        start[d] += cut
        boxes += [Box(box.start, tuple(low)), Box(tuple(start), tuple(high))]
    chance.shuffle(boxes)
    return boxes


def count(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    times = np.zeros(shape, dtype=int)
    for box in boxes:
        slices = zip(box.start, box.shape, strict=True)
        times[tuple(slice(first, first + extent) for first, extent in slices)] += 1
    return times


def expected(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    times = count(shape, boxes)
    wrong = np.argwhere(times != 1)
    if not len(wrong):
        return None
    index = tuple(int(i) for i in wrong[0])
    found = int(times[index])
    return f"element {index} is in {'no piece' if found == 0 else f'{found} pieces'}"


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.integers(1, 12), st.randoms())
def test_random_tilings_pass(shape: tuple[int, ...], pieces: int, chance: random.Random) -> None:
    boxes = divided(shape, pieces, chance)
    assert count(shape, boxes).min() == count(shape, boxes).max() == 1
    assert tiling_problem(shape, boxes) is None


@given(shapes, st.integers(1, 12), st.randoms(), st.data())
def test_the_first_wrong_element_is_named(
    shape: tuple[int, ...], pieces: int, chance: random.Random, data: st.DataObject
) -> None:
    """Pieces lost, doubled, moved and resized, so that volumes may well add up."""
    boxes = divided(shape, pieces, chance)
    for _ in range(data.draw(st.integers(1, 3))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1))) if boxes else None
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        extent = tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
        boxes += data.draw(st.sampled_from([[], [box] * 2, [Box(start, extent)]])) if box else []
    assert tiling_problem(shape, boxes) == expected(shape, boxes)


def test_volumes_that_add_up_are_not_enough() -> None:
    halves = [Box((0, 0), (2, 2)), Box((0, 1), (2, 2))]
    assert tiling_problem((2, 4), halves) == "element (0, 1) is in 2 pieces"
    assert tiling_problem((2, 4), halves[:1]) == "element (0, 2) is in no piece"


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((), [Box((), ())], None),
        ((), [], "element () is in no piece"),
        ((), [Box((), ())] * 2, "element () is in 2 pieces"),
        ((0,), [], None),
        ((3, 0), [], None),
        ((0,), [Box((0,), (0,))], None),
        ((0,), [Box((0,), (1,))], "reaches outside"),
        ((0,), [Box((1,), (0,))], "reaches outside"),
        ((4,), [Box((5,), (-1,))], "reaches outside"),
        ((3, 0), [Box((0, 0), (2, 0)), Box((2, 0), (1, 0))], None),
        ((4,), [Box((0,), (4,)), Box((4,), (0,))], "is empty"),
        ((4,), [Box((0,), (5,))], "reaches outside"),
        ((4,), [Box((-1,), (5,))], "reaches outside"),
        ((4,), [Box((0, 0), (4, 1))], "another number of dimensions"),
        ((4,), [Box((0,), (4, 1))], "another number of dimensions"),
        ((4, 4), [], "element (0, 0) is in no piece"),
        ((1 << 40, 1 << 20), [Box((0, 0), (1 << 40, 1 << 20))], None),
        (
            (1 << 40, 1 << 20),
            [Box((0, 0), (1 << 40, 1 << 20)), Box((5, 7), (1, 1))],
            "element (5, 7) is in 2 pieces",
        ),
    ],
)
def test_edges(shape: tuple[int, ...], boxes: list[Box], problem: str | None) -> None:
    found = tiling_problem(shape, boxes)
    assert found == problem if problem is None or found is None else problem in found


def test_a_hundred_thousand_pieces() -> None:
    shape = (1 << 40, 1 << 30, 64)
    boxes = divided(shape, 100_000, random.Random(0))
    assert len(boxes) > 99_000 and sum(math.prod(box.shape) for box in boxes) == 1 << 76
    assert tiling_problem(shape, boxes) is None
    lost = boxes.pop()
    assert tiling_problem(shape, boxes) == f"element {lost.start} is in no piece"
