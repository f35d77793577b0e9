"""Gather of a divided sequence, and its gradient, against one process that holds the whole.

Class *bitwise* where values are integers or only moved (sums are then exact in any order), and
*numerical* where they are not.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron_lw.distributed.sequence import gather_sequence
from tests.distributed.sequence_cases import (
    SHAPE,
    SIZES,
    all_ranks,
    group_of_one,
    integers,
    normal,
    part,
    same,
    strided,
)
from tests.harness import run_ranks

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
)
DIMS = (0, 1, -1)
KINDS = ("plain", "transposed", "every other", "expanded")


def values():
    group, wrong, num_strided = all_ranks(), [], 0
    for dtype in DTYPES:
        for dim in DIMS:
            for kind in KINDS:
                ours = [
                    strided(integers(rank, SHAPE).abs().to(dtype), kind)
                    for rank in range(group.size)
                ]
                num_strided += not ours[group.rank].is_contiguous()
                expected = torch.stack(ours).movedim(0, dim % 3).flatten(dim % 3, dim % 3 + 1)
                found = gather_sequence(ours[group.rank], dim, group)
                if not (same(found, expected) and found.is_contiguous()):
                    wrong.append((dtype, dim, kind))
    return wrong, num_strided, dict(group.traffic.calls)


@pytest.mark.parametrize("size", SIZES)
def test_any_dtype_dimension_and_strides_arrive_whole(size):
    num_cases = len(DTYPES) * len(DIMS) * len(KINDS)
    for wrong, num_strided, calls in run_ranks(values, size):
        assert wrong == []
        assert num_strided == num_cases * 3 // 4
        assert calls == {"all_gather": num_cases}


def empty():
    x = torch.zeros(2, 0, 3, requires_grad=True)
    whole = gather_sequence(x, 1, all_ranks())
    whole.sum().backward()
    return whole.shape, x.grad.shape


def test_an_empty_sequence_is_a_case_like_any_other():
    assert run_ranks(empty, 3) == [((2, 0, 3), (2, 0, 3))] * 3


def exact_gradients(dtype):
    """Each rank's loss weighs the whole by integers of its own."""
    group, facts = all_ranks(), []
    for dim in (0, 1, -1):
        for kind in ("plain", "transposed", "every other"):
            group.traffic.clear()
            ours = [integers(rank, SHAPE, dtype) for rank in range(group.size)]
            leaf = strided(ours[group.rank], kind).detach().requires_grad_()
            whole = gather_sequence(leaf, dim, group)
            weights = [integers(10 + r, tuple(whole.shape), dtype) for r in range(group.size)]
            (whole * weights[group.rank]).sum().backward()

            reference = torch.cat(ours, dim).requires_grad_()
            sum((reference * w).sum() for w in weights).backward()
            expected = part(reference.grad, group, dim)
            own_alone = same(expected, part(weights[group.rank], group, dim))
            traffic = dict(group.traffic.calls), dict(group.traffic.nbytes)
            facts.append((same(leaf.grad, expected), own_alone, traffic))
    return facts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_is_the_sum_over_ranks_and_both_ways_are_counted(size, dtype):
    nbytes = (size - 1) * 2 * 3 * 5 * dtype.itemsize
    traffic = (
        {"all_gather": 1, "reduce_scatter": 1},
        {"all_gather": nbytes, "reduce_scatter": nbytes},
    )
    for facts in run_ranks(exact_gradients, size, dtype):
        # Equal; not explained by the rank's own weights alone; traffic.
        assert facts == [(True, size == 1, traffic)] * 9


def share_of_loss(whole, rank, size):
    """A loss that is not linear and reads every position; the sum over ranks is the whole loss."""
    mixed = torch.tanh(whole).cumsum(0) * normal(50 + rank, tuple(whole.shape))
    return (mixed.pow(3) * whole.roll(1, 0)).sum() / size


