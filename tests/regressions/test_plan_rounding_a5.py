"""A5: KellerJordan/Muon#28: a list padded to the wrong length (19 over 8 became 22, not 24).

Rounding up gives the smallest multiple that is enough: zero stays zero, a multiple stays itself.
Exact.
"""

from __future__ import annotations

import pytest

from megatron_lw.optimizer.packing import even_row_length, round_up


@pytest.mark.parametrize("world", range(1, 17))
def test_smallest_multiple_that_is_enough(world: int) -> None:
    for number in range(41):
        expected = next(each for each in range(0, 41 + world, world) if each >= number)
        assert round_up(number, world) == expected


def test_nineteen_over_eight_is_twenty_four() -> None:
    assert round_up(19, 8) == 24
    assert round_up(16, 8) == 16
    assert round_up(0, 8) == 0


@pytest.mark.parametrize("world", range(1, 17))
def test_rows_have_no_extra_round(world: int) -> None:
    for units in range(1, 41):
        rows = even_row_length(64 * units, world, 64) // 64
        assert (rows - 1) * world < units <= rows * world
