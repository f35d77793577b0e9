"""The choices that Newton-Schulz has, through the configuration, on 1 to 3 ranks."""

from __future__ import annotations

import pytest
import torch

import megatron_lw
from megatron_lw.errors import ConfigError
from tests.distributed.cases import build, initial_values, mean_grads, relative, train
from tests.harness import run_ranks
from tests.reference import Reference, Settings, orthogonalise

SHAPES = {
    "a_weight": (24, 96), "b_weight": (96, 24), "c_weight": (24, 90), "d_weight": (40, 40),
    "e_weight": (300, 260), "f_bias": (37,),
}  # fmt: skip
CONFIG = {"optimizer": "muon", "lr": 0.05, "weight_decay": 0.0, "clip_grad": 0.0}
EXACT = {**CONFIG, "muon_fp32_matmul_prec": "highest"}
OWN = ((2.5, -2.4, 0.9), (1.9, -1.2, 0.3))
CHOICES = {
    "gram": ({**EXACT, "muon_iteration": "gram"}, 1e-5),
    "padded": ({**EXACT, "muon_pad_batches": True}, 1e-5),
    "both": ({**EXACT, "muon_iteration": "gram", "muon_pad_batches": True}, 1e-5),
    "fp16": ({**CONFIG, "muon_iteration": "gram", "muon_dtype": torch.float16}, 5e-3),
    "bf16": (CONFIG, 0.05),
}


def updates(run):
    start = initial_values(SHAPES)
    return {name: start[name] - weight for name, weight in run.weights[0].items()}


def expected(ranks, **muon):
    settings = {n: Settings(lr=0.05, matrix=s if len(s) == 2 else None, **muon)
                for n, s in SHAPES.items()}  # fmt: skip
    reference = Reference(initial_values(SHAPES), settings)
    reference.step(mean_grads("power_law", SHAPES, ranks, 0))
    start = initial_values(SHAPES)
    return {name: start[name] - master for name, master in reference.masters.items()}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_gives_the_update_of_the_reference(choice):
    """Class numerical: one step on 1 and 3 ranks, power-law gradients, cut matrices present."""
    config, tolerance = CHOICES[choice]
    for ranks in (1, 3):
        runs = run_ranks(train_one, ranks, config)
        assert (runs[0].facts["pieces"] > runs[0].facts["matrices"]) == (ranks > 1)
        for run in runs:
            for name, update in updates(run).items():
                assert relative(update, expected(ranks)[name]) < tolerance, name


def test_the_choices_are_not_one_and_the_same():
    """Class bitwise: each changes bits of what it is for, and of nothing else."""
    plain = run_ranks(train_one, 1, EXACT)[0].weights[0]
    long = {"a_weight", "b_weight", "c_weight"}
    for choice, changed in (("gram", long), ("padded", long)):
        weights = run_ranks(train_one, 1, CHOICES[choice][0])[0].weights[0]
        assert {n for n in SHAPES if not torch.equal(weights[n], plain[n])} <= changed
        assert any(not torch.equal(weights[n], plain[n]) for n in changed)


def test_coefficients_of_ones_own():
    """Class numerical: cycled triples; 1e-4, as a small update is read off weights of about 1."""
    config = {**EXACT, "muon_coefficient_type": "custom", "muon_coefficients": OWN,
              "muon_num_ns_steps": 3, "muon_scale_mode": "unit_rms_norm"}  # fmt: skip
    update = updates(run_ranks(train_one, 2, config)[0])
    for name, shape in SHAPES.items():
        if len(shape) == 2:
            mean = mean_grads("power_law", SHAPES, 2, 0)[name]
            plain = orthogonalise(0.05 * mean, (OWN[0], OWN[1], OWN[0]))
            want = 0.05 * (shape[0] / shape[1]) ** 0.5 * plain
            assert relative(update[name], want) < 1e-4, name


@pytest.mark.parametrize("exponent", [-20, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tiny_and_huge_gradients_give_the_update_of_their_scaled_selves(exponent, dtype):
    """Class numerical, through exchange and rows; fp16 would lose the momentum on the way."""
    config = {**CONFIG, "muon_dtype": dtype}
    for run in run_ranks(scaled, 2, config, 10.0**exponent):
        for name, (update, want) in run.items():
            assert relative(update, want) < {torch.float32: 1e-4}.get(dtype, 0.05), name


def test_gram_space_in_bf16_is_refused_at_construction():
    """The reason and the remedy are named."""
    with pytest.raises(ConfigError, match=r"'gram' is not safe in torch\.bfloat16.*float32"):
        build(SHAPES, {**CONFIG, "muon_iteration": "gram"},
              groups=megatron_lw.ParallelGroups.single())  # fmt: skip


def train_one(config):
    return train(SHAPES, config, bucket_size=12000, steps=1, kind="power_law")


def scaled(config, scale):
    """Updates from gradients times `scale`, and from the gradients themselves."""
    found = []
    for factor in (scale, 1.0):
        ddp, optimizer = build(SHAPES, {**config, "grad_norm_skip_threshold": float("inf")})
        optimizer.zero_grad()
        grads = mean_grads("power_law", SHAPES, 1, 0)
        ddp({name: grad * factor for name, grad in grads.items()}).backward()
        optimizer.step()
        start = initial_values(SHAPES)
        found.append({n: start[n] - p.detach() for n, p in ddp.module.named_parameters()})
    return {n: (found[0][n], found[1][n]) for n, s in SHAPES.items() if len(s) == 2}
