"""Order, closing and packing of buckets: pure functions of integers, all exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer import packing
from megatron_lw.optimizer.names import natural_key


def test_natural_order_counts_digits_as_numbers() -> None:
    names = ["layers.10.w", "layers.2.w", "embedding", "layers.2.b", "a01", "a1", "a", "7", ""]
    ordered = sorted(names, key=natural_key)
    assert ordered == [
        "",
        "7",
        "a",
        "a01",
        "a1",
        "embedding",
        "layers.2.b",
        "layers.2.w",
        "layers.10.w",
    ]


def test_names_that_differ_only_in_leading_zeros_have_one_order() -> None:
    for order in itertools.permutations(["x1", "x01", "x001"]):
        assert sorted(order, key=natural_key) == ["x001", "x01", "x1"]


@pytest.mark.parametrize(("value", "multiple"), [(-1, 4), (3, 0)])
def test_rounding_refuses_what_has_no_answer(value: int, multiple: int) -> None:
    with pytest.raises(ConfigError, match=f"{value} up to a multiple of {multiple}"):
        packing.round_up(value, multiple)


def test_line_starts_are_aligned() -> None:
    line = packing.lay_line([5, 64, 0, 65], 64)
    assert line == packing.Line((0, 64, 128, 128), 256)


@pytest.mark.parametrize(
    ("end", "rows", "length"), [(0, 3, 64), (1, 3, 64), (192, 3, 64), (193, 3, 128), (640, 1, 640)]
)
def test_rows_are_equal_aligned_and_never_empty(end: int, rows: int, length: int) -> None:
    assert packing.even_row_length(end, rows, 64) == length


def test_default_rule_aims_at_two_largest_matrices_a_row() -> None:
    rule = packing.matrix_closing_rule(100 * 10**9, 50 * 10**6, dp=64, bucket_size=None)
    assert rule.minimum == 2 * 64 * 50 * 10**6
    assert rule.minimum <= rule.target <= rule.maximum


def test_default_rule_leaves_six_buckets() -> None:
    rule = packing.matrix_closing_rule(7 * 10**9, 117 * 10**6, dp=512, bucket_size=None)
    assert rule.target == 7 * 10**9 // 6


def test_default_rule_has_a_floor() -> None:
    assert (
        packing.matrix_closing_rule(90 * 10**6, 10**6, dp=8, bucket_size=None).target == 45 * 10**6
    )
    assert packing.default_floor(8) == 40_000_000
    assert packing.default_floor(512) == 512_000_000


def test_bucket_size_is_a_soft_minimum_without_a_short_remainder() -> None:
    sizes = [10] * 29
    rule = packing.matrix_closing_rule(290, 10, dp=3, bucket_size=80)
    ends = packing.close_matrix_buckets(sizes, rows=3, rule=rule)
    buckets = np.diff([0, *ends]) * 10
    assert ends[-1] == 29
    assert len(buckets) == 3
    assert min(buckets) >= 80


def test_closing_prefers_whole_rows() -> None:
    """Six of eight equal matrices leave two over for four rows; eight leave none."""
    rule = packing.ClosingRule(target=6, minimum=5, maximum=9)
    assert packing.close_matrix_buckets([1] * 16, rows=4, rule=rule) == [8, 16]


def test_one_matrix_larger_than_everything_closes_its_bucket() -> None:
    rule = packing.ClosingRule(target=10, minimum=10, maximum=20)
    assert packing.close_matrix_buckets([100, 10, 10], rows=2, rule=rule) == [1, 3]
    assert packing.close_matrix_buckets([], rows=2, rule=rule) == []


def test_elementwise_closing_isolates_what_is_large_and_collects_what_is_small() -> None:
    sizes = [500, 1, 2, 400, 3]
    assert packing.close_elementwise_buckets(sizes, 100) == [[0], [3], [1, 2, 4]]
    assert packing.close_elementwise_buckets([30] * 9, 90) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert packing.close_elementwise_buckets([], 100) == []


def _cuts(sizes: list[int], order: list[int], row_length: int) -> list[int]:
    """Sizes of the matrices that a row end cuts."""
    ends = np.cumsum([0, *(sizes[i] for i in order)])
    return [
        sizes[index]
        for index, low, high in zip(order, ends[:-1], ends[1:], strict=True)
        if low // row_length != (high - 1) // row_length
    ]


def test_packing_cuts_nothing_where_rows_fill() -> None:
    sizes = [640, 128] * 4
    order = packing.pack_rows(sizes, sizes, row_length=768, row_loads=np.zeros(4))
    assert sorted(order) == list(range(8))
    assert _cuts(sizes, order, 768) == []


def test_packing_cuts_the_smallest_that_serves() -> None:
    sizes = [1024] * 4 + [
        128
    ] * 3  # over 2 rows of 2240: two large each, and half a small one too much
    order = packing.pack_rows(sizes, sizes, row_length=2240, row_loads=np.zeros(2))
    assert _cuts(sizes, order, 2240) == [128]


def test_packing_makes_room_for_what_hangs_over() -> None:
    sizes = [1024] * 7 + [64] * 5  # over 3 rows of 2496: the seventh large one fits no row
    order = packing.pack_rows(sizes, sizes, row_length=2496, row_loads=np.zeros(3))
    assert sorted(order) == list(range(12))
    assert len(_cuts(sizes, order, 2496)) == 2


def test_packing_sends_the_costly_to_the_lighter_row() -> None:
    loads = np.array([100.0, 0.0])
    order = packing.pack_rows([64, 64], [5.0, 1.0], row_length=64, row_loads=loads)
    assert order == [1, 0]
    assert loads.tolist() == [100.0, 0.0]


def test_matrices_longer_than_a_row_run_over_several() -> None:
    sizes = [64 * 10, 64, 64]
    order = packing.pack_rows(sizes, sizes, row_length=64 * 3, row_loads=np.zeros(4))
    assert sorted(order) == [0, 1, 2]
    assert 64 * 10 in _cuts(sizes, order, 64 * 3)
