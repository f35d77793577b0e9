"""Against emerging-optimizers 0.3.0, where it is installed: it needs Python 3.12."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

from megatron_lw.optimizer.children.coefficients import COEFFICIENT_SETS, resolve_coefficients
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.whole import WholeChild
from tests.distributed.cases import build, initial_values, integer_grads, mean_grads, relative
from tests.distributed.test_whole import load, save
from tests.harness import run_ranks

emerging = pytest.importorskip("emerging_optimizers")

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (7,), "d_weight": (17, 17)}
CONFIG: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "adam_beta2": 0.95}
NAMED = {"lion": {"betas": (0.9, 0.99)}, "laprop": {}, "polargrad": {"momentum": 0.9}}
STEPS = 4


def uncompiled() -> None:
    """Leave its functions as they are written: a compiler would take longer than all the steps.

    Their decorators import the compiler, which is deprecated in parts.
    """
    torch._dynamo.config.disable = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for part in ("soap", "scalar_optimizers", "orthogonalized_optimizers"):
            importlib.import_module(f"emerging_optimizers.{part}")


def on_one_process(make, ranks: int):
    values = {n: v for n, v in initial_values(SHAPES).items() if v.dim() == 2}
    params = {n: torch.nn.Parameter(v) for n, v in values.items()}
    optimizer = make(list(params.values()))
    for step in range(STEPS):
        grads = mean_grads("integer", SHAPES, ranks, step)
        for name, param in params.items():
            param.grad = grads[name].clone()
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


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
    expected = on_one_process(soap(), ranks)
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
        ), 2,
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
        lambda params: made(params, lr=0.02, weight_decay=0.1, **NAMED[name]), 2
    )
    for run in runs:
        for key, want in expected.items():
            assert torch.equal(run["weights"][key], want), key


@pytest.mark.parametrize("name", sorted({*COEFFICIENT_SETS} - {"aol"}))
@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48)], ids=str)
def test_newton_schulz_equals_theirs(name, shape):
    """Class numerical, fp32; of `aol` they leave out the scaling of rows that belongs to it."""
    uncompiled()
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    for steps in (1, 3, 5, 10):
        x = torch.randn(shape)
        theirs = newton_schulz(x, steps=steps, coefficient_type=name)
        for iteration in ("standard", "gram"):
            coefficients = resolve_coefficients(name, steps)
            ours = NewtonSchulz(coefficients, dtype=torch.float32, iteration=iteration)(x)
            assert relative(ours, theirs) < (1e-3 if name == "cans" else 1e-4), (steps, iteration)
