"""The layout of a bucket: offsets, slots, declared padding, and what it refuses. All exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.layout import BucketLayout, Slot
from megatron_lw.optimizer.plan import PlanParam, plan_domain


def layout_of(*numels: int, dp: int, alignment: int = 64) -> BucketLayout:
    params = [PlanParam(name=f"p{9 - i}", numel=n, child="adam") for i, n in enumerate(numels)]
    plan = plan_domain(params, dp=dp, alignment=alignment)
    return BucketLayout.build(plan, 0)


def test_slots_and_padding_of_a_small_bucket() -> None:
    layout = layout_of(5, 70, 3, dp=2)
    assert layout.row_lengths == (128, 128)
    assert layout.row_starts == (0, 128)
    assert layout.numel == 256
    assert layout.params == (2, 1, 0)
    assert layout.numels == (5, 70, 3)
    assert layout.offsets == (0, 64, 192)
    assert layout.slots == (
        (
            Slot(param=2, row=0, row_start=0, param_start=0, numel=5),
            Slot(param=1, row=0, row_start=64, param_start=0, numel=64),
        ),
        (
            Slot(param=1, row=1, row_start=0, param_start=64, numel=6),
            Slot(param=0, row=1, row_start=64, param_start=0, numel=3),
        ),
    )
    assert layout.padding == ((5, 64), (134, 192), (195, 256))


def test_padding_of_a_row_is_relative_to_it() -> None:
    layout = layout_of(5, dp=3)
    assert layout.padding == ((5, 192),)
    assert layout.padding_in_row(0) == ((5, 64),)
    assert layout.padding_in_row(1) == layout.padding_in_row(2) == ((0, 64),)


def test_a_row_of_padding_only_and_a_parameter_over_many_rows() -> None:
    layout = layout_of(130, dp=5, alignment=32)
    assert layout.row_lengths == (32,) * 5
    assert [[slot.param_start for slot in row] for row in layout.slots] == [
        [0], [32], [64], [96], [128]
    ]  # fmt: skip
    assert layout.padding == ((130, 160),)


def test_an_empty_parameter_has_no_slot() -> None:
    layout = layout_of(0, 3, dp=1)
    assert layout.numels == (0, 3)
    assert [slot.numel for slot in layout.slots[0]] == [3]


def test_no_padding_where_everything_fits() -> None:
    layout = layout_of(64, 64, dp=2)
    assert layout.padding == ()
    assert layout.padding_in_row(1) == ()


@pytest.mark.parametrize("index", [-1, 1])
def test_unknown_bucket_is_refused(index: int) -> None:
    plan = plan_domain([PlanParam(name="a", numel=1, child="adam")], dp=1)
    with pytest.raises(ConfigError, match=f"bucket_index={index}"):
        BucketLayout.build(plan, index)


def _with_slot(layout: BucketLayout, **changes: int) -> tuple[tuple[Slot, ...], ...]:
    """The slots with the first one of row 1 changed."""
    first, *rest = layout.slots[1]
    return (layout.slots[0], (dataclasses.replace(first, **changes), *rest))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("do not meet", {"padding": ((5, 64), (134, 192))}),
        ("do not meet", {"padding": ((5, 65), (134, 192), (195, 256))}),
        ("do not meet", {"row_lengths": (128, 192)}),
        ("not where its parameter lies", {"offsets": (0, 64, 190)}),
        ("has 70 of 71", {"numels": (5, 71, 3)}),
    ],
)
def test_a_layout_that_does_not_tile_is_refused(message: str, changes: dict[str, Any]) -> None:
    layout = layout_of(5, 70, 3, dp=2)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(layout, **changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("do not meet", {"numel": 5}),
        ("do not meet", {"row_start": 1}),
        ("not where its parameter lies", {"param_start": 0}),
        ("not where its parameter lies", {"param": 7}),
        ("does not fit row", {"row": 0}),
    ],
)
def test_a_slot_in_the_wrong_place_is_refused(message: str, changes: dict[str, int]) -> None:
    layout = layout_of(5, 70, 3, dp=2)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(layout, slots=_with_slot(layout, **changes))
