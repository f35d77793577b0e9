"""The wrapper: where gradients land, when they are reduced, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import megatron_lw
from megatron_lw.distributed.buffers import GradState
from tests.distributed.cases import build, integer_grads
from tests.harness import run_ranks

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (100,)}
CONFIG = {"optimizer": "muon", "lr": 0.05, "weight_decay": 0.0, "clip_grad": 0.0}


def accumulate(micro_batches):
    """Two runs: gradients of several backwards under no_sync, and their sum at once."""
    ddp, optimizer = build(SHAPES, CONFIG)
    once_ddp, once = build(SHAPES, CONFIG)
    rank = ddp.groups.dp.rank
    parts = [integer_grads(SHAPES, rank, 10 + i) for i in range(micro_batches)]
    optimizer.zero_grad()
    with ddp.no_sync():
        for part in parts[:-1]:
            ddp(part).backward()
    ddp(parts[-1]).backward()
    optimizer.step()
    once.zero_grad()
    once_ddp({n: sum(p[n] for p in parts) for n in SHAPES}).backward()
    once.step()
    same = all(
        torch.equal(a, b)
        for a, b in zip(ddp.module.parameters(), once_ddp.module.parameters(), strict=True)
    )
    return same, ddp.groups.dp.traffic.calls["reduce_scatter"], len(ddp.buckets)


def test_accumulation_equals_one_backward_and_reduces_once():
    """Class exact sums, bitwise."""
    for same, reduces, buckets in run_ranks(accumulate, 2, 3):
        assert same
        assert reduces == buckets


class Twice(nn.Module):
    """A weight used twice, one never used, one frozen, and one through F.linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8, bias=False)
        self.unused = nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.functional = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.shared(self.shared(x)))
        return functional.linear(x, self.functional).square().sum()


def twice():
    groups = megatron_lw.ParallelGroups.create()
    model, plain = Twice(), Twice()
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    config = megatron_lw.OptimizerConfig(**{**CONFIG, "weight_decay": 0.5})
    optimizer = megatron_lw.get_megatron_optimizer(config, [ddp])
    frozen, unused = model.frozen.weight.clone(), model.unused.weight.detach().clone()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(groups.dp.rank))
    plain(x).backward()
    optimizer.zero_grad()
    ddp(x).backward()
    local = torch.equal(model.shared.weight.main_grad, plain.shared.weight.grad)
    no_grad_attribute = all(p.grad is None for p in model.parameters())
    optimizer.step()
    decayed = torch.allclose(model.unused.weight, unused * (1 - 0.05 * 0.5))
    return local, no_grad_attribute, torch.equal(frozen, model.frozen.weight), decayed


def test_used_twice_unused_frozen_and_functional():
    for local, no_grad_attribute, frozen_same, unused_decayed in run_ranks(twice, 2):
        assert local and no_grad_attribute and frozen_same and unused_decayed


