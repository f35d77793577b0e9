"""Overlap on equals overlap off. Class *bitwise*, on 2 and 3 ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import megatron_lw
from tests.harness import expect_failure_on_all, run_ranks
from tests.late_gather import LateGather

CONFIG = {"optimizer": "muon", "lr": 0.02, "clip_grad": 1.0, "bf16": True}


class Wild(nn.Module):
    """Modules run in another order every step, twice or not at all; weights used from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = torch.bfloat16
        self.stem = nn.Linear(16, 16, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(16, 16, dtype=dtype) for _ in range(4))
        self.unused = nn.Linear(64, 64, dtype=dtype)
        self.loose = nn.ParameterDict({"w": nn.Parameter(torch.randn(16, 16, dtype=dtype) * 0.1)})
        self.borrowed = nn.Linear(16, 16, dtype=dtype)
        self.root_scale = nn.Parameter(torch.ones(16, dtype=dtype))
        self.norm = nn.LayerNorm(16, dtype=dtype)

    def forward(
        self, x: torch.Tensor, order: list[int], reentrant: bool | None = None
    ) -> torch.Tensor:
        x = functional.linear(x, self.borrowed.weight, self.borrowed.bias)
        x = self.stem(x * self.root_scale)
        for index in order:
            block = self.blocks[index]
            y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            x = x + y
        return self.norm(x @ self.loose["w"]).float().square().mean()


def orders(step: int, rank: int) -> list[int]:
    """Not all blocks, some twice, another order on every step and rank."""
    choices = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 2], [2, 3], [0, 1, 2, 3, 0]]
    return choices[(step + rank) % len(choices)]


def train(overlap, steps, disturb, bucket_size=300, chosen=None):
    groups = megatron_lw.ParallelGroups.create()
    config = megatron_lw.DDPConfig(
        bucket_size=bucket_size, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    ddp = megatron_lw.DistributedDataParallel(Wild(), groups, config)
    settings = megatron_lw.OptimizerConfig(**{**CONFIG, **(chosen or {})}, on_nonfinite="skip")
    optimizer = megatron_lw.get_megatron_optimizer(settings, [ddp])
    rank = groups.dp.rank
    history, early, pending, evaluations = [], 0, 0, []
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 16, generator=generator).bfloat16()
        with ddp.no_sync():
            loss = ddp(x, orders(step, rank))
            (loss / 2).backward()
        pending += sum(p.outstanding for p in ddp.publishers)
        if disturb and step % 7 == 3:
            loss = loss * float("nan")
        loss = ddp(x + 1, orders(step + 1, rank))
        if disturb and step % 7 == 3:
            loss = loss * float("nan")
        (loss / 2).backward()
        early += sum(bucket.handle.outstanding for bucket in ddp.buckets)
        if disturb and step % 5 == 2:
            ddp.start_param_sync()
        history.append(optimizer.step())
        if disturb and step % 3 == 1:
            with torch.no_grad():
                evaluations.append(float(ddp(x, [0, 1, 2, 3])))
        if disturb and step % 4 == 1:
            ddp.start_param_sync()
            ddp.finish_param_sync()
    weights = {n: p.clone() for n, p in ddp.state_dict().items()}
    return weights, history, evaluations, early, pending, len(ddp.buckets)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("disturb", [False, True])
def test_fifty_steps_equal_the_synchronous_path(ranks, disturb):
    """With evaluation, skips and explicit syncs in between; reduces start during backward."""
    plain = run_ranks(train, ranks, False, 50, disturb)
    overlapped = run_ranks(train, ranks, True, 50, disturb)
    for a, b in zip(plain, overlapped, strict=True):
        for name, weight in a[0].items():
            assert torch.equal(weight, b[0][name]), name
        assert repr(a[1]) == repr(b[1])
        assert a[2] == b[2]
        assert a[3] == 0 and b[3] > 0, "a reduce is outstanding when backward has ended"
        assert a[4] == 0 and b[5] >= 4
        assert not disturb or any(not success for success, _, _ in a[1])


