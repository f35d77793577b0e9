"""Newton-Schulz, scale and steps of Muon against those of emerging-optimizers 0.3.0."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw.optimizer.children.coefficients import (
    COEFFICIENT_SETS,
    CoefficientSet,
    resolve_coefficients,
)
from megatron_lw.optimizer.children.muon import SCALE_MODES, scale_factor
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from tests.distributed.cases import build, initial_values, power_law_grads, relative
from tests.emerging.theirs import on_one_process, uncompiled
from tests.harness import run_ranks
from tests.megatron import needs

needs.emerging()

SHAPES = {
    "tall_weight": (48, 20), "wide_weight": (20, 48), "square_weight": (32, 32),
    "long_weight": (16, 96), "b_bias": (7,),
}  # fmt: skip
LAYOUT = [(name, dim) for name in SHAPES if name != "b_bias" for dim in (0, 1)]
MUON: dict[str, Any] = {"optimizer": "muon", "lr": 0.02, "clip_grad": 0.0}
STEPS = 4


@pytest.mark.parametrize("name", sorted({*COEFFICIENT_SETS} - {"aol"}))
@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48)], ids=str)
def test_newton_schulz_equals_theirs(name: str, shape: tuple[int, int]) -> None:
    """Class numerical, fp32."""
    uncompiled()
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    for steps in (1, 3, 5, 10):
        x = torch.randn(shape)
        theirs = newton_schulz(x, steps=steps, coefficient_type=name)
        for iteration in ("standard", "gram"):
            coefficients = resolve_coefficients(name, steps)
            ours = NewtonSchulz(coefficients, dtype=torch.float32, iteration=iteration)(x)
            assert relative(ours, theirs) < (1e-3 if name == "cans" else 1e-4), (steps, iteration)


@pytest.mark.parametrize("shape", [(64, 64), (48, 160), (160, 48)], ids=str)
def test_aol_without_its_scaling_of_rows_equals_theirs(shape: tuple[int, int]) -> None:
    """Class numerical, fp32: they leave out the scaling that belongs to the set."""
    uncompiled()
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    for steps in (1, 4, 5):
        x = torch.randn(shape)
        theirs = newton_schulz(x, steps=steps, coefficient_type="aol")
        bare = CoefficientSet(triples=resolve_coefficients("aol", steps).triples)
        assert relative(NewtonSchulz(bare, dtype=torch.float32)(x), theirs) < 1e-4, steps
        assert relative(
            NewtonSchulz(resolve_coefficients("aol", steps), dtype=torch.float32)(x), theirs
        ) > (1e-2)


@pytest.mark.parametrize("name", ["simple", "quintic", "polar_express"])
@pytest.mark.parametrize("shape", [(520, 520), (64, 64), (48, 160), (160, 48)], ids=str)
def test_newton_schulz_in_bf16_is_as_near_to_fp64_as_theirs(
    name: str, shape: tuple[int, int]
) -> None:
    """Class numerical: they normalise in fp32 and we in bf16, as torch.optim.Muon does."""
    uncompiled()
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz
    from emerging_optimizers.utils import fp32_matmul_precision

    coefficients = resolve_coefficients(name, 5)
    x = torch.randn(shape)
    exact = NewtonSchulz(coefficients, dtype=torch.float64)(x.double())
    with fp32_matmul_precision("medium"):
        theirs = newton_schulz(x, steps=5, coefficient_type=name)
    ours = NewtonSchulz(coefficients)(x)
    assert relative(ours, exact) < 1.5 * relative(theirs, exact) + 1e-3
    assert relative(ours, theirs) < 0.05


@pytest.mark.parametrize("mode", SCALE_MODES)
def test_scales_equal_theirs(mode: str) -> None:
    """Class bitwise."""
    from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

    for shape in ((4, 9), (9, 4), (768, 3072), (3072, 768), (1152, 1536), (7, 7)):
        assert scale_factor(*shape, mode) == get_muon_scale_factor(*shape, mode=mode)


def shards_of_both(mode: str, coefficients: str) -> dict[tuple[str, int], tuple[Any, Any]]:
    """Of each matrix, divided along each dimension: our first update and their result."""
    uncompiled()
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz_tp

    groups = megatron_lw.ParallelGroups.create(tensor=2)
    grads = power_law_grads(SHAPES, 0, 0)
    parts = {
        f"{name}_{dim}": grads[name].chunk(2, dim)[groups.tp.rank].contiguous()
        for name, dim in LAYOUT
    }
    ddp, optimizer = build(
        {name: tuple(part.shape) for name, part in parts.items()},
        {**MUON, "lr": 1.0, "weight_decay": 0.0, "muon_scale_mode": "spectral",
         "muon_fp32_matmul_prec": "highest", "muon_tp_mode": mode,
         "muon_coefficient_type": coefficients},
        tags={f"{name}_{dim}": {"tp_dim": dim} for name, dim in LAYOUT},
        groups=groups,
    )  # fmt: skip
    with torch.no_grad():
        for param in ddp.module.parameters():
            param.zero_()
    optimizer.reload_model_params()
    optimizer.zero_grad()
    ddp(parts).backward()
    optimizer.step()
    found = {}
    for name, dim in LAYOUT:
        weight = ddp.module.get_parameter(f"{name}_{dim}").detach()
        theirs = newton_schulz_tp(
            parts[f"{name}_{dim}"],
            steps=5,
            coefficient_type=coefficients,
            tp_group=groups.tp.handle,
            partition_dim=dim,
            tp_mode="distributed" if mode == "distributed" else "duplicated",
        )
        found[name, dim] = -weight / max(SHAPES[name]) ** 0.5, theirs.contiguous()
    return found


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
@pytest.mark.parametrize("mode", ["owner", "duplicated", "distributed"])
def test_shards_of_tensor_parallelism_equal_theirs(mode: str, coefficients: str) -> None:
    """Class numerical, fp32, 1e-5: on 2 ranks, along the long side, the short one, and a square."""
    for run in run_ranks(shards_of_both, 2, mode, coefficients):
        assert len(run) == len(LAYOUT)
        for place, (ours, theirs) in run.items():
            assert relative(ours, theirs) < 1e-5, place


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as both have it": ({}, {}),
    "nesterov": ({"muon_nesterov": True}, {"nesterov": True}),
    "simple": ({"muon_coefficient_type": "simple"}, {"coefficient_type": "simple"}),
    "polar express": (
        {"muon_coefficient_type": "polar_express", "muon_num_ns_steps": 8},
        {"coefficient_type": "polar_express", "num_ns_steps": 8},
    ),
    "unit rms": (
        {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2},
        {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.2},
    ),
    "shape": ({"muon_scale_mode": "shape_scaling"}, {"scale_mode": "shape_scaling"}),
    "independent": (
        {"weight_decay_mode": "independent"},
        {"weight_decay_method": "independent"},
    ),
    "l2": ({"weight_decay_mode": "l2"}, {"weight_decay_method": "l2"}),
}
PRECISIONS = {"highest": 5e-5, "medium": 0.02}


def every_choice() -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    found = {}
    for precision in PRECISIONS:
        for choice, (settings, _) in CHOICES.items():
            config = {**MUON, "weight_decay": 0.1, "muon_fp32_matmul_prec": precision, **settings}
            ddp, optimizer = build(SHAPES, config, bucket_size=1500)
            for step in range(STEPS):
                optimizer.zero_grad()
                ddp(power_law_grads(SHAPES, ddp.groups.dp.rank, step)).backward()
                optimizer.step()
            found[choice, precision] = {
                n: p.detach().clone() for n, p in ddp.module.named_parameters()
            }
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_of_muon_equal_theirs(ranks: int) -> None:
    """Class numerical: four steps, relative to the way that the weights have gone."""
    uncompiled()
    from emerging_optimizers.orthogonalized_optimizers import Muon

    runs = run_ranks(every_choice, ranks)
    start = initial_values(SHAPES)
    for (choice, precision), _ in runs[0].items():
        options = {"weight_decay": 0.1, "fp32_matmul_prec": precision, **CHOICES[choice][1]}
        theirs = on_one_process(
            lambda params, options=options: Muon(params, lr=0.02, momentum=0.95, **options),
            SHAPES, ranks, STEPS, "power_law",
        )  # fmt: skip
        for run in runs:
            for name, want in theirs.items():
                got = run[choice, precision][name] - start[name]
                way = want - start[name]
                assert relative(got, way) < PRECISIONS[precision], (choice, precision, name)
