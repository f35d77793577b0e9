"""Children against what emerging-optimizers 0.3.0 has of their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lw.optimizer.children.whole import WholeChild
from tests.distributed.cases import build, initial_values, integer_grads, mean_grads, relative
from tests.distributed.test_whole import load, save
from tests.emerging.theirs import on_one_process, uncompiled
from tests.harness import run_ranks
from tests.megatron import needs

needs.emerging()

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (7,), "d_weight": (17, 17)}
CONFIG: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "adam_beta2": 0.95}
NAMED = {"lion": {"betas": (0.9, 0.99)}, "laprop": {}, "polargrad": {"momentum": 0.9}}
STEPS = 4


def trained(config, first=0, stop=STEPS, saved=None, mean_of=None):
    uncompiled()
    ddp, optimizer = build(SHAPES, {**CONFIG, **config}, bucket_size=800)
    [child] = [c for c in optimizer.runtime.children if isinstance(c, WholeChild)]
    if saved is not None:
        load(child, saved, values_first=True)
        with torch.no_grad():
            for name, weight in saved[0]["weights"].items():
                ddp.module.get_parameter(name).copy_(weight)
        optimizer.reload_model_params()
    for step in range(first, stop):
        optimizer.zero_grad()
        grads = (
            integer_grads(SHAPES, ddp.groups.dp.rank, step)
            if mean_of is None
            else mean_grads("integer", SHAPES, mean_of, step)
        )
        ddp(grads).backward()
        optimizer.step()
    optimizer.check()
    part: dict[str, Any] = {}
    save(child, part)
    part["weights"] = {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    return part


def soap():
    uncompiled()
    from emerging_optimizers.soap import SOAP

    return lambda params: SOAP(
        params, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, use_kl_shampoo=True
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_soap_at_the_owner_equals_soap_on_one_process(ranks):
    """Class bitwise: whole gradient and master at the owner, in the layout of one process."""
    expected = on_one_process(soap(), SHAPES, ranks, STEPS)
    for run in run_ranks(trained, ranks, {"optimizer": "soap"}):
        for name, want in expected.items():
            assert torch.equal(run["weights"][name], want), name


def test_state_of_soap_goes_to_other_owners():
    """Class bitwise: two steps on 2 ranks, two more on 1 and on 3, against four on 2."""
    config = {"optimizer": "soap"}
    whole = run_ranks(trained, 2, config)[0]["weights"]
    saved = run_ranks(trained, 2, config, 0, 2)
    keys = {key for part in saved for _, key, *_ in part["boxes"]}
    assert keys == {"exp_avg", "exp_avg_sq", "L", "R", "Q_L", "Q_R"}
    assert all(v == {"step": 2} for part in saved for v in part["values"].values())
    for ranks in (1, 3):
        for run in run_ranks(trained, ranks, config, 2, STEPS, saved, 2):
            for name, want in whole.items():
                if want.dim() == 2:
                    assert torch.equal(run["weights"][name], want), name


@pytest.mark.parametrize("method", ["adamuon", "normuon"])
def test_adaptive_muon_equals_theirs(method):
    """Class numerical, fp32: the arithmetic is that of Megatron's `adaptive_muon`."""
    uncompiled()
    from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon

    config = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": method,
              "muon_fp32_matmul_prec": "highest"}  # fmt: skip
    expected = on_one_process(
        lambda params: AdaptiveMuon(
            params, lr=0.02, momentum=0.95, weight_decay=0.1, moment2_method=method,
            fp32_matmul_prec="highest", beta2=0.95,
        ), SHAPES, 2, STEPS,
    )  # fmt: skip
    start = initial_values(SHAPES)
    for run in run_ranks(weights_of, 2, config):
        for name, want in expected.items():
            assert relative(run[name] - start[name], want - start[name]) < 2e-3, name


def weights_of(config):
    ddp, optimizer = build(SHAPES, {**CONFIG, **config}, bucket_size=800)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(integer_grads(SHAPES, ddp.groups.dp.rank, step)).backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_of_the_registry(name):
    """Class bitwise."""
    config = {
        "optimizer": "whole",
        "whole_optimizer": name,
        "whole_settings": tuple(NAMED[name].items()),
    }
    runs = run_ranks(trained, 2, config)
    uncompiled()
    from emerging_optimizers import registry

    made = registry.get_optimizer_cls(name)
    expected = on_one_process(
        lambda params: made(params, lr=0.02, weight_decay=0.1, **NAMED[name]), SHAPES, 2, STEPS
    )
    for run in runs:
        for key, want in expected.items():
            assert torch.equal(run["weights"][key], want), key