OWNERS = {
    "whole": {"optimizer": "whole", "whole_optimizer": "torch.optim:NAdam"},
    "normuon": {"optimizer": "normuon"},
    "adamuon": {"optimizer": "adamuon"},
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("choice", OWNERS)
def test_children_with_states_at_owners_equal_the_synchronous_path(ranks, choice):
    """Also with skips and evaluation between: gradients and masters travel before the gather."""
    plain = run_ranks(train, ranks, False, 12, True, 300, OWNERS[choice])
    overlapped = run_ranks(train, ranks, True, 12, True, 300, OWNERS[choice])
    start = {n: p.detach() for n, p in Wild().state_dict().items()}
    for a, b in zip(plain, overlapped, strict=True):
        for name, weight in a[0].items():
            assert torch.equal(weight, b[0][name]), name
        assert not torch.equal(a[0]["stem.weight"], start["stem.weight"])
        assert repr(a[1]) == repr(b[1]) and a[2] == b[2]
        assert a[3] == 0 and b[3] > 0 and b[5] >= 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations(reentrant):
    """Reentrant checkpoints deliver a weight's gradient once for each run, others once in all."""
    plain = run_ranks(recomputed, 2, False, reentrant)
    overlapped = run_ranks(recomputed, 2, True, reentrant)
    for a, b in zip(plain, overlapped, strict=True):
        for name, weight in a[0].items():
            assert torch.equal(weight, b[0][name]), name
        assert a[1] == 0 and b[1] > 0


def recomputed(overlap, reentrant):
    """Blocks run twice under checkpoints."""
    groups = megatron_lw.ParallelGroups.create()
    config = megatron_lw.DDPConfig(bucket_size=300, overlap_grad_reduce=overlap)
    ddp = megatron_lw.DistributedDataParallel(Wild(), groups, config)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    early = 0
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        ddp(x.requires_grad_(), [0, 0, 1, 1, 2, 2, 3, 3], reentrant).backward()
        early += sum(bucket.handle.outstanding for bucket in ddp.buckets)
        optimizer.step()
    return {n: p.detach() for n, p in ddp.module.named_parameters()}, early


def gather_events():
    """What is outstanding when each block of the forward after a step begins."""
    groups = megatron_lw.ParallelGroups.create()
    config = megatron_lw.DDPConfig(bucket_size=200, overlap_param_gather=True)
    ddp = megatron_lw.DistributedDataParallel(Wild(), groups, config)
    optimizer = megatron_lw.get_megatron_optimizer(megatron_lw.OptimizerConfig(**CONFIG), [ddp])
    x = torch.randn(8, 16).bfloat16()
    optimizer.zero_grad()
    ddp(x, [0, 1, 2, 3]).backward()
    optimizer.step()
    after_step = sum(p.outstanding for p in ddp.publishers)
    seen = []
    for block in ddp.module.blocks:
        block.register_forward_hook(
            lambda *_: seen.append(sum(p.outstanding for p in ddp.publishers))
        )
    ddp(x, [0, 1, 2, 3])
    left = sum(p.outstanding for p in ddp.publishers)
    ddp.module.state_dict()
    return after_step, seen, left, sum(p.outstanding for p in ddp.publishers), len(ddp.publishers)


def test_forward_waits_for_what_it_reads_and_nothing_else():
    for after_step, seen, left, after_state_dict, publishers in run_ranks(gather_events, 2):
        assert after_step == publishers
        assert 0 < seen[0] < publishers, "some buckets are still on their way while a block runs"
        assert seen == sorted(seen, reverse=True)
        assert left >= 1, "the unused module's bucket was not waited for"
        assert after_state_dict == 0


class Borrowing(nn.Module):
    """Reads the weights of a layer that is never called, beside a block with kernels of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lent = nn.Linear(16, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(functional.linear(x, self.lent.weight, self.lent.bias))


READERS = {
    "past the wrapper": lambda ddp, x: ddp.module(x).detach(),
    "in evaluation": lambda ddp, x: evaluated(ddp, x),
    "parameters": lambda ddp, x: torch.cat([p.detach().flatten() for p in ddp.parameters()]),
}


def evaluated(ddp, x):
    ddp.eval()
    with torch.no_grad():
        return ddp(x)


def read_late(overlap, reader):
    """What a reader finds right after a step whose gathers arrive only when waited for."""
    groups = megatron_lw.ParallelGroups.create()
    config = megatron_lw.DDPConfig(bucket_size=200, overlap_param_gather=overlap)
    ddp = megatron_lw.DistributedDataParallel(Borrowing(), groups, config)
    settings = megatron_lw.OptimizerConfig(optimizer="adam", lr=0.1)
    optimizer = megatron_lw.get_megatron_optimizer(settings, [ddp])
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(groups.dp.rank))
    ddp(x).square().sum().backward()
    optimizer.step()
    delayed = len(LateGather.delay(ddp.publishers))
    return READERS[reader](ddp, x), delayed


@pytest.mark.parametrize("reader", READERS)
def test_readers_outside_of_training_wait_too_and_find_the_same_bits(reader):
    """NaN was read past the wrapper; in evaluation torch's kernels for inference were left out."""
    plain = run_ranks(read_late, 2, False, reader)
    overlapped = run_ranks(read_late, 2, True, reader)
    for (there, none), (here, delayed) in zip(plain, overlapped, strict=True):
        assert none == 0 and delayed >= 2
        assert torch.equal(there, here)


def contradicting_flags():
    groups = megatron_lw.ParallelGroups.create()
    ddp = megatron_lw.DistributedDataParallel(Wild(), groups, megatron_lw.DDPConfig())
    settings = megatron_lw.OptimizerConfig(**CONFIG, overlap_param_gather=True)
    megatron_lw.get_megatron_optimizer(settings, [ddp])


def test_overlap_flags_that_contradict_each_other():
    expect_failure_on_all(contradicting_flags, 2, megatron_lw.ConfigError, "overlap_param_gather")
