"""The distributed step against the plain reference, on 1 to 4 ranks.

Class *exact sums*: integer-valued gradients, clip off; element-wise children bitwise, fp32
Newton-Schulz within 1e-5 of the reference's fp64 one. Class *numerical* where named.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import initial_values, reference_run, relative, train
from tests.harness import run_ranks
from tests.reference import Settings

MUON = {
    "optimizer": "muon",
    "lr": 0.05,
    "weight_decay": 0.1,
    "clip_grad": 0.0,
    "muon_fp32_matmul_prec": "highest",
    "log_num_zeros_in_grad": True,
}
ADAM = {**MUON, "optimizer": "adam"}

MIXED = {
    "a_bias": (40,),
    "b_weight": (24, 40),
    "c_weight": (40, 24),
    "d_weight": (40, 40),
    "e_norm": (7,),
    "f_weight": (16, 200),
}


def settings(shapes, config, **muon):
    """What the reference is told for each parameter under the standard overrides."""
    result = {}
    for name, shape in shapes.items():
        decay = 0.0 if len(shape) == 1 else config["weight_decay"]
        matrix = shape if len(shape) == 2 and config["optimizer"] == "muon" else None
        result[name] = Settings(lr=config["lr"], weight_decay=decay, matrix=matrix, **muon)
    return result


def check(runs, shapes, masters, stats, *, matrices_bitwise=False):
    for run in runs:
        for step, weights in enumerate(run.weights):
            success, norm, zeros = run.results[step]
            assert success
            assert norm == pytest.approx(stats[step][0], rel=1e-6)
            assert zeros == stats[step][1] > 0
            for name, expected in masters[step].items():
                if len(shapes[name]) == 2 and not matrices_bitwise:
                    assert relative(weights[name], expected) < 1e-5, name
                else:
                    assert torch.equal(weights[name], expected), name
        for name, weight in run.weights[-1].items():
            assert torch.equal(weight, runs[0].weights[-1][name])
            assert not torch.equal(weight, initial_values(shapes)[name])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_and_adam_mixed_exact_sums(ranks, nesterov):
    """Cut and whole matrices, vectors, several buckets."""
    config = {**MUON, "muon_nesterov": nesterov}
    masters, stats = reference_run(MIXED, settings(MIXED, config, nesterov=nesterov), ranks=ranks)
    runs = run_ranks(_train, ranks, MIXED, config, 1500)
    check(runs, MIXED, masters, stats)
    facts = runs[0].facts
    assert facts["buckets"] >= 3
    assert (facts["pieces"] > facts["matrices"]) == (ranks > 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_adam_alone_bitwise(ranks):
    """Class exact sums, element-wise: bitwise, also for matrices that a row end cuts."""
    masters, stats = reference_run(MIXED, settings(MIXED, ADAM), ranks=ranks)
    runs = run_ranks(_train, ranks, MIXED, ADAM, 1500)
    check(runs, MIXED, masters, stats, matrices_bitwise=True)


@pytest.mark.parametrize(
    ("shapes", "ranks"),
    [
        ({"only_weight": (6, 5)}, 1),
        ({"only_weight": (6, 5)}, 4),
        ({"only_weight": (72, 8)}, 3),
        ({"a_weight": (8, 8), "b_weight": (8, 8)}, 4),
        ({"a_weight": (1, 8), "b_weight": (8, 1), "c_bias": (1,)}, 3),
    ],
    ids=["one-1", "one-4", "72x8-3", "two-4", "thin-3"],
)
def test_more_ranks_than_parameters(shapes, ranks):
    """Class exact sums; ranks whose rows hold nothing are present."""
    masters, stats = reference_run(shapes, settings(shapes, MUON), ranks=ranks, steps=2)
    runs = run_ranks(_train, ranks, shapes, MUON, None, 2)
    for run in runs:
        for step, weights in enumerate(run.weights):
            for name, expected in masters[step].items():
                assert relative(weights[name], expected) < 1e-5
        assert run.results[0][1] == pytest.approx(stats[0][0], rel=1e-6)
    if ranks > 1 and len(shapes) < 3 and sum(a * b for a, b in shapes.values()) <= 128:
        assert any(any(run.facts["empty_rows"]) for run in runs)


def test_ten_elements_on_four_ranks():
    """Class exact sums, bitwise: three rows are padding only, which is never counted as zeros."""
    shapes = {"v_bias": (10,)}
    masters, stats = reference_run(shapes, settings(shapes, ADAM), ranks=4)
    runs = run_ranks(_train, 4, shapes, ADAM)
    assert [run.facts["empty_rows"] for run in runs] == [[False], [True], [True], [True]]
    for run in runs:
        assert torch.equal(run.weights[-1]["v_bias"], masters[-1]["v_bias"])
        assert [r[2] for r in run.results] == [zeros for _, zeros in stats]


@pytest.mark.parametrize("ranks", [2, 3])
def test_clipping_numerical(ranks):
    """Class numerical: the norm is above the clip; power-law spectra."""
    config = {**MUON, "clip_grad": 1.0}
    masters, stats = reference_run(
        MIXED, settings(MIXED, config), ranks=ranks, kind="power_law", clip_grad=1.0
    )
    assert min(norm for norm, _ in stats) > 10.0
    runs = run_ranks(_train, ranks, MIXED, config, 1500, 3, "power_law")
    for run in runs:
        for step, weights in enumerate(run.weights):
            for name, expected in masters[step].items():
                assert relative(weights[name], expected) < 1e-5, name


@pytest.mark.parametrize("ranks", [2, 3])
def test_bf16_weights_are_the_rounded_masters(ranks):
    """Class exact sums: weights are bf16(master) on every rank, in mixed-dtype buckets too."""
    dtypes = {n: torch.float32 if n == "a_bias" else torch.bfloat16 for n in MIXED}
    values = {n: v.to(dtypes[n]).float() for n, v in initial_values(MIXED).items()}
    masters, _ = reference_run(MIXED, settings(MIXED, ADAM), ranks=ranks, values=values)
    runs = run_ranks(_train_bf16, ranks, MIXED, {**ADAM, "bf16": True}, dtypes)
    for run in runs:
        for step, weights in enumerate(run.weights):
            for name, expected in masters[step].items():
                assert weights[name].dtype == dtypes[name]
                assert torch.equal(weights[name], expected.to(dtypes[name])), (step, name)


def test_registration_order_changes_nothing():
    """Class bitwise."""
    forward = run_ranks(_train, 3, MIXED, MUON, 1500)
    backward = run_ranks(_train, 3, dict(reversed(MIXED.items())), MUON, 1500, 3, "integer", True)
    for a, b in zip(forward, backward, strict=True):
        for name in MIXED:
            assert torch.equal(a.weights[-1][name], b.weights[-1][name])


def test_every_rank_makes_the_same_calls():
    """One reduce-scatter and one gather a bucket, two all-to-alls a cut bucket."""
    runs = run_ranks(_train, 4, MIXED, MUON, 1500, 2)
    calls = [run.facts["calls"] for run in runs]
    assert all(c == calls[0] for c in calls)
    buckets = runs[0].facts["buckets"]
    assert calls[0]["dp"]["reduce_scatter"] == 2 * buckets
    assert calls[0]["dp"]["all_gather"] == 2 * buckets
    assert calls[0]["grad_stats"] == {"all_reduce": 2}
    assert 0 < calls[0]["dp"]["all_to_all"] <= 2 * 2 * buckets


def _train(shapes, config, bucket_size=None, steps=3, kind="integer", same_values=False):
    if same_values:
        return _train_in_another_order(shapes, config, bucket_size, steps)
    return train(shapes, config, bucket_size=bucket_size, steps=steps, kind=kind)


def _train_bf16(shapes, config, dtypes):
    return train(shapes, config, dtype=dtypes)


def _train_in_another_order(shapes, config, bucket_size, steps):
    """Register in the order of `shapes`, with the values and gradients of the sorted order."""
    from tests.distributed.cases import Run, build, integer_grads

    ordered = dict(sorted(shapes.items()))
    ddp, optimizer = build(shapes, config, bucket_size=bucket_size)
    with torch.no_grad():
        for name, value in initial_values(ordered).items():
            ddp.module.get_parameter(name).copy_(value)
    optimizer.reload_model_params()
    run = Run()
    for step in range(steps):
        optimizer.zero_grad()
        ddp(integer_grads(ordered, ddp.groups.dp.rank, step)).backward()
        run.results.append(optimizer.step())
        run.weights.append({n: p.detach().clone() for n, p in ddp.module.named_parameters()})
    return run
