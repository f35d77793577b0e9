"""Parameter groups: equal on every rank, driven by any scheduler, extended before step one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatron_lw
from tests.distributed.cases import build, initial_values, integer_grads
from tests.harness import run_ranks

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (100,), "emb_weight": (30, 8)}
CONFIG = {"optimizer": "muon", "lr": 0.02, "min_lr": 0.002, "weight_decay": 0.1, "clip_grad": 0.0}
SINGLE = megatron_lw.ParallelGroups.single()
TAGS = {"emb_weight": {"embedding": True}}


def group_lists(overrides):
    _, optimizer = build(SHAPES, CONFIG, tags=TAGS, config_overrides=overrides)
    return [
        ({k: v for k, v in group.items() if k != "params"}, len(group["params"]))
        for group in optimizer.param_groups
    ]


def test_groups_carry_what_schedulers_read_and_are_equal_on_all_ranks():
    lists = run_ranks(group_lists, 3, None)
    assert lists[0] == lists[1] == lists[2]
    assert [count for _, count in lists[0]] == [1, 1, 2]
    for group, _ in lists[0]:
        assert {"lr", "weight_decay", "max_lr", "min_lr", "wd_mult", "lr_mult"} <= set(group)
    by_name = {group["name"]: group for group, _ in lists[0]}
    assert by_name["adam/dense/wd_mult=0.0"]["weight_decay"] == 0.0
    assert by_name["muon/dense"]["weight_decay"] == 0.1


def test_decoupled_lr_reaches_the_embedding_only():
    overrides = None
    config = {**CONFIG, "decoupled_lr": 0.5, "decoupled_min_lr": 0.05}
    lists = run_ranks(_decoupled, 2, config, overrides)
    assert lists[0] == lists[1] == {"emb_weight": 0.5, "a_weight": 0.02, "c_bias": 0.02}


def _decoupled(config, overrides):
    ddp, optimizer = build(SHAPES, config, tags=TAGS, config_overrides=overrides)
    rates = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            rates[id(param)] = group["lr"]
    names = ("emb_weight", "a_weight", "c_bias")
    return {name: rates[id(ddp.module.get_parameter(name))] for name in names}


def scheduled(kind):
    """Two Muon and Adam rates under one torch scheduler; the first group's weights with lr 0."""
    overrides = {
        megatron_lw.ParamKey(name="a_*"): {"max_lr": 0.0},
        megatron_lw.ParamKey(name="c_*"): {"max_lr": 3e-4},
    }
    ddp, optimizer = build(SHAPES, CONFIG, tags=TAGS, config_overrides=overrides)
    schedulers = torch.optim.lr_scheduler
    scheduler = {
        "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 0.5**step),
        "multiplicative": lambda: schedulers.MultiplicativeLR(optimizer, lambda step: 0.5),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, T_max=2),
    }[kind]()
    before = ddp.module.a_weight.detach().clone()
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, ddp.groups.dp.rank, 0)).backward()
    optimizer.step()
    scheduler.step()
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    return rates, torch.equal(before, ddp.module.a_weight)


@pytest.mark.parametrize("kind", ["lambda", "multiplicative", "cosine"])
def test_torch_schedulers_drive_every_group_by_its_own_rate(kind):
    for rates, frozen_by_lr in run_ranks(scheduled, 2, kind):
        assert rates["muon/dense"] == pytest.approx(0.01)
        assert rates["adam/dense/max_lr=0.0003"] == pytest.approx(1.5e-4)
        assert rates["muon/dense/max_lr=0.0"] == 0.0
        assert frozen_by_lr


def cycled(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


@pytest.mark.parametrize(("child", "setting"), [("adam", "betas"), ("sgd", "momentum")])
def test_schedulers_cycle_the_momentum_that_every_group_has(child, setting):
    """As of torch's optimizers: torch looks in `defaults` for what it may cycle."""
    _, optimizer = build(SHAPES, {**CONFIG, "optimizer": child}, groups=SINGLE)
    theirs = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}[child](
        nn.Linear(2, 2).parameters(), lr=0.02, **({"momentum": 0.9} if child == "sgd" else {})
    )
    schedulers = [cycled(optimizer), cycled(theirs)]
    seen = set()
    for _ in range(5):
        ours = {group[setting] for group in optimizer.param_groups}
        assert ours == {theirs.param_groups[0][setting]}
        seen |= ours
        for each, scheduler in zip((optimizer, theirs), schedulers, strict=True):
            each.step()
            scheduler.step()
            each.zero_grad()
    assert len(seen) > 2


