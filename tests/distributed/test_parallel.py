"""Tensor, expert, pipeline and sequence parallelism and FP32 replicas against one whole process.

Class *exact sums* where gradients are integers and the clip is off: element-wise children bitwise,
fp32 Newton-Schulz within 1e-5; class *numerical* with power-law spectra and the clip on.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.cases import relative
from tests.distributed.parallel_cases import Spec, part_of, reference_parallel, train_parallel
from tests.harness import run_ranks

MUON = {
    "optimizer": "muon",
    "lr": 0.05,
    "weight_decay": 0.1,
    "clip_grad": 0.0,
    "muon_fp32_matmul_prec": "highest",
    "log_num_zeros_in_grad": True,
}
TENSOR = {
    "col_weight": Spec((48, 24), tp_dim=0),
    "row_weight": Spec((24, 48), tp_dim=1),
    "gate_up_weight": Spec((64, 24), tp_dim=0, blocks=(32, 32)),
    "qkv_weight": Spec((64, 24), tp_dim=0, blocks=(32, 16, 16)),
    "router_weight": Spec((8, 24)),
    "col_bias": Spec((48,), tp_dim=0),
    "norm_weight": Spec((24,)),
    "sp_norm_weight": Spec((24,), sequence_parallel=True),
    "emb_weight": Spec((40, 24), tp_dim=0, embedding=True),
}
EXPERTS = {
    "dense_weight": Spec((24, 24), tp_dim=0),
    "dense_bias": Spec((24,)),
    "e0_fc1_weight": Spec((48, 24), tp_dim=0, expert=0),
    "e0_fc1_bias": Spec((48,), tp_dim=0, expert=0),
    "e0_fc2_weight": Spec((24, 48), tp_dim=1, expert=0),
    "e0_fc2_bias": Spec((24,), expert=0),
    "e1_fc1_weight": Spec((48, 24), tp_dim=0, expert=1),
    "e1_fc1_bias": Spec((48,), tp_dim=0, expert=1),
    "e1_fc2_weight": Spec((24, 48), tp_dim=1, expert=1),
    "e1_fc2_bias": Spec((24,), expert=1),
}
STAGES = {
    "stem_weight": Spec((24, 24), stage=0),
    "emb_weight": Spec((30, 8), stage=None, tied="embedding", embedding=True),
    "tail_weight": Spec((30, 20), stage=1),
    "tail_bias": Spec((20,), stage=1),
}
REPLICAS = {
    "weight": Spec((24, 24), tp_dim=0),
    "fp32_weight": Spec((16, 24), keep_fp32=True),
    "fp32_bias": Spec((33,), keep_fp32=True),
}


def check(specs, config, sizes, ranks, **options):
    runs = run_ranks(_train, ranks, specs, config, sizes, options)
    actual = runs[0].facts["sizes"]
    reference_options = {k: v for k, v in options.items() if k in ("steps", "kind")}
    masters, stats = reference_parallel(specs, config, actual, **reference_options)
    exact = options.get("kind", "integer") == "integer" and not config["clip_grad"]
    for run in runs:
        for (success, norm, zeros), (expected_norm, expected_zeros) in zip(
            run.results, stats, strict=True
        ):
            assert success
            assert norm == pytest.approx(expected_norm, rel=1e-5)
            assert zeros == expected_zeros
        for name, weight in run.weights[-1].items():
            expected = part_of(specs[name], masters[name], *run.facts["tensor"][name])
            elementwise = len(specs[name].shape) == 1 or specs[name].embedding
            if exact and elementwise:
                assert torch.equal(weight, expected), name
            else:
                assert relative(weight, expected) < 1e-5, name
    return runs


def _train(specs, config, sizes, options):
    return train_parallel(specs, config, sizes, **options)


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("kind", ["integer", "power_law"])
def test_tensor_parallel(ranks, tensor, kind):
    config = {**MUON, "clip_grad": 0.0 if kind == "integer" else 1.0}
    sizes = {"tensor": tensor}
    runs = check(TENSOR, config, sizes, ranks, kind=kind, bucket_size=2000)
    matrices = 5
    assert sum(run.facts["orthogonalised"] for run in runs) == matrices, "nothing is repeated"
    calls = [run.facts["calls"] for run in runs]
    assert all(c == calls[0] for c in calls)


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (2, {"expert": 2}),
        (2, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
        (2, {"tensor": 2, "expert": 1, "expert_tensor": 2}),
        (4, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
        (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
        (4, {"tensor": 1, "expert": 2, "expert_tensor": 2}),
    ],
    ids=["E2", "T2E2ET1", "T2ET2", "D2T2E2ET1", "D2T2E2ET2", "D4E2ET2"],
)
def test_experts(ranks, sizes):
    """Experts with vectors and matrices, expert data-parallel size 1 and 2, ET not equal to T."""
    check(EXPERTS, MUON, sizes, ranks)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(2, {"pipeline": 2}), (4, {"pipeline": 2})], ids=["P2", "P2D2"]
)
def test_pipeline_with_a_tied_embedding(ranks, sizes):
    """The tied copies are summed, counted once and bitwise equal after every step."""
    runs = check(STAGES, MUON, sizes, ranks, steps=3)
    copies = [run.weights for run in runs]
    for step in range(3):
        for other in copies[1:]:
            assert torch.equal(copies[0][step]["emb_weight"], other[step]["emb_weight"])


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [(2, {}), (4, {"tensor": 2}), (4, {"expert": 2})],
    ids=["D2", "D2T2", "D4E2"],
)
def test_fp32_replicas(ranks, sizes):
    """Averaged over all ranks of the stage, counted once, stepped alike."""
    runs = check(REPLICAS, MUON, sizes, ranks)
    for name in ("fp32_weight", "fp32_bias"):
        for run in runs[1:]:
            assert torch.equal(runs[0].weights[-1][name], run.weights[-1][name])
