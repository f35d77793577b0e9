"""One process, no torch.distributed, against optimizers that we did not write."""

from __future__ import annotations

import pytest
import torch

import megatron_lw
from tests.distributed.cases import build, integer_grads, power_law_grads

SHAPES = {"a_weight": (48, 96), "b_weight": (96, 48), "c_weight": (64, 64), "d_bias": (37,)}


def run_ours(config, steps, make_grads, dtype=torch.float32):
    ddp, optimizer = build(SHAPES, config, groups=megatron_lw.ParallelGroups.single(), dtype=dtype)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(make_grads(SHAPES, 0, step)).backward()
        optimizer.step()
    return {n: p.detach() for n, p in ddp.module.named_parameters()}


def run_torch(names, make, steps, make_grads):
    from tests.distributed.cases import initial_values

    params = {n: torch.nn.Parameter(v) for n, v in initial_values(SHAPES).items() if n in names}
    optimizer = make(list(params.values()))
    for step in range(steps):
        for name, param in params.items():
            param.grad = make_grads(SHAPES, 0, step)[name]
        optimizer.step()
    return {n: p.detach() for n, p in params.items()}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_equals_torch_adamw(decay):
    """Class exact sums: bitwise on whole multiples of 64 elements, else within 1e-6."""
    config = {"lr": 0.01, "weight_decay": decay, "clip_grad": 0.0, "adam_beta2": 0.95}
    ours = run_ours(config, 5, integer_grads)
    theirs = run_torch(
        SHAPES,
        lambda params: torch.optim.AdamW(
            [{"params": params[:3], "weight_decay": decay}, {"params": params[3:]}],
            lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True,
        ),
        5,
        integer_grads,
    )  # fmt: skip
    for name, shape in SHAPES.items():
        if torch.Size(shape).numel() % 64 == 0:
            assert torch.equal(ours[name], theirs[name]), name
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_equals_torch_muon_bitwise(nesterov, adjust):
    """Class bitwise: fp32 weights, bf16 Newton-Schulz, the options that both have."""
    mode = {"original": ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2)}[adjust]
    config = {
        "optimizer": "muon",
        "lr": 0.02,
        "weight_decay": 0.1,
        "clip_grad": 0.0,
        "muon_nesterov": nesterov,
        "muon_coefficient_type": "simple",
        "muon_scale_mode": mode[0],
        "muon_extra_scale_factor": mode[1],
    }
    matrices = [name for name, shape in SHAPES.items() if len(shape) == 2]
    ours = run_ours(config, 4, power_law_grads)
    theirs = run_torch(
        matrices,
        lambda params: torch.optim.Muon(
            params, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust
        ),
        4,
        power_law_grads,
    )
    for name in matrices:
        assert torch.equal(ours[name], theirs[name]), name


def test_update_has_singular_values_near_one():
    """A rank-one gradient moves the weight by one direction of size lr * scale."""
    config = {"optimizer": "muon", "lr": 0.5, "weight_decay": 0.0, "clip_grad": 0.0,
              "muon_scale_mode": "shape_scaling", "muon_fp32_matmul_prec": "highest"}  # fmt: skip
    left, right = torch.randn(48, 1), torch.randn(1, 96)

    def rank_one(shapes, rank, step):
        return {"a_weight": left @ right}

    before = run_ours(config, 0, rank_one)["a_weight"].clone()
    after = run_ours(config, 1, rank_one)["a_weight"]
    values = torch.linalg.svdvals((after - before) / 0.5)
    assert 0.9 < values[0] < 1.1
    assert values[1] < 1e-3


@pytest.mark.parametrize(
    ("coefficients", "steps", "lowest", "highest"),
    [
        ("simple", 5, 0.65, 1.21),
        ("quintic", 5, 0.95, 1.05),
        ("polar_express", 5, 0.85, 1.15),
        ("polar_express", 8, 0.99, 1.01),
        ("cans", 5, 0.85, 1.15),
        ("aol", 4, 0.95, 1.05),
        ("deepseekv4", 10, 0.99, 1.01),
    ],
)
def test_singular_values_of_the_first_update_lie_in_the_interval_of_the_set(
    coefficients, steps, lowest, highest
):
    """Class numerical: all of them, of Gaussian gradients, through the whole step in fp32."""
    config = {"optimizer": "muon", "lr": 0.5, "weight_decay": 0.0, "clip_grad": 0.0,
              "muon_scale_mode": "shape_scaling", "muon_fp32_matmul_prec": "highest",
              "muon_coefficient_type": coefficients, "muon_num_ns_steps": steps}  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    given = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}

    def gaussian(shapes, rank, step):
        return given

    before = {n: v.clone() for n, v in run_ours(config, 0, gaussian).items()}
    after = run_ours(config, 1, gaussian)
    for name, scale in (("a_weight", 1.0), ("b_weight", 2.0**0.5)):
        values = torch.linalg.svdvals((after[name] - before[name]) / (0.5 * scale))
        assert lowest < float(values.min()) <= float(values.max()) < highest, name
