"""Muon's variants against the papers' rules in fp64, on 1 to 4 ranks, and through a checkpoint."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import megatron_lw
from megatron_lw import dist_checkpointing
from tests import reference_rules as rules
from tests.distributed.cases import build, initial_values, integer_grads, mean_grads, relative
from tests.harness import run_ranks

SHAPES = {
    "a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (37,), "d_weight": (8, 3, 2),
    "e_weight": (64, 64),
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.2,
    "clip_grad": 0.0,
    "muon_fp32_matmul_prec": "highest",
}
CHOICES: dict[str, tuple[dict[str, Any], rules.Rule]] = {
    "muon": ({"optimizer": "muon", "muon_nesterov": True}, rules.muon(nesterov=True)),
    "normuon": (
        {"optimizer": "normuon", "muon_scale_mode": "unit_rms_norm", "adaptive_muon_beta2": 0.8},
        rules.normuon(mode="unit_rms_norm", beta2=0.8),
    ),
    "normuon, nesterov": (
        {"optimizer": "normuon", "muon_nesterov": True},
        rules.normuon(nesterov=True),
    ),
    "adamuon": ({"optimizer": "adamuon"}, rules.adamuon()),
    "adamuon, nesterov": (
        {"optimizer": "adamuon", "muon_nesterov": True, "adaptive_muon_eps": 1e-3},
        rules.adamuon(nesterov=True, eps=1e-3),
    ),
    "adaptive, adamuon": ({"optimizer": "adaptive_muon"}, rules.adaptive_muon("adamuon")),
    "adaptive, normuon": (
        {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
        rules.adaptive_muon("normuon"),
    ),
}
MODES = ("independent", "l2", "cautious")
STEPS = 3
# Where an element of O is about zero, sign or division by its own size doubles what rounding left.
TOLERANCE = {"adamuon": 2e-3, "adaptive, adamuon": 2e-3, "adamuon, nesterov": 2e-3}


def expected(choice, ranks, mode="decoupled", steps=STEPS):
    reference = rules.Stepped(
        weights={n: v for n, v in initial_values(SHAPES).items() if v.dim() > 1},
        rules={name: CHOICES[choice][1] for name in SHAPES},
        lr=CONFIG["lr"],
        decay=dict.fromkeys(SHAPES, 0.2),
        mode=mode,
    )
    for step in range(steps):
        reference.step(mean_grads("integer", SHAPES, ranks, step))
    return reference.weights


def step_all(ddp, optimizer, first, stop, mean_of=None):
    for step in range(first, stop):
        optimizer.zero_grad()
        if mean_of is None:
            grads = integer_grads(SHAPES, ddp.groups.dp.rank, step)
        else:
            grads = mean_grads("integer", SHAPES, mean_of, step)
        ddp(grads).backward()
        optimizer.step()
    optimizer.check(collectives=True)
    return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}


def child_of(optimizer):
    [child] = [c for c in optimizer.runtime.children if c.name not in ("adam", "lion", "sgd")]
    return child


def every_choice():
    found = {}
    for choice, mode in [*itertools.product(CHOICES, ["decoupled"]),
                         *itertools.product(["muon", "normuon"], MODES)]:  # fmt: skip
        config = {**CONFIG, **CHOICES[choice][0], "weight_decay_mode": mode}
        ddp, optimizer = build(SHAPES, config, bucket_size=1500)
        weights = step_all(ddp, optimizer, 0, STEPS)
        child = child_of(optimizer)
        owned = {(s.param, s.key): s.global_shape for s in child.owned_states()}
        found[choice, mode] = weights, child.name, owned, optimizer.routing_report()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_variant_equals_the_papers_rule(ranks):
    """Class numerical, fp32 against fp64: cut matrices, a convolution, four kinds of decay."""
    runs = run_ranks(every_choice, ranks)
    for choice, mode in runs[0]:
        tolerance = TOLERANCE.get(choice, 2e-5)
        for name, want in expected(choice, ranks, mode).items():
            start = initial_values(SHAPES)[name]
            for run in runs:
                weights, child, _, report = run[choice, mode]
                got = weights[name] - start
                assert relative(got, want - start) < tolerance, (choice, mode, name)
                assert child == CHOICES[choice][0]["optimizer"]
                assert child in report
    matrices = {name for name, shape in SHAPES.items() if len(shape) > 1}
    for choice, key in (("normuon", "second_moment"), ("adamuon", "second_moment")):
        owned = [run[choice, "decoupled"][2] for run in runs]
        assert sorted(name for each in owned for name in each) == sorted(
            (name, key) for name in matrices
        )
    shapes = {n: s for run in runs for (n, _), s in run["normuon", "decoupled"][2].items()}
    assert shapes == {name: (SHAPES[name][0],) for name in matrices}


def test_no_two_variants_agree():
    """Each does something of its own."""
    [run] = run_ranks(every_choice, 1)
    for one, other in itertools.combinations([key for key in run if key[1] == "decoupled"], 2):
        assert not torch.equal(run[one][0]["a_weight"], run[other][0]["a_weight"]), (one, other)


def saved(choice, folder):
    config = {**CONFIG, **CHOICES[choice][0]}
    ddp, optimizer = build(SHAPES, config, bucket_size=1500)
    step_all(ddp, optimizer, 0, 2)
    dist_checkpointing.save(folder, ddp, optimizer, step=2)
    return step_all(ddp, optimizer, 2, 4)


def resumed(choice, folder, mean_of):
    config = {**CONFIG, **CHOICES[choice][0]}
    ddp, optimizer = build(SHAPES, config, bucket_size=700, seed=7)
    dist_checkpointing.load(folder, ddp, optimizer)
    return step_all(ddp, optimizer, 2, 4, mean_of)


@pytest.mark.parametrize("choice", ["normuon", "adamuon", "adaptive, normuon"])
def test_second_moments_are_saved_and_go_to_other_owners(choice, tmp_path):
    """Class exact sums: saved on 2 ranks, resumed on 1 and on 3, fp32 Newton-Schulz."""
    whole = run_ranks(saved, 2, choice, str(tmp_path / "step"))[0]
    for ranks in (1, 3):
        for run in run_ranks(resumed, ranks, choice, str(tmp_path / "step"), 2):
            for name, want in whole.items():
                assert relative(run[name], want) < 1e-5, name


def in_bf16(choice):
    config = {**CONFIG, **CHOICES[choice][0], "muon_fp32_matmul_prec": "medium"}
    ddp, optimizer = build(SHAPES, config, bucket_size=1500)
    return step_all(ddp, optimizer, 0, 1, mean_of=1)


@pytest.mark.parametrize("choice", CHOICES)
def test_cutting_changes_no_bit_in_bf16(choice):
    """Class bitwise between 1 and 3 ranks: an update is rounded whether or not it travels."""
    [alone] = run_ranks(in_bf16, 1, choice)
    for run in run_ranks(in_bf16, 3, choice):
        for name, want in alone.items():
            assert torch.equal(run[name], want), name


def zeros(choice):
    ddp, optimizer = build(SHAPES, {**CONFIG, **CHOICES[choice][0], "weight_decay": 0.0})
    optimizer.zero_grad()
    ddp({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
    optimizer.step()
    return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}


def test_a_gradient_of_zeros_changes_nothing():
    """Class bitwise: no division of zero by zero."""
    for choice in CHOICES:
        [weights] = run_ranks(zeros, 1, choice)
        for name, want in initial_values(SHAPES).items():
            assert torch.equal(weights[name], want), (choice, name)


DIVIDED = {"a_weight": 1, "b_weight": 0, "e_weight": 0}


def divided(choice, tensor):
    """Shards of this rank, trained with the shards of the mean gradients."""
    groups = megatron_lw.ParallelGroups.create(tensor=tensor)

    def part(name, value):
        dim = DIVIDED.get(name)
        return value if dim is None else value.chunk(tensor, dim)[groups.tp.rank].contiguous()

    start = {name: part(name, value) for name, value in initial_values(SHAPES).items()}
    ddp, optimizer = build(
        {name: tuple(value.shape) for name, value in start.items()},
        {**CONFIG, **CHOICES[choice][0]},
        bucket_size=600,
        tags={name: {"tp_dim": dim} for name, dim in DIVIDED.items()},
        groups=groups,
    )
    with torch.no_grad():
        for name, value in start.items():
            ddp.module.get_parameter(name).copy_(value)
    optimizer.reload_model_params()
    for step in range(STEPS):
        optimizer.zero_grad()
        grads = integer_grads(SHAPES, groups.dp.rank, step)
        ddp({name: part(name, grad) for name, grad in grads.items()}).backward()
        optimizer.step()
    optimizer.check(collectives=True)
    owned = [(s.param, s.key, s.global_shape) for s in child_of(optimizer).owned_states()]
    weights = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
    return groups.tp.rank, weights, owned


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("choice", ["normuon", "adaptive, normuon", "adamuon"])
def test_shards_of_tensor_parallelism_are_refined_as_one_matrix(choice, ranks):
    """Class numerical: norms and means are those of the whole, states are at one owner."""
    want = expected(choice, ranks // 2)
    runs = run_ranks(divided, ranks, choice, 2)
    for tp_rank, weights, _ in runs:
        for name, whole in want.items():
            dim = DIVIDED.get(name)
            mine = whole if dim is None else whole.chunk(2, dim)[tp_rank]
            start = initial_values(SHAPES)[name]
            before = start if dim is None else start.chunk(2, dim)[tp_rank]
            tolerance = TOLERANCE.get(choice, 2e-5)
            assert relative(weights[name] - before, mine - before) < tolerance, name
    owned = [key for _, _, found in runs for key in found]
    assert len(owned) == len(set(owned)) == len(want)


def stacked() -> tuple[dict[Any, Any], Any]:
    shapes = {"g_experts": (3, 16, 24), "h_weight": (16, 24)}
    config = {**CONFIG, "optimizer": "normuon"}
    groups = megatron_lw.ParallelGroups.single()
    ddp, optimizer = build(shapes, config, tags={"g_experts": {"matrices": 3}}, groups=groups)
    optimizer.zero_grad()
    ddp(integer_grads(shapes, 0, 0)).backward()
    optimizer.step()
    states = child_of(optimizer).owned_states()
    return {(s.param, s.start): s.global_shape for s in states}, optimizer.routing_report()


def test_a_stack_has_a_second_moment_for_each_matrix():
    """Exact: boxes of one logical tensor."""
    boxes, _ = stacked()
    assert boxes == {
        **{("g_experts", (i, 0)): (3, 16) for i in range(3)},
        ("h_weight", (0,)): (16,),
    }
