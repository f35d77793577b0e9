"""Divided sequences where a gradient is not wanted, not on every rank, or wanted twice.

Class *bitwise*: values are integers.
"""

from __future__ import annotations

import pytest
import torch

from megatron_lw import ConfigError
from megatron_lw.distributed.sequence import CachedGather, gather_sequence
from tests.distributed.sequence_cases import SHAPE, SIZES, all_ranks, integers, part, same
from tests.harness import expect_failure_on_all, run_ranks


def without_gradient():
    group = all_ranks()
    leaf = torch.ones(2, 3, requires_grad=True)
    with torch.no_grad():
        quiet = gather_sequence(leaf, 0, group)
    with torch.inference_mode():
        inference = gather_sequence(leaf, 0, group)
    cut = gather_sequence(leaf, 0, group, differentiable=False)
    frozen = gather_sequence(leaf.detach(), 0, group, differentiable=False)
    tokens = gather_sequence(torch.arange(3), 0, group)
    wholes = (quiet, inference, cut, frozen, tokens)
    return [x.requires_grad for x in wholes], dict(group.traffic.calls)


@pytest.mark.parametrize("size", SIZES)
def test_no_grad_mode_integers_and_not_differentiable(size):
    for requires_grad, calls in run_ranks(without_gradient, size):
        assert requires_grad == [False] * 5
        assert calls == {"all_gather": 5}


def needed_on_one_rank(needing):
    group = all_ranks()
    x = integers(group.rank, SHAPE).requires_grad_(group.rank == needing)
    frozen = integers(60 + group.rank, SHAPE)
    whole = gather_sequence(x, 1, group)
    none_needs = gather_sequence(frozen, 1, group)
    ((whole + none_needs) * integers(10 + group.rank, tuple(whole.shape))).sum().backward()
    total = sum(integers(10 + rank, tuple(whole.shape)) for rank in range(group.size))
    right = same(x.grad, part(total, group, 1)) if group.rank == needing else x.grad is None
    return right, frozen.grad is None, whole.requires_grad, dict(group.traffic.calls)


@pytest.mark.parametrize("needing", [0, 2, None])
def test_backward_runs_on_every_rank_also_where_one_needs_no_gradient(needing):
    for right, frozen, requires_grad, calls in run_ranks(needed_on_one_rank, 3, needing):
        assert right and frozen and requires_grad
        assert calls == {"all_gather": 2, "reduce_scatter": 2}


def loss_on_one_rank():
    """Rank 0 alone has targets; infinities are there, so that 0 times a value would show."""
    group = all_ranks()
    leaf = integers(group.rank, SHAPE).requires_grad_()
    whole = gather_sequence(leaf.masked_fill(leaf == 4, torch.inf), 1, group)
    loss = torch.where(whole.isinf(), 0.0, whole).sum() if group.rank == 0 else whole[:0].sum()
    loss.backward()
    return bool(whole.isinf().any()), leaf.grad, integers(group.rank, SHAPE) != 4


def test_a_rank_without_a_loss_takes_part_by_adding_nothing():
    for infinite, gradient, finite in run_ranks(loss_on_one_rank, 3):
        assert infinite
        assert same(gradient, finite.float())


def two_losses(mode):
    group = all_ranks()
    leaf = integers(group.rank, SHAPE).requires_grad_()
    cache = CachedGather(leaf * 2, 1, group)
    shape = (SHAPE[0], SHAPE[1] * group.size, SHAPE[2])
    losses = [(cache.whole() * integers(s + group.rank, shape)).sum() for s in (20, 30)]
    if mode == "one backward":
        sum(losses).backward()
    else:
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    total = sum(2 * integers(s + rank, shape) for s in (20, 30) for rank in range(group.size))
    one_tensor = cache.whole() is cache.whole()
    return same(leaf.grad, part(total, group, 1)), one_tensor, dict(group.traffic.calls)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["one backward", "two backwards"])