class FusedLinear(torch.autograd.Function):
    """Adds its weight gradient to main_grad by itself and hands autograd a placeholder."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.T @ x)
        ctx.weight.grad_added_to_main_grad = True
        placeholder = torch.full_like(ctx.weight, float("nan"))
        return grad @ ctx.weight, placeholder


class FusedModel(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = FusedLinear.apply(x, self.weight) if self.fused else functional.linear(x, self.weight)
        return (y + self.bias).square().sum()


def fused():
    groups = megatron_lw.ParallelGroups.create()
    weights = []
    for flag in (True, False):
        ddp = megatron_lw.DistributedDataParallel(FusedModel(flag), groups)
        optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
        for _ in range(2):
            optimizer.zero_grad()
            for micro_batch in range(2):
                seed = 10 * groups.dp.rank + micro_batch
                ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).backward()
            optimizer.step()
        weights.append([p.detach().clone() for p in ddp.module.parameters()])
    return weights


def test_layer_that_accumulates_into_main_grad_itself():
    """Class numerical: the same products, summed by another kernel. The placeholder is NaN."""
    for by_layer, by_autograd in run_ranks(fused, 2):
        for a, b in zip(by_layer, by_autograd, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def misuse():
    """Calls in the wrong order; each must say what to do."""
    ddp, optimizer = build(SHAPES, CONFIG)
    rank = ddp.groups.dp.rank
    messages = []

    def attempt(action):
        try:
            action()
        except megatron_lw.StateError as error:
            messages.append(str(error))
        else:
            messages.append("no error")

    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, rank, 0)).backward()
    with ddp.no_sync():
        attempt(optimizer.step)
    optimizer.step()
    attempt(lambda: ddp(integer_grads(SHAPES, rank, 1)).backward())
    attempt(optimizer.step)
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, rank, 1)).backward()
    ddp.finish_grad_sync()
    ddp.finish_grad_sync()
    reduced = [bucket.grad_state is GradState.REDUCED for bucket in ddp.buckets]
    optimizer.step()
    loose = megatron_lw.DistributedDataParallel(nn.Linear(4, 4), ddp.groups)
    attempt(loose.finish_grad_sync)
    attempt(loose.start_param_sync)
    return messages, all(reduced)


def test_calls_in_the_wrong_order_are_refused_and_do_no_harm():
    for messages, reduced in run_ranks(misuse, 2):
        assert "no_sync" in messages[0]
        assert "zero_grad" in messages[1]
        assert "zero_grad" in messages[2]
        assert "get_megatron_optimizer" in messages[3] and "get_megatron_optimizer" in messages[4]
        assert reduced


def sync_and_evaluate(disturb):
    """Explicit syncs and evaluation at odd moments."""
    ddp, optimizer = build(SHAPES, {**CONFIG, "bf16": True}, dtype=torch.bfloat16)
    addresses = [p.data_ptr() for p in ddp.module.parameters()]
    rank = ddp.groups.dp.rank
    if disturb:
        ddp.start_param_sync()
    for step in range(3):
        optimizer.zero_grad()
        if disturb:
            with torch.no_grad():
                ddp(integer_grads(SHAPES, rank, 99))
            ddp.start_param_sync()
        ddp(integer_grads(SHAPES, rank, step)).backward()
        if disturb:
            ddp.start_param_sync()
            ddp.start_param_sync()
        optimizer.step()
    same_addresses = addresses == [p.data_ptr() for p in ddp.module.parameters()]
    return [p.detach().clone() for p in ddp.module.parameters()], same_addresses


@pytest.mark.parametrize("ranks", [2, 3])
def test_explicit_sync_and_evaluation_change_nothing(ranks):
    """Class bitwise; addresses never change."""
    plain = run_ranks(sync_and_evaluate, ranks, False)
    disturbed = run_ranks(sync_and_evaluate, ranks, True)
    for (a, _), (b, same_addresses) in zip(plain, disturbed, strict=True):
        assert same_addresses
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def different_seeds():
    """Each rank builds its own garbage; wrapping makes the replicas equal."""
    rank = torch.distributed.get_rank()
    ddp, optimizer = build(SHAPES, CONFIG, seed=rank)
    start = [p.detach().clone() for p in ddp.module.parameters()]
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, rank, 0)).backward()
    optimizer.step()
    return start, [p.detach().clone() for p in ddp.module.parameters()]


def test_replicas_that_start_apart_are_made_equal_to_the_first():
    from tests.distributed.cases import initial_values

    results = run_ranks(different_seeds, 3)
    for start, after in results:
        for value, expected in zip(start, initial_values(SHAPES, 0).values(), strict=True):
            assert torch.equal(value, expected)
        for a, b in zip(after, results[0][1], strict=True):
            assert torch.equal(a, b)


def load_weights(how):
    """Weights loaded after construction must not be undone by the next step."""
    ddp, optimizer = build({"v_bias": (130,)}, {"lr": 0.1, "weight_decay": 0.0})
    state = {"v_bias": torch.full((130,), 5.0)}
    if how == "module":
        ddp.module.load_state_dict(state)
    elif how == "wrapper":
        ddp.load_state_dict(state)
    else:
        with torch.no_grad():
            ddp.module.v_bias.fill_(5.0)
        optimizer.reload_model_params()
    optimizer.zero_grad()
    optimizer.step()
    return ddp.module.v_bias.detach().clone()


@pytest.mark.parametrize("how", ["module", "wrapper", "by_hand"])
def test_weights_only_load_refreshes_the_masters(how):
    """Class bitwise: a zero gradient leaves 5.0."""
    for weight in run_ranks(load_weights, 2, how):
        assert torch.equal(weight, torch.full((130,), 5.0))
