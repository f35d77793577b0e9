"""How gradients are summed and finished: averages, fp32 sums, tokens, FP16 with a loss scale."""

from __future__ import annotations

import pytest
import torch

import megatron_lw
from tests.distributed.cases import Bag, integer_grads, reference_run, relative
from tests.distributed.test_against_reference import MUON, settings
from tests.harness import run_ranks

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (100,)}


def make(config, ddp_config, dtype=torch.float32):
    groups = megatron_lw.ParallelGroups.create()
    ddp = megatron_lw.DistributedDataParallel(
        Bag(SHAPES, dtype), groups, megatron_lw.DDPConfig(**ddp_config)
    )
    settings = megatron_lw.OptimizerConfig(**config)
    return ddp, megatron_lw.get_megatron_optimizer(settings, [ddp])


def averaged():
    ddp, optimizer = make(MUON, {"average_in_collective": True})
    for step in range(2):
        optimizer.zero_grad()
        ddp(integer_grads(SHAPES, ddp.groups.dp.rank, step)).backward()
        optimizer.step()
    return {n: p.detach() for n, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_average_in_collective_numerical(ranks):
    masters, _ = reference_run(SHAPES, settings(SHAPES, MUON), ranks=ranks, steps=2)
    for weights in run_ranks(averaged, ranks):
        for name, weight in weights.items():
            assert relative(weight, masters[-1][name]) < 1e-5


def reduced_rows(sum_in_fp32):
    """Reduced bf16 gradients of 1 and 2**-9 on ranks that add up to more than bf16 can hold."""
    ddp, optimizer = make(
        {**MUON, "bf16": True},
        {
            "grad_reduce_in_fp32": False,
            "reduce_scatter_with_fp32_accumulation": sum_in_fp32,
        },
        torch.bfloat16,
    )
    rank = ddp.groups.dp.rank
    value = 256.0 if rank == 0 else 1.0
    optimizer.zero_grad()
    ddp({n: torch.full(s, value) for n, s in SHAPES.items()}).backward()
    ddp.finish_grad_sync()
    own = [float(b.grad_row[0]) for b in ddp.buckets if b.layout.slots[rank]]
    return own, ddp.groups.dp.traffic.calls["all_to_all"], len(ddp.buckets)


def test_fp32_accumulation_keeps_what_a_bf16_sum_loses():
    """256 + 1 + 1 = 258 is a bf16 number; 256 + 1 is not, and rounds to 256."""
    exact = run_ranks(reduced_rows, 3, True)
    rounded = run_ranks(reduced_rows, 3, False)
    for own, calls, buckets in exact:
        assert set(own) <= {86.0} and calls == buckets
    assert any(value != 86.0 for own, _, _ in rounded for value in own)


def tokens(num_tokens, last_stage_counts):
    """Summed losses, divided by all tokens."""
    ddp, optimizer = make({**MUON, "optimizer": "adam"}, {})
    rank = ddp.groups.dp.rank
    optimizer.zero_grad()
    ddp({n: torch.full(s, 6.0 * (rank + 1)) for n, s in SHAPES.items()}).backward()
    megatron_lw.finalize_model_grads([ddp], torch.tensor(num_tokens[rank]))
    megatron_lw.finalize_model_grads([ddp], torch.tensor(num_tokens[rank]))
    rows = [float(b.grad_row[0]) for b in ddp.buckets if b.layout.slots[rank]]
    return rows, optimizer.step()[0]


def test_tokens_of_all_ranks_divide_the_summed_gradient():
    """Class exact sums: (6 + 12) / (1 + 2) = 6; a second call in one step does nothing."""
    for rows, success in run_ranks(tokens, 2, [1, 2], True):
        assert success and set(rows) <= {6.0}
    assert any(rows for rows, _ in run_ranks(tokens, 2, [1, 2], True))


def test_no_tokens_at_all_divide_by_one():
    for rows, success in run_ranks(tokens, 2, [0, 0], True):
        assert success and set(rows) <= {18.0}


def fp16(steps, overflow_at, window, optimizer="muon"):
    config = {
        **MUON,
        "optimizer": optimizer,
        "fp16": True,
        "clip_grad": 1.0,
        "lr": 0.01,
        "on_nonfinite": "raise",
    }
    config |= {"initial_loss_scale": 2.0**10, "hysteresis": 1, "loss_scale_window": window}
    ddp, optimizer = make(config, {}, torch.float16)
    scales, results, unchanged = [], [], True
    for step in range(steps):
        optimizer.zero_grad()
        grads = integer_grads(SHAPES, ddp.groups.dp.rank, step)
        if step == overflow_at and ddp.groups.dp.rank == 1:
            grads["b_weight"][1, 2] = 60000.0
        before = [p.detach().clone() for p in ddp.module.parameters()]
        optimizer.scale_loss(ddp({n: g / 64 for n, g in grads.items()})).backward()
        results.append(optimizer.step())
        if step == overflow_at:
            after = ddp.module.parameters()
            unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        scales.append(float(optimizer.get_loss_scale()))
    return {n: p.detach() for n, p in ddp.module.named_parameters()}, scales, results, unchanged


def test_fp16_skips_an_overflow_on_every_rank_and_adjusts_one_scale():
    for _, scales, results, unchanged in run_ranks(fp16, 2, 5, 2, 2):
        assert [success for success, _, _ in results] == [True, True, False, True, True]
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        assert unchanged
        assert results[2][1] is None


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_fp16_norm_is_of_the_unscaled_gradient_and_the_scale_changes_no_bit(optimizer):
    """Class bitwise: powers of two, gradients exact in fp16 under both scales.

    SGD sees a gradient that is unscaled by another scale than its own: one that has grown since.
    """
    runs = run_ranks(fp16, 2, 3, -1, 1, optimizer)
    other = run_ranks(fp16, 2, 3, -1, 1000, optimizer)
    for (a, scales_a, results_a, _), (b, scales_b, results_b, _) in zip(runs, other, strict=True):
        assert scales_a != scales_b
        assert results_a == results_b
        for name in a:
            assert a[name].dtype == torch.float16
            assert torch.equal(a[name], b[name])
