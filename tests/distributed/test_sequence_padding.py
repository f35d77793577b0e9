"""Scatter of a sequence, and sequences padded so that they divide, against one process.

Class *bitwise* (values are integers), but for the second derivative.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron_lw import ConfigError, ParallelGroups
from megatron_lw.distributed.sequence import (
    CachedGather,
    gather_sequence,
    pad_sequence_to,
    scatter_sequence,
    trim_sequence,
)
from tests.distributed.sequence_cases import (
    SIZES,
    all_ranks,
    group_of_one,
    integers,
    normal,
    part,
    same,
    strided,
)
from tests.harness import expect_failure_on_all, run_ranks

PATCHES, PADDED, WIDTH = 20, 24, 16


def scattered():
    group, facts = all_ranks(), []
    shape = (4 * group.size, 2 * group.size, 3 * group.size)
    for dim in (0, 1, -1):
        group.traffic.clear()
        whole = strided(integers(5, shape), "transposed").requires_grad_()
        own = scatter_sequence(whole, dim, group)
        weights = integers(6, shape)
        (own * part(weights, group, dim)).sum().backward()
        compact = own.is_contiguous() and own.untyped_storage().nbytes() == own.numel() * 4
        right = same(own, part(whole, group, dim)), same(whole.grad, weights)
        facts.append((*right, compact, dict(group.traffic.calls), dict(group.traffic.nbytes)))
    return facts


@pytest.mark.parametrize("size", SIZES)
def test_scatter_takes_the_own_part_and_its_gradient_is_whole_everywhere(size):
    nbytes = (size - 1) * 4 * 2 * 3 * size**2 * 4
    expected = (True, True, True, {"all_gather": 1}, {"all_gather": nbytes})
    assert run_ranks(scattered, size) == [[expected] * 3] * size


def second_order():
    group = all_ranks()
    x, weights = normal(8, (2 * group.size, 3)), normal(9, (2 * group.size, 3))

    def product(whole, own, own_weights):
        loss = (own.pow(3) * own_weights).sum()
        (gradient,) = torch.autograd.grad(loss, whole, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), whole)[0]

    whole, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = product(whole, scatter_sequence(whole, 0, group), part(weights, group, 0))
    return found, product(reference, reference * 1, weights)


@pytest.mark.parametrize("size", SIZES)
def test_scatter_has_a_second_derivative(size):
    """Numerical: fp64 within 1e-10."""
    for found, expected in run_ranks(second_order, size):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Tower(torch.nn.Module):
    """Treats each patch by itself."""

    def __init__(self, kind):
        super().__init__()
        make = integers if kind == "integer" else normal
        self.kind = kind
        self.up = torch.nn.Parameter(make(1, (WIDTH, 2 * WIDTH)).float())
        self.down = torch.nn.Parameter(make(2, (2 * WIDTH, WIDTH)).float())

    def forward(self, x):
        x = x @ self.up
        x = F.relu(x) if self.kind == "integer" else F.gelu(F.layer_norm(x, x.shape[-1:]))
        return x @ self.down


def run_tower(kind, group, multiple):
    """Scatter, tower, gather; each rank's loss weighs some patches. Length, output, gradients."""
    make = integers if kind == "integer" else normal
    patches = make(3, (2, PATCHES, WIDTH)).float().requires_grad_()
    tower = Tower(kind)
    padded = pad_sequence_to(patches, 1, multiple)
    whole = gather_sequence(tower(scatter_sequence(padded, 1, group)), 1, group)
    whole = trim_sequence(whole, 1, PATCHES)
    mine = torch.arange(PATCHES).remainder(group.size).eq(group.rank)[:, None]
    (whole * torch.where(mine, make(4, (2, PATCHES, WIDTH)).float(), 0.0)).sum().backward()
    grads = [
        gather_sequence(p.grad[None], 0, group, differentiable=False).sum(0)
        for p in tower.parameters()
    ]
    return padded.shape[1], [whole.detach(), patches.grad, *grads]