def derivatives(dim):
    """First derivatives by autograd and by central differences, and a Hessian-vector product."""
    group = all_ranks()
    ours = [normal(rank, (2, 3)) for rank in range(group.size)]
    leaf = ours[group.rank].clone().requires_grad_()
    loss = share_of_loss(gather_sequence(leaf, dim, group), group.rank, group.size)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    directions = [normal(70 + rank, (2, 3)) for rank in range(group.size)]
    (product,) = torch.autograd.grad((gradient * directions[group.rank]).sum(), leaf)

    reference = torch.cat(ours, dim).requires_grad_()
    whole_loss = sum(share_of_loss(reference, rank, group.size) for rank in range(group.size))
    (expected,) = torch.autograd.grad(whole_loss, reference, create_graph=True)
    (expected_product,) = torch.autograd.grad(
        (expected * torch.cat(directions, dim)).sum(), reference
    )

    def measured(index, step=1e-5):
        """Only the owner moves an element; the losses of all ranks answer."""
        answers = []
        for sign in (1, -1):
            moved = ours[group.rank].clone()
            if index // 6 == group.rank:
                moved.view(-1)[index % 6] += sign * step
            whole = gather_sequence(moved, dim, group, differentiable=False)
            share = share_of_loss(whole, group.rank, group.size)
            answers.append(gather_sequence(share.view(1), 0, group, differentiable=False).sum())
        return (answers[0] - answers[1]) / (2 * step)

    differences = torch.stack([measured(i) for i in range(6 * group.size)])
    mine = slice(6 * group.rank, 6 * group.rank + 6)
    return {
        "first": (gradient.detach(), part(expected, group, dim)),
        "second": (product, part(expected_product, group, dim)),
        "differences": (gradient.detach().flatten(), differences[mine]),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, -1])
