"""Every kind of matrix under tensor parallelism, in every mode, against one whole process.

Class *exact sums* where gradients are integers, *numerical* with power-law spectra: fp32
Newton-Schulz within 1e-5. Sizes divide by 2, 3 and 4 ranks; query groups do not.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import initial_values, relative
from tests.distributed.parallel_cases import (
    Spec,
    part_of,
    reference_parallel,
    train_parallel,
)
from tests.harness import run_ranks

MUON = {
    "optimizer": "muon",
    "lr": 0.05,
    "weight_decay": 0.1,
    "clip_grad": 0.0,
    "muon_fp32_matmul_prec": "highest",
}
MATRICES = {
    "tall_by_rows_weight": Spec((48, 24), tp_dim=0),
    "wide_by_rows_weight": Spec((24, 60), tp_dim=0),
    "wide_by_columns_weight": Spec((24, 48), tp_dim=1),
    "tall_by_columns_weight": Spec((60, 24), tp_dim=1),
    "square_weight": Spec((24, 24), tp_dim=1),
    "whole_weight": Spec((8, 24)),
    "conv_by_outputs_weight": Spec((24, 2, 3), tp_dim=0),
    "conv_by_inputs_weight": Spec((24, 12, 3, 2), tp_dim=1),
}
VIEWS = {
    "gate_up_weight": Spec((72, 24), tp_dim=0, blocks=(36, 36)),
    "together_weight": Spec((72, 24), tp_dim=0, blocks=(36, 36), split_blocks=False),
    "unequal_weight": Spec((60, 36), tp_dim=0, blocks=(36, 12)),
    "by_columns_weight": Spec((31, 24), tp_dim=1, blocks=(18, 9)),
    "whole_blocks_weight": Spec((31, 24), blocks=(18, 9)),
    "qkv_weight": Spec((48, 24), tp_dim=0, qkv=(12, 6, 6)),
    "qkv_long_weight": Spec((96, 12), tp_dim=0, qkv=(24, 12, 12)),
    "gated_weight": Spec((60, 24), tp_dim=0, qkv=(8, 8, 2, 2), logical_rows=40),
    "qkv_by_columns_weight": Spec((48, 24), tp_dim=1, qkv=(12, 6, 6)),
    "padded_weight": Spec((48, 24), tp_dim=0, logical_rows=41),
    "padded_by_columns_weight": Spec((48, 24), tp_dim=1, logical_rows=41),
    "stack_by_rows_weight": Spec((2, 36, 12), tp_dim=1, matrices=2),
    "stack_by_columns_weight": Spec((2, 12, 36), tp_dim=2, matrices=2),
    "flat_stack_weight": Spec((24, 12), tp_dim=1, matrices=2),
    "stacked_gate_up_weight": Spec((2, 48, 12), tp_dim=1, matrices=2, blocks=(24, 24)),
}
TOPOLOGIES = [(2, 2), (3, 3), (4, 4), (4, 2)]


def _train(specs, config, sizes, options):
    return train_parallel(specs, config, sizes, **options)


def check(specs, config, ranks, tensor, **options):
    runs = run_ranks(_train, ranks, specs, config, {"tensor": tensor}, options)
    options.pop("bucket_size", None)
    masters, stats = reference_parallel(specs, config, runs[0].facts["sizes"], **options)
    for run in runs:
        for (success, norm, _), (expected, _) in zip(run.results, stats, strict=True):
            assert success
            assert norm == pytest.approx(expected, rel=1e-5)
        for name, weight in run.weights[-1].items():
            expected = part_of(specs[name], masters[name], *run.facts["tensor"][name])
            assert relative(weight, expected) < 1e-5, name
        calls = run.facts["calls"]
        assert all(calls[name] == runs[0].facts["calls"][name] for name in ("dp", "grad_stats"))
    return runs


@pytest.mark.parametrize(("ranks", "tensor"), TOPOLOGIES)
@pytest.mark.parametrize("mode", ["owner", "duplicated", "distributed"])
@pytest.mark.parametrize("kind", ["integer", "power_law"])
def test_exact_modes_agree_with_one_process(mode, ranks, tensor, kind):
    config = {**MUON, "muon_tp_mode": mode, "clip_grad": 0.0 if kind == "integer" else 1.0}
    specs = {**MATRICES, **VIEWS}
    runs = check(specs, config, ranks, tensor, kind=kind, bucket_size=4000)
    done = sum(run.facts["orthogonalised"] for run in runs)
    parts = sum(len(spec.parts) for spec in specs.values())
    divided = sum(len(spec.parts) for spec in specs.values() if spec.tp_dim is not None)
    repeated = divided * (tensor - 1)
    assert done == parts + (0 if mode == "owner" else repeated)


PADDED = {name: spec for name, spec in VIEWS.items() if sum(map(len, spec.parts)) < spec.matrix[0]}


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("mode", ["owner", "duplicated", "distributed", "blockwise"])
def test_rows_of_no_matrix_stay_to_the_bit(mode, ranks, tensor):
    """Class bitwise: padding, and rows beyond the blocks, which have gradients, get no update."""
    config = {**MUON, "muon_tp_mode": mode, "weight_decay": 0.0}
    runs = run_ranks(_train, ranks, PADDED, config, {"tensor": tensor}, {"bucket_size": 2000})
    start = initial_values({name: spec.shape for name, spec in PADDED.items()})
    assert len(PADDED) == 6
    for run in runs:
        for name, weight in run.weights[-1].items():
            spec = PADDED[name]
            used = torch.zeros(spec.matrix[0], dtype=torch.bool)
            used[torch.tensor([row for part in spec.parts for row in part])] = True
            place = run.facts["tensor"][name]
            mask = used[:, None].expand(spec.matrix).reshape(spec.shape)
            before, mask = (part_of(spec, x, *place) for x in (start[name], mask))
            assert torch.equal(weight[~mask], before[~mask]), name
            assert not mask.any() or not torch.isclose(weight[mask], before[mask]).all(), name


HALF = {
    "fp16": ({"muon_dtype": torch.float16}, 1e-2),
    "bf16": ({"muon_fp32_matmul_prec": "medium"}, 5e-2),
}


@pytest.mark.parametrize("mode", ["owner", "duplicated", "distributed"])
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("ranks", [2, 3])
def test_exact_modes_in_half_precision(mode, precision, ranks):
    """Class numerical, of the update: inputs are kept in fp32, Gram matrices are summed in it."""
    settings, tolerance = HALF[precision]
    config = {**MUON, "muon_fp32_matmul_prec": "high", **settings, "weight_decay": 0.0}
    config |= {"muon_tp_mode": mode}
    specs = {**MATRICES, **VIEWS}
    options = {"kind": "integer", "steps": 1, "bucket_size": 4000}
    runs = run_ranks(_train, ranks, specs, config, {"tensor": ranks}, options)
    masters, _ = reference_parallel(specs, config, runs[0].facts["sizes"], steps=1)
    start = initial_values({name: spec.shape for name, spec in specs.items()})
    for run in runs:
        for name, weight in run.weights[-1].items():
            place = run.facts["tensor"][name]
            before = part_of(specs[name], start[name], *place)
            way = part_of(specs[name], masters[name], *place) - before
            error = float((weight - before - way).norm())
            assert error < tolerance * max(float(way.norm()), 1e-3), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_views_over_data_parallelism(ranks):
    """Rows cut the units anywhere; the specs lose their tensor parallelism."""
    runs = check({**MATRICES, **VIEWS}, MUON, ranks, 1, bucket_size=3000)
    assert sum(run.facts["orthogonalised"] for run in runs) == sum(
        len(spec.parts) for spec in {**MATRICES, **VIEWS}.values()
    )


def test_blockwise_orthogonalises_shards_apart_with_the_scale_of_the_whole():
    """Named as inexact: each square half by itself, times the scale of 48 x 24."""
    config = {**MUON, "muon_tp_mode": "blockwise", "muon_scale_mode": "shape_scaling"}
    name, sizes = "tall_by_rows_weight", {"dp": 1, "tp": 1}
    whole, halves = Spec((48, 24), tp_dim=0), Spec((48, 24), blocks=(24, 24))
    runs = run_ranks(_train, 2, {name: whole}, config, {"tensor": 2}, {"steps": 1})
    exact = reference_parallel({name: whole}, config, sizes, steps=1, mode="shape_scaling")[0]
    apart = reference_parallel({name: halves}, config, sizes, steps=1, mode="shape_scaling")[0]
    decayed = initial_values({name: whole.shape})[name] * (1 - config["lr"] * 0.1)
    scaled = decayed + 2**0.5 * (apart[name] - decayed)
    for run in runs:
        place = run.facts["tensor"][name]
        assert relative(run.weights[-1][name], part_of(whole, scaled, *place)) < 1e-5
        assert relative(run.weights[-1][name], part_of(whole, exact[name], *place)) > 1e-3