def padded_and_unpadded(kind):
    """Against the same ranks without padding where 20 patches divide, else against one rank."""
    group, alone = all_ranks(), group_of_one()
    length, padded = run_tower(kind, group, PADDED)
    plain_length, plain = run_tower(kind, group if PATCHES % group.size == 0 else alone, 1)
    differences = [float((a - b).abs().max()) for a, b in zip(padded, plain, strict=True)]
    return (length, plain_length), differences, [float(x.abs().max()) for x in plain]


@pytest.mark.parametrize("size", SIZES)
def test_20_patches_padded_to_24_differ_from_the_unpadded_run_by_0(size):
    """Bitwise: output, and gradients of the patches and of both weights."""
    for lengths, differences, largest in run_ranks(padded_and_unpadded, size, "integer"):
        assert lengths == (PADDED, PATCHES)
        assert differences == [0.0] * 4
        assert min(largest) > 0


@pytest.mark.parametrize("size", SIZES)
def test_padding_changes_real_values_by_rounding_only(size):
    """Numerical, 1e-6: padding moves patches to other ranks, which regroups the sums over them."""
    for _, differences, largest in run_ranks(padded_and_unpadded, size, "real"):
        assert all(d <= 1e-6 * x for d, x in zip(differences, largest, strict=True))


def test_padding_gets_no_gradient_and_gives_none():
    x = torch.ones(2, 5, requires_grad=True)
    padded = pad_sequence_to(x, -1, 4, value=7.0)
    assert padded.tolist() == [[1.0] * 5 + [7.0] * 3] * 2
    (trim_sequence(padded, -1, 5) * 2).sum().backward()
    assert x.grad.tolist() == [[2.0] * 5] * 2
    assert pad_sequence_to(x, 1, 5) is x
    assert pad_sequence_to(torch.ones(3, 2, dtype=torch.int64), 0, 4).tolist()[3] == [0, 0]


def test_padding_value_keeps_a_norm_finite():
    """x / |x| has no gradient at 0: the padding's NaN would reach every weight below it."""

    def gradient(value):
        weight = torch.ones(3, requires_grad=True)
        rows = pad_sequence_to(torch.ones(5, 3), 0, 4, value) * weight
        trim_sequence(rows / rows.norm(dim=-1, keepdim=True), 0, 5).sum().backward()
        return weight.grad

    assert gradient(0.0).isnan().all()
    assert gradient(1.0).isfinite().all()


def indivisible():
    scatter_sequence(torch.zeros(2, PATCHES), 1, all_ranks())


def test_a_length_that_does_not_divide_is_refused_with_the_remedy():
    match = r"dim=1 has length 20, .* 3 equal parts .*pad_sequence_to\(x, 1, 3\)"
    expect_failure_on_all(indivisible, 3, ConfigError, match)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, g: gather_sequence(x, 2, g), r"gather_sequence: dim=2 .* shape \(4, 3\)"),
        (lambda x, g: gather_sequence(x, -3, g), "gather_sequence: dim=-3"),
        (lambda x, g: gather_sequence(x, 5, g, check=True), "gather_sequence: dim=5"),
        (lambda x, g: gather_sequence(x[0, 0], 0, g), r"gather_sequence: dim=0 .* shape \(\)"),
        (lambda x, g: scatter_sequence(x, 2, g), "scatter_sequence: dim=2"),
        (lambda x, g: CachedGather(x, 2, g), "CachedGather: dim=2"),
        (lambda x, g: pad_sequence_to(x, 2, 2), "pad_sequence_to: dim=2"),
        (lambda x, g: pad_sequence_to(x, 0, 0), "multiple=0; give 1 or more"),
        (lambda x, g: trim_sequence(x, 2, 2), "trim_sequence: dim=2"),
        (lambda x, g: trim_sequence(x, 0, 5), "length=5; give 0 to 4"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, match):
    with pytest.raises(ConfigError, match=match):
        call(torch.zeros(4, 3), ParallelGroups.single().tp)
