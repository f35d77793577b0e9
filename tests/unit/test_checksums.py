"""Checksums read bits: what differs in one bit, in sign or in place differs; nothing else does."""

from __future__ import annotations

import pytest
import torch

from megatron_lw.distributed import checksums
from megatron_lw.distributed.checksums import by_rank, checksum, first_difference
from megatron_lw.distributed.group import Group
from tests.harness import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64]


def value(tensor: torch.Tensor) -> int:
    return int(checksum(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 3, 8, 1001])
def test_any_single_bit_counts(dtype: torch.dtype, numel: int) -> None:
    whole = torch.arange(numel).to(dtype)
    found = {value(whole)}
    raw = whole.view(torch.uint8)
    for place in (0, raw.numel() // 2, raw.numel() - 1):
        for bit in range(8):
            raw[place] ^= 1 << bit
            found.add(value(whole))
            raw[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len({0, raw.numel() // 2, raw.numel() - 1})


@pytest.mark.parametrize("power", range(4, 21, 4))
def test_flips_of_all_signs_do_not_cancel(power: int) -> None:
    """A weighted sum of the bits loses them: 2**31 times an even number of odd weights."""
    x = torch.randn(1 << power)
    zeros = torch.zeros(1 << power)
    assert value(x) != value(-x)
    assert value(zeros) != value(-zeros)


def test_places_count() -> None:
    x = torch.randn(4096)
    assert value(x) != value(x.flip(0))
    assert value(x) != value(x.roll(2))
    swapped = x.clone()
    swapped[[0, 2]] = swapped[[2, 0]]
    assert value(x) != value(swapped)
    assert value(torch.zeros(64)) != value(torch.zeros(66))


def test_equal_bits_are_equal_wherever_they_lie() -> None:
    x = torch.randn(40, 25)
    nan = torch.full((5,), float("nan"))
    assert value(x) == value(x.clone()) == value(x.view(-1)) == value(x.T.contiguous().T)
    assert value(nan) == value(nan.clone())
    shifted = torch.cat([torch.zeros(1), x.view(-1)])[1:]
    assert shifted.storage_offset() % 2 == 1 and value(shifted) == value(x)


def test_runs_of_any_length_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(10_001)
    before = value(x)
    monkeypatch.setattr(checksums, "_CPU_RUN", 17)
    assert value(x) == before


def test_parts_sum_to_the_whole() -> None:
    x = torch.randn(1000)
    parts = checksum(x[:600]) + checksum(x[600:], place=300)
    assert int(parts) == value(x)


def test_ranks_are_listed_by_value() -> None:
    assert by_rank([1.5, 2, 1.5], [0, 4, 7]) == "1.5 on ranks 0, 7; 2 on rank 4"
    assert by_rank(["x"] * 10, range(10)) == "x on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def look(numel: int, dtype: torch.dtype, places: list[int]) -> list[tuple[int, tuple[str, ...]]]:
    group = Group("dp", (0, 1, 2), torch.distributed.get_rank(), torch.distributed.group.WORLD)
    found = []
    for place in places:
        x = torch.zeros(numel, dtype=dtype)
        if group.rank == 1:
            x[place:] = 1
        difference = first_difference(x, group)
        found.append(None if difference is None else (difference.index, difference.values))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", [1, 255, 300_003])
def test_the_first_difference_is_found(dtype: torch.dtype, numel: int) -> None:
    """Also where one round of parts is not enough, and in the last, incomplete word."""
    places = sorted({0, numel // 3, numel - 1, numel})
    zero, one = repr(torch.zeros((), dtype=dtype).item()), repr(torch.ones((), dtype=dtype).item())
    expected = [(p, (zero, one, zero)) if p < numel else None for p in places]
    for found in run_ranks(look, 3, numel, dtype, places):
        assert found == expected


def test_strides_change_nothing() -> None:
    """One element with any stride counts as contiguous; a column is not."""
    assert checksum(torch.arange(4.0)[2::2]) == checksum(torch.tensor([2.0]))
    column = torch.arange(6.0).view(3, 2)[:, 1]
    assert checksum(column) == checksum(column.clone())