def test_cached_gather_stays_attached_for_two_losses(size, mode):
    for equal, one_tensor, calls in run_ranks(two_losses, size, mode):
        assert equal and one_tensor
        assert calls == {"all_gather": 1, "reduce_scatter": 1 if mode == "one backward" else 2}


def cache_facts():
    """After each use: how many gathers the cache has made, and whether what came is right."""
    group = all_ranks()
    x = integers(group.rank, SHAPE).requires_grad_()
    cache, seen = CachedGather(x, 1, group), []

    def use(label):
        whole = cache.whole()
        right = same(whole, gather_sequence(x, 1, group, differentiable=False))
        num_gathers = group.traffic.calls["all_gather"] - len(seen) - 1
        seen.append((label, num_gathers, whole.requires_grad, right))

    with torch.no_grad():
        use("evaluation first")
    use("with a graph")
    use("with a graph again")
    with torch.no_grad():
        use("evaluation after")
        x.add_(1)
        use("written, evaluation")
    use("written")
    with torch.no_grad():
        cache.whole().zero_()
    use("result written")
    x.requires_grad_(False)
    use("frozen")
    with torch.inference_mode():
        use("inference")
    return seen


@pytest.mark.parametrize("size", [1, 3])
def test_cached_gather_never_hands_out_what_does_not_fit(size):
    for seen in run_ranks(cache_facts, size):
        assert seen == [
            ("evaluation first", 1, False, True),
            ("with a graph", 2, True, True),
            ("with a graph again", 2, True, True),
            ("evaluation after", 2, False, True),
            ("written, evaluation", 3, False, True),
            ("written", 4, True, True),
            ("result written", 5, True, True),
            ("frozen", 6, True, True),
            ("inference", 6, False, True),
        ]


def cached_in_inference():
    group = all_ranks()
    with torch.inference_mode():
        cache = CachedGather(torch.arange(3) + 3 * group.rank, 0, group)
        first = cache.whole()
    second = [cache.whole() for _ in range(2)][-1]
    return first.tolist(), second.tolist(), dict(group.traffic.calls)


def test_cached_integers_are_gathered_once_a_grad_mode():
    for first, second, calls in run_ranks(cached_in_inference, 2):
        assert first == second == [0, 1, 2, 3, 4, 5]
        assert calls == {"all_gather": 2}


def unequal_lengths():
    group = all_ranks()
    gather_sequence(torch.zeros(2, 6 - (group.rank == 1)), -1, group, check=True)


def test_unequal_lengths_are_refused_on_every_rank_by_name():
    lengths = r"dim=-1 has lengths \[6, 5, 6\] on ranks \(0, 1, 2\) of group 'tp'"
    assert len(expect_failure_on_all(unequal_lengths, 3, ConfigError, lengths)) == 3


def unequal(what):
    group = all_ranks()
    odd = group.rank == 1
    x = torch.zeros((2, 3) if what != "shape" else (2 + odd, 3))
    x = x[None] if odd and what == "number of dimensions" else x
    x = x.bfloat16() if odd and what == "dtype" else x
    dim = 0 if odd and what == "dim" else 1
    with torch.set_grad_enabled(not (odd and what == "grad mode")):
        differentiable = not (odd and what == "differentiable")
        gather_sequence(x, dim, group, differentiable=differentiable, check=True)


@pytest.mark.parametrize(
    "what", ["shape", "number of dimensions", "dtype", "dim", "grad mode", "differentiable"]
)
def test_other_differences_are_refused_on_every_rank_by_name(what):
    messages = expect_failure_on_all(unequal, 2, ConfigError, f"gather_sequence: {what} is", what)
    assert messages[0] == messages[1]


def checked_and_fine():
    group = all_ranks()
    gather_sequence(torch.zeros(2, 3), 1, group, check=True)
    return dict(group.traffic.calls)


def test_the_check_costs_one_collective_more():
    assert run_ranks(checked_and_fine, 2) == [{"all_gather_object": 1, "all_gather": 1}] * 2
