"""Reports of sections A, E and G about weights that were read before, or without, their gather.

Class *bitwise*: overlap on equals overlap off. E1, E4, E5 and E9 are in `test_quantised`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import megatron_lw
from tests.distributed.cases import integer_grads
from tests.distributed.test_overlap import CONFIG as WILD_CONFIG
from tests.distributed.test_overlap import Wild
from tests.harness import run_ranks
from tests.late_gather import LateGather
from tests.regressions.given import MUON, Tensors, backward, build, weights

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def experts_of_their_own(ddp_config: dict[str, Any]) -> tuple[Tensors, int]:
    rank = megatron_lw.ParallelGroups.create(expert=4).ep.rank
    shapes = {"a_weight": (16, 24), f"e{rank}_weight": (24, 16), f"e{rank}_bias": (24,)}
    values = {name: torch.ones(shape) for name, shape in shapes.items()}
    tags = {name: {"expert": True} for name in shapes if name[0] == "e"}
    config = {**MUON, "clip_grad": 1.0}
    built = build(values, config=config, tags=tags, ddp_config=ddp_config, expert=4)
    for step in range(4):
        backward(built, integer_grads(shapes, rank, step))
        built[1].step()
    return weights(built), built[0].groups.expert_dp.size


def test_a10_overlap_with_expert_data_parallelism_of_one_rank() -> None:
    """NVIDIA/Megatron-LM#4138: a special case for one rank left a list unset: D4 E4."""
    plain = run_ranks(experts_of_their_own, 4, {})
    overlapped = run_ranks(experts_of_their_own, 4, {**OVERLAP, "bucket_size": 100})
    for (a, size), (b, _) in zip(plain, overlapped, strict=True):
        assert size == 1
        for name, weight in a.items():
            assert torch.equal(weight, b[name]), name
            assert not torch.equal(weight, torch.ones(weight.shape)), name


FLAGS = ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32")


def toy_regression() -> list[tuple[float, float]]:
    """First and last loss of a small network for every combination of flags."""
    found = []
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    targets = torch.sin(inputs @ torch.randn(8, 1, generator=generator))
    groups = megatron_lw.ParallelGroups.create()
    mine = slice(groups.dp.rank, None, groups.dp.size)
    for flags in product([False, True], repeat=len(FLAGS)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)).bfloat16()
        config = megatron_lw.DDPConfig(**dict(zip(FLAGS, flags, strict=True)), bucket_size=100)
        ddp = megatron_lw.DistributedDataParallel(model, groups, config)
        settings = megatron_lw.OptimizerConfig(optimizer="muon", lr=0.01, bf16=True)
        optimizer = megatron_lw.get_megatron_optimizer(settings, [ddp])
        losses = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = functional.mse_loss(ddp(inputs[mine].bfloat16()).float(), targets[mine])
            loss.backward()
            success, _, _ = optimizer.step()
            losses.append(float(loss.detach()) if success else float("inf"))
        found.append((losses[0], losses[-1]))
    return found


def test_e12_fifty_steps_learn_under_every_combination_of_flags() -> None:
    """NVIDIA/Megatron-LM#663: the loss stayed where it was, and every step was skipped."""
    for runs in run_ranks(toy_regression, 2):
        assert len(runs) == 2 ** len(FLAGS)
        assert all(first > 0.3 and last < 0.1 for first, last in runs), runs


def late_gathers(mixed: bool, late: bool) -> tuple[float, Tensors, list[int]]:
    """The loss of the forward after a step, and how often each gather was waited for."""
    groups = megatron_lw.ParallelGroups.create()
    model = Wild()
    if mixed:
        model.norm.float()
    config = megatron_lw.DDPConfig(bucket_size=None if mixed else 200, overlap_param_gather=late)
    ddp = megatron_lw.DistributedDataParallel(model, groups, config)
    optimizer = megatron_lw.get_megatron_optimizer(
        megatron_lw.OptimizerConfig(**WILD_CONFIG), [ddp]
    )
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(groups.dp.rank)).bfloat16()
    optimizer.zero_grad()
    ddp(x, [0, 1, 2, 3]).backward()
    optimizer.step()
    handles = LateGather.delay(ddp.publishers)
    loss = float(ddp(x, [3, 1, 0, 2]).detach())
    waited = [handle.waited for handle in handles]
    return loss, {n: p.clone() for n, p in ddp.state_dict().items()}, waited


@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "two dtypes"])
def test_e16_g7_every_reader_waits_for_the_gather_of_what_it_reads(mixed: bool) -> None:
    """NVIDIA/Megatron-LM#6388, and read from its code: a prefetch or a shared handle did not."""
    plain = run_ranks(late_gathers, 2, mixed, False)
    delayed = run_ranks(late_gathers, 2, mixed, True)
    for (loss, weight, _), (late_loss, late_weight, waited) in zip(plain, delayed, strict=True):
        assert loss == late_loss
        assert waited.count(1) >= 2 and max(waited) == 1
        assert mixed or waited.count(0) >= 1, "the unused module's gather is not waited for"
        for name in weight:
            assert torch.equal(weight[name], late_weight[name]), name
