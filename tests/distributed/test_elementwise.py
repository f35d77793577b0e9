"""Adam, Lion and SGD under the four kinds of weight decay, on 1 to 3 ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import megatron_lw
from tests import reference_rules as rules
from tests.distributed.cases import build, initial_values, mean_grads, relative, train
from tests.harness import run_ranks

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (37,), "d_weight": (8, 3, 2)}
CONFIG = {"lr": 0.05, "weight_decay": 0.3, "clip_grad": 0.0}
RULES = {"adam": rules.adam, "lion": rules.lion, "sgd": rules.sgd}
MODES = ("decoupled", "independent", "l2", "cautious")
STEPS = 4


def expected(child, mode, ranks):
    reference = rules.Stepped(
        weights=initial_values(SHAPES),
        rules={name: RULES[child]() for name in SHAPES},
        lr=CONFIG["lr"],
        decay={name: 0.0 if len(shape) == 1 else 0.3 for name, shape in SHAPES.items()},
        mode=mode,
    )
    for step in range(STEPS):
        reference.step(mean_grads("integer", SHAPES, ranks, step))
    return reference.weights


def all_modes() -> dict[tuple[str, str], Any]:
    """Weights after some steps of every child and mode; one pool run for all."""
    found = {}
    for child, mode in itertools.product(RULES, MODES):
        config = {**CONFIG, "optimizer": child, "weight_decay_mode": mode}
        found[child, mode] = train(SHAPES, config, bucket_size=600, steps=STEPS).weights[-1]
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_child_and_decay_equals_the_papers_rule(ranks):
    """Class numerical, fp32 against fp64; no two modes of a child agree."""
    for run in run_ranks(all_modes, ranks):
        for (child, mode), weights in run.items():
            for name, weight in weights.items():
                want = expected(child, mode, ranks)[name]
                assert relative(weight, want) < 2e-6, (child, mode, name)
        for child in RULES:
            for one, other in itertools.combinations(MODES, 2):
                assert not torch.equal(run[child, one]["a_weight"], run[child, other]["a_weight"])


def against_torch(make, config):
    """Our weights and torch's, on one process."""
    ddp, optimizer = build(SHAPES, {**CONFIG, **config}, groups=megatron_lw.ParallelGroups.single())
    names = list(SHAPES)
    params = [torch.nn.Parameter(value) for value in initial_values(SHAPES).values()]
    groups = [{"params": [p], "weight_decay": 0.0 if p.dim() == 1 else 0.3} for p in params]
    theirs = make(groups)
    for step in range(STEPS):
        grads = mean_grads("power_law", SHAPES, 1, step)
        optimizer.zero_grad()
        ddp(grads).backward()
        optimizer.step()
        for name, param in zip(names, params, strict=True):
            param.grad = grads[name]
        theirs.step()
    for name, param in zip(names, params, strict=True):
        yield name, ddp.module.get_parameter(name).detach(), param.detach()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torchs_bitwise(momentum):
    """Class bitwise: decay inside the gradient, as torch has it."""
    config = {"optimizer": "sgd", "sgd_momentum": momentum, "decoupled_weight_decay": False}
    pairs = against_torch(lambda g: torch.optim.SGD(g, lr=0.05, momentum=momentum), config)
    assert all(torch.equal(ours, theirs) for _, ours, theirs in pairs)


def test_adam_with_l2_equals_torchs_adam():
    """Class numerical: `torch.optim.Adam`, whose fused kernel ends differently on tails."""
    config = {"optimizer": "adam", "decoupled_weight_decay": False}
    for _, ours, theirs in against_torch(lambda g: torch.optim.Adam(g, lr=0.05), config):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def mixed() -> tuple[dict[str, str], list[str], Any]:
    overrides: dict[megatron_lw.ParamKey, megatron_lw.ParamGroupOverride] = {
        megatron_lw.ParamKey(name="a_*"): {"optimizer": "lion", "weight_decay_mode": "cautious"},
        megatron_lw.ParamKey(name="c_*"): {"optimizer": "sgd", "wd_mult": 0.0},
        megatron_lw.ParamKey(name="d_*"): {"lr_mult": 0.5},
    }
    config = {**CONFIG, "optimizer": "muon", "muon_scalar_optimizer": "sgd"}
    ddp, optimizer = build(SHAPES, config, bucket_size=600, config_overrides=overrides)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(mean_grads("integer", SHAPES, 1, step)).backward()
        optimizer.step()
    optimizer.check()
    children = {route.info.name: route.child for route in optimizer.runtime.routing.routes}
    names = sorted(f"{child.name} {child.state_keys}" for child in optimizer.runtime.children)
    groups = {group["name"]: group["lr"] for group in optimizer.param_groups}
    weights = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
    return children, names, (groups, weights, optimizer.routing_report())


def test_children_are_chosen_per_group_by_overrides():
    """Class numerical: each parameter by the rule of its own child."""
    for children, names, (groups, weights, report) in run_ranks(mixed, 2):
        assert children == {"a_weight": "lion", "b_weight": "muon", "c_bias": "sgd",
                            "d_weight": "muon"}  # fmt: skip
        assert names == ["lion ('exp_avg',)", "muon ('momentum',)", "sgd ('momentum_buffer',)"]
        assert groups["muon/dense/lr_mult=0.5"] == 0.025
        assert "lion/dense/weight_decay_mode=cautious" in report
        assert relative(weights["a_weight"], expected("lion", "cautious", 1)["a_weight"]) < 2e-6
        assert relative(weights["c_bias"], expected("sgd", "decoupled", 1)["c_bias"]) < 2e-6
