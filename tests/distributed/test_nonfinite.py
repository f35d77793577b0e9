"""A gradient that is not finite, and a step that is skipped: nothing changes, bit for bit.

Class *bitwise*.
"""

from __future__ import annotations

import math

import pytest
import torch

import megatron_lw
from tests.distributed.cases import build, integer_grads
from tests.harness import run_ranks

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (100,)}
CONFIG = {"optimizer": "muon", "lr": 0.05, "clip_grad": 1.0, "log_num_zeros_in_grad": True}


def snapshot(ddp, optimizer):
    """Everything that a step may write."""
    runtime = optimizer.runtime
    tensors = [p.detach().clone() for p in ddp.module.parameters()]
    tensors += [pub.master.row.clone() for pub in runtime.publishers]
    for child in runtime.children:
        for bucket in range(child.num_buckets):
            tensors += [row.clone() for row in child.state_rows(bucket).values()]
    return tensors, [child.num_steps for child in runtime.children]


def equal(a, b):
    return a[1] == b[1] and all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def backward(ddp, optimizer, step, poison=None, rank=1, name="b_weight"):
    optimizer.zero_grad()
    grads = integer_grads(SHAPES, ddp.groups.dp.rank, step)
    if poison is not None and ddp.groups.dp.rank == rank:
        grads[name][3] = poison
    ddp(grads).backward()


def nonfinite(mode, poison, name):
    ddp, optimizer = build(SHAPES, {**CONFIG, "on_nonfinite": mode})
    clean_ddp, clean = build(SHAPES, CONFIG)
    for opt, model in ((optimizer, ddp), (clean, clean_ddp)):
        backward(model, opt, 0)
        assert opt.step()[0]
    before = snapshot(ddp, optimizer)
    backward(ddp, optimizer, 1, poison, name=name)
    message = ""
    result = None
    try:
        result = optimizer.step()
    except megatron_lw.NonFiniteError as error:
        message = str(error)
    unchanged = equal(before, snapshot(ddp, optimizer))
    for opt, model in ((optimizer, ddp), (clean, clean_ddp)):
        backward(model, opt, 2)
        assert opt.step()[0]
    return result, message, unchanged, equal(snapshot(ddp, optimizer), snapshot(clean_ddp, clean))


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["b_weight", "c_bias"])
def test_raise_names_parameter_and_rank_and_changes_nothing(poison, name):
    for _, message, unchanged, same_later in run_ranks(nonfinite, 3, "raise", poison, name):
        assert name in message and "rank" in message
        assert "a_weight" not in message
        assert unchanged and same_later


def test_skip_changes_nothing_and_later_steps_never_saw_it():
    for result, message, unchanged, same_later in run_ranks(
        nonfinite, 2, "skip", math.inf, "a_weight"
    ):
        assert message == ""
        assert result[0] is False and result[1] is None
        assert unchanged and same_later


def huge(threshold):
    ddp, optimizer = build(SHAPES, {**CONFIG, "grad_norm_skip_threshold": threshold})
    optimizer.zero_grad()
    grads = {n: g * 1e25 for n, g in integer_grads(SHAPES, ddp.groups.dp.rank, 0).items()}
    ddp(grads).backward()
    before = snapshot(ddp, optimizer)
    result = optimizer.step()
    return result, equal(before, snapshot(ddp, optimizer))


def test_huge_but_finite_norm_is_measured_right():
    """Squares of 1e25 overflow fp32; the norm is finite all the same, and the step is taken."""
    results = run_ranks(huge, 2, math.inf)
    assert len({norm for (_, norm, _), _ in results}) == 1
    (success, norm, _), unchanged = results[0]
    total = sum(
        ((integer_grads(SHAPES, 0, 0)[n] + integer_grads(SHAPES, 1, 0)[n]).double() / 2)
        .square()
        .sum()
        for n in SHAPES
    )
    assert success and not unchanged
    assert norm == pytest.approx(1e25 * float(total) ** 0.5, rel=1e-5)


def test_threshold_skips_and_reports_the_norm():
    for (success, norm, zeros), unchanged in run_ranks(huge, 2, 1e20):
        assert success is False and norm > 1e20 and zeros > 0
        assert unchanged


def tiny(scale):
    ddp, optimizer = build(SHAPES, {**CONFIG, "clip_grad": 0.0, "weight_decay": 0.0})
    before = ddp.module.a_weight.detach().clone()
    optimizer.zero_grad()
    ddp({n: g * scale for n, g in integer_grads(SHAPES, ddp.groups.dp.rank, 0).items()}).backward()
    _, norm, _ = optimizer.step()
    return norm, float((ddp.module.a_weight.detach() - before).norm())


@pytest.mark.parametrize("scale", [1e-6, 1e-10, 1e-14, 1e-20])
def test_tiny_gradients_keep_their_norm_and_their_update(scale):
    """The clip must not vanish in an epsilon, nor the norm in an underflow (update within 1 %)."""
    (norm, update), *_ = run_ranks(tiny, 2, scale)
    (unit_norm, unit_update), *_ = run_ranks(tiny, 2, 1.0)
    assert norm == pytest.approx(scale * unit_norm, rel=1e-4)
    assert update == pytest.approx(unit_update, rel=1e-2)