def test_a_momentum_that_some_groups_lack_is_not_cycled():
    _, optimizer = build(SHAPES, CONFIG, groups=SINGLE)
    with pytest.raises(ValueError, match="cycle_momentum"):
        cycled(optimizer)


class Decaying(nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in initial_values(SHAPES).items():
            self.register_parameter(name, nn.Parameter(value))
        self.emb_weight.requires_grad_(False)

    def forward(self, grads):
        return sum((p * grads[n]).sum() for n, p in self.named_parameters() if p.requires_grad)


def add_groups():
    groups = megatron_lw.ParallelGroups.create()
    model = Decaying()
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    config = megatron_lw.OptimizerConfig(**CONFIG)
    optimizer = megatron_lw.get_megatron_optimizer(config, [ddp])
    messages = {}

    def refused(what, group):
        try:
            optimizer.add_param_group(group)
        except megatron_lw.LayerWiseError as error:
            messages[what] = f"{type(error).__name__}: {error}"

    refused("frozen", {"params": [model.emb_weight]})
    refused("foreign", {"params": [nn.Parameter(torch.zeros(3))]})
    refused("unknown setting", {"params": [model.c_bias], "learning": 1.0})
    model.emb_weight.requires_grad_(True)
    optimizer.add_param_group(
        {"params": [model.emb_weight], "optimizer": "adam", "max_lr": 0.1, "wd_mult": 0.0}
    )
    refused("twice", {"params": [model.emb_weight], "max_lr": 0.2})
    names = [group["name"] for group in optimizer.param_groups]
    before = model.emb_weight.detach().clone()
    optimizer.zero_grad()
    ddp(integer_grads(SHAPES, groups.dp.rank, 0)).backward()
    optimizer.step()
    moved = (model.emb_weight.detach() - before).abs().max()
    refused("late", {"params": [model.c_bias]})
    return messages, names, float(moved)


def test_add_param_group_replans_before_the_first_step_and_is_refused_after():
    for messages, names, moved in run_ranks(add_groups, 2):
        assert "frozen" in messages["frozen"] and "emb_weight" in messages["frozen"]
        assert "(3,)" in messages["foreign"]
        assert "learning" in messages["unknown setting"]
        assert "emb_weight" in messages["twice"] and "two" in messages["twice"]
        assert messages["late"].startswith("StateError") and "first step" in messages["late"]
        assert names[-1] == "adam/dense/max_lr=0.1/wd_mult=0.0", "a new group follows the others"
        assert moved == pytest.approx(0.1, rel=1e-3), "Adam's first step has the size of lr"


def reports(path):
    _, optimizer = build(SHAPES, CONFIG, tags=TAGS, dump_param_to_param_group_map=path)
    optimizer.zero_grad()
    optimizer.step()
    return optimizer.routing_report(), optimizer.plan_report(), optimizer.timings()


def test_reports_and_timings(tmp_path):
    path = tmp_path / "groups.txt"
    results = run_ranks(reports, 2, str(path))
    for routing, plan, timings in results:
        for name in SHAPES:
            assert name in routing
        assert "embedding weight" in routing
        assert "muon" in plan
        stages = ["reduce", "stats", "clip", "adam", "muon", "agree", "publish"]
        assert list(timings) == stages
        assert all(seconds >= 0 for seconds in timings.values())
    assert path.read_text().strip() == results[0][0].strip()


def megatron_scheduler_surface():
    """What Megatron's scheduler and loop do to groups and optimizer."""
    _, optimizer = build(SHAPES, CONFIG, tags=TAGS)
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"] * 0.5 * group.get("lr_mult", 1.0)
        group["weight_decay"] = 0.3 * group.get("wd_mult", 1.0)
    calls = []
    original = optimizer.step
    optimizer.step = lambda: calls.append("wrapped") or original()
    optimizer.zero_grad(set_to_none=True)
    result = optimizer.step()
    return calls, result


def test_step_can_be_wrapped_and_groups_written():
    for calls, (success, norm, zeros) in run_ranks(megatron_scheduler_surface, 2):
        assert calls == ["wrapped"]
        assert success and norm == 0.0 and zeros is None