def test_first_and_second_derivatives(size, dim):
    """Numerical: fp64 within 1e-10, central differences within 1e-6."""
    for found in run_ranks(derivatives, size, dim):
        torch.testing.assert_close(*found["first"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(*found["second"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(*found["differences"], rtol=1e-6, atol=1e-6)
        assert found["second"][0].abs().min() > 0


def bf16_error():
    """Largest error of a summed gradient, relative to the magnitudes that were added up."""
    group = all_ranks()
    leaf = normal(group.rank, (4, 64), torch.bfloat16).requires_grad_()
    whole = gather_sequence(leaf, 0, group)
    weights = [normal(20 + r, tuple(whole.shape), torch.bfloat16) for r in range(group.size)]
    (whole * weights[group.rank]).sum().backward()
    exact = part(sum(w.double() for w in weights), group, 0)
    magnitude = part(sum(w.double().abs() for w in weights), group, 0)
    return leaf.grad.dtype, float(((leaf.grad.double() - exact).abs() / magnitude).max())


@pytest.mark.parametrize("size", SIZES)
def test_bf16_rounds_at_each_addition_and_no_more(size):
    """Numerical: `size - 1` additions, each within 2**-8 of the magnitudes summed so far."""
    for dtype, error in run_ranks(bf16_error, size):
        assert dtype is torch.bfloat16
        assert error <= (size - 1) * 2**-8


def head(whole, weight, start, stop):
    """Each position of [start, stop) predicts the embedding of the next one."""
    last = min(stop, len(whole) - 1)
    return (whole[start:last] @ weight - whole[start + 1 : last + 1]).pow(2).sum()


def next_token(boundary_only):
    """`boundary_only`: the loss has a rank's last position alone, whose target lies elsewhere."""
    group = all_ranks()
    length, width = 3, 4
    embeddings, weight = integers(1, (length * group.size, width)), integers(2, (width, width))
    starts = [rank * length + (length - 1) * boundary_only for rank in range(group.size)]
    stops = [(rank + 1) * length for rank in range(group.size)]

    leaf, w = part(embeddings, group, 0).requires_grad_(), weight.clone().requires_grad_()
    whole = gather_sequence(leaf, 0, group)
    head(whole, w, starts[group.rank], stops[group.rank]).backward()

    reference, w_reference = embeddings.clone().requires_grad_(), weight.clone().requires_grad_()
    for start, stop in zip(starts, stops, strict=True):
        head(reference, w_reference, start, stop).backward()
    w_total = gather_sequence(w.grad[None], 0, group, differentiable=False).sum(0)
    return (
        same(leaf.grad, part(reference.grad, group, 0)),
        same(w_total, w_reference.grad),
        bool(leaf.grad[0].any()),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("boundary_only", [False, True])
def test_next_token_head_reaches_the_leaf_across_the_boundary(size, boundary_only):
    results = run_ranks(next_token, size, boundary_only)
    for rank, (equal, weight_equal, first_position) in enumerate(results):
        assert equal and weight_equal
        # With the boundary alone, only another rank's loss reads this rank's first position.
        assert first_position is (rank > 0 or not boundary_only)


def used_twice():
    group = all_ranks()
    leaf = integers(group.rank, SHAPE).requires_grad_()
    whole = gather_sequence(leaf, 1, group)
    shape = tuple(whole.shape)
    a, b = (integers(seed + group.rank, shape) for seed in (20, 30))
    ((whole * a).sum() + (whole[:, 1:] * b[:, 1:]).sum()).backward()
    total = torch.zeros(shape)
    for rank in range(group.size):
        total += integers(20 + rank, shape)
        total += F.pad(integers(30 + rank, shape)[:, 1:], (0, 0, 1, 0))
    return same(leaf.grad, part(total, group, 1)), dict(group.traffic.calls)


@pytest.mark.parametrize("size", SIZES)
def test_two_uses_sum_their_gradients_in_one_reduce_scatter(size):
    for equal, calls in run_ranks(used_twice, size):
        assert equal
        assert calls == {"all_gather": 1, "reduce_scatter": 1}


def handed_gradients():
    """The gradient belongs to autograd, which may hand the same tensor to others."""
    group, facts = all_ranks(), []
    for dim in range(3):
        leaf = integers(group.rank, SHAPE).requires_grad_()
        whole = gather_sequence(leaf * 3, dim, group)
        gradient = integers(40 + group.rank, tuple(whole.shape))
        before = gradient.clone()
        whole.backward(gradient)
        facts.append((torch.equal(gradient, before), bool(leaf.grad.any())))
    return facts


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_that_was_handed_in_is_left_as_it_was(size):
    assert run_ranks(handed_gradients, size) == [[(True, True)] * 3] * size


def written_in_place(shape, dim):
    group = all_ranks()
    leaf = integers(group.rank, shape).requires_grad_()
    whole = gather_sequence(leaf * 1, dim, group)
    whole.mul_(2)
    whole.select(dim, 0).zero_()
    whole.sum().backward()
    return leaf.grad


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), 0), ((1, 3, 5), 1), ((2, 3, 5), 1)])
def test_the_result_may_be_written_in_place(shape, dim):
    """In place or not, it is the caller's own tensor, whatever way the parts arrived."""
    first, second = run_ranks(written_in_place, 2, shape, dim)
    expected = torch.full(shape, 4.0)
    assert same(second, expected)
    expected.select(dim, 0).zero_()
    assert same(first, expected)


def alone():
    group = group_of_one()
    leaf = integers(1, SHAPE).requires_grad_()
    whole = gather_sequence(leaf, 1, group)
    copied = same(whole, leaf) and whole.data_ptr() != leaf.data_ptr()
    (whole * integers(2, SHAPE)).sum().backward()
    equal = same(leaf.grad, integers(2, SHAPE))
    traffic = dict(group.traffic.calls), dict(group.traffic.nbytes)
    return group.handle is None, copied, equal, *traffic


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_of_one_takes_the_same_path_and_sends_nothing(size):
    """As with tensor parallelism 1, in a world of one rank or more."""
    for no_handle, copied, equal, calls, nbytes in run_ranks(alone, size):
        assert no_handle and copied and equal
        assert calls == {"all_gather": 1, "reduce_scatter": 1}
        assert nbytes == {"all_gather": 0, "reduce_scatter": 0}
