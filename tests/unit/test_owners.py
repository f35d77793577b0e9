"""Bounds, owners and what the exchange moves, against brute force; all exact."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megatron_lw.optimizer.owners import (
    assign_owners,
    loads_of,
    longest_first,
    lower_bound,
    newton_schulz_cost,
)
from megatron_lw.optimizer.pieces import Pieces, count_peers, count_sent, cut_into_pieces


def _best_makespan(costs: list[float], ranks: int) -> float:
    """The optimum by trying every assignment."""
    return min(
        max(
            sum(c for c, rank in zip(costs, owners, strict=True) if rank == each)
            for each in range(ranks)
        )
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )


def _pieces(*matrices: list[tuple[int, int]]) -> Pieces:
    """Pieces from (row, numel) lists, one a matrix."""
    flat = [(m, row, numel) for m, parts in enumerate(matrices) for row, numel in parts]
    starts = [sum(numel for _, numel in parts[:i]) for parts in matrices for i in range(len(parts))]
    columns = np.array(flat, dtype=np.int64).T.copy()
    return Pieces(
        matrix=columns[0], row=columns[1], start=np.array(starts, dtype=np.int64), numel=columns[2]
    )


def test_cost_is_symmetric_and_not_the_number_of_elements() -> None:
    assert newton_schulz_cost(16384, 64) == newton_schulz_cost(64, 16384) == 2**26
    assert newton_schulz_cost(1024, 1024) == 2**30


@pytest.mark.parametrize("seed", range(20))
def test_bound_is_below_the_optimum_and_longest_first_above(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 3)
    costs = [float(rng.randint(1, 9)) for _ in range(rng.randint(1, 6))]
    best = _best_makespan(costs, ranks)
    bound = lower_bound(costs, ranks)
    greedy = float(loads_of(costs, longest_first(costs, ranks), ranks).max())
    assert max(max(costs), sum(costs) / ranks) <= bound <= best <= greedy <= (4 / 3) * best


def test_bound_sees_that_one_rank_gets_two() -> None:
    assert lower_bound([3.0, 3.0, 3.0], 2) == 6.0
    assert lower_bound([5.0, 4.0, 3.0, 1.0, 1.0], 2) == 7.0
    assert lower_bound([], 4) == 0.0


def test_whole_matrices_stay_where_they_lie() -> None:
    pieces = _pieces(*([(row, 64)] for row in (2, 0, 3, 1)))
    owned = assign_owners([7.0] * 4, pieces, np.zeros(4, dtype=np.bool_), dp=4, tp=1)
    assert owned.owner.tolist() == [2, 0, 3, 1]
    assert owned.loads.tolist() == [7.0] * 4


def test_a_cut_matrix_goes_to_the_holder_of_most() -> None:
    pieces = _pieces([(0, 10), (1, 90)], [(1, 30), (2, 70)])
    owned = assign_owners([4.0, 4.0], pieces, np.zeros(2, dtype=np.bool_), dp=3, tp=1)
    assert owned.owner.tolist() == [1, 2]


def test_balance_moves_matrices_away_from_a_row_that_holds_all() -> None:
    pieces = _pieces(*([(0, 64)] for _ in range(8)))
    owned = assign_owners([1.0] * 8, pieces, np.zeros(8, dtype=np.bool_), dp=4, tp=1)
    assert owned.loads.tolist() == [2.0] * 4


def test_tensor_parallel_ranks_of_a_row_share_its_matrices() -> None:
    pieces = _pieces(*([(row, 64)] for row in (0, 0, 1, 1)))
    owned = assign_owners([1.0] * 4, pieces, np.ones(4, dtype=np.bool_), dp=2, tp=2)
    assert sorted(owned.owner.tolist()[:2]) == [0, 1]
    assert sorted(owned.owner.tolist()[2:]) == [2, 3]


def test_no_matrix_is_an_ordinary_case() -> None:
    empty = np.zeros(0, dtype=np.int64)
    pieces = cut_into_pieces(empty, empty, 64)
    owned = assign_owners([], pieces, np.zeros(0, dtype=np.bool_), dp=2, tp=2)
    assert owned.owner.tolist() == []
    assert owned.loads.tolist() == [0.0] * 4
    assert (owned.bound, owned.lpt_makespan) == (0.0, 0.0)


def test_pieces_tile_the_matrices() -> None:
    pieces = cut_into_pieces(np.array([0, 64, 200]), np.array([64, 100, 500]), 128)
    assert pieces.matrix.tolist() == [0, 1, 1, 2, 2, 2, 2, 2]
    assert pieces.row.tolist() == [0, 0, 1, 1, 2, 3, 4, 5]
    assert pieces.start.tolist() == [0, 0, 64, 0, 56, 184, 312, 440]
    assert pieces.numel.tolist() == [64, 64, 36, 56, 128, 128, 128, 60]


def _simulate(
    owner: list[int], pieces: Pieces, sharded: list[bool], dp: int, tp: int
) -> tuple[list[float], list[float], list[float], list[set[int]]]:
    """Move every message by itself: sends between rows, within out, within back, and the peers."""
    between, out, back = ([0.0] * (dp * tp) for _ in range(3))
    peers: list[set[int]] = [set() for _ in range(dp * tp)]
    for matrix, row, numel in zip(
        pieces.matrix.tolist(), pieces.row.tolist(), pieces.numel.tolist(), strict=True
    ):
        target = owner[matrix]
        for t in range(tp):
            holder, relay = row * tp + t, target // tp * tp + t
            crosses = holder != relay
            sends = sharded[matrix] or relay == target
            between[holder] += numel if crosses and sends else 0
            between[relay] += numel if crosses else 0
            out[relay] += numel if sharded[matrix] and relay != target else 0
            back[target] += numel if relay != target else 0
            for one, other in ((holder, relay), (relay, target)):
                peers[one] |= {other} - {one}
                peers[other] |= {one} - {other}
    return between, out, back, peers


@pytest.mark.parametrize("seed", range(12))
def test_sent_elements_and_peers_equal_a_simulation(seed: int) -> None:
    rng = random.Random(seed)
    dp, tp = rng.randint(1, 5), rng.randint(1, 4)
    lists = []
    for _ in range(9):
        first = rng.randrange(dp)
        lists.append(
            [(row, rng.randint(1, 50)) for row in range(first, rng.randint(first + 1, dp))]
        )
    pieces = _pieces(*lists)
    owner = [rng.randrange(dp * tp) for _ in lists]
    sharded = [rng.random() < 0.5 for _ in lists]
    sent = count_sent(np.array(owner), pieces, np.array(sharded), dp=dp, tp=tp)
    between, out, back, peers = _simulate(owner, pieces, sharded, dp, tp)
    assert sent.between.tolist() == between
    assert sent.within_out.tolist() == out
    assert sent.within_back.tolist() == back
    counted = count_peers(np.array(owner), pieces, dp=dp, tp=tp)
    assert counted.tolist() == [len(each) for each in peers]
