"""Tensor, expert, pipeline and sequence parallelism and FP32 replicas against one whole process.

Class *exact sums* where gradients are integers and the clip is off: element-wise children bitwise,
fp32 Newton-Schulz within 1e-5; class *numerical* with power-law spectra and the clip on.
"""

from __future__ import annotations

import pytest
import torch

import megatron_lw
from tests.distributed.cases import Bag, relative
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
    matrices = 8
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


def replica_gradients(sizes):
    """FP32 replicas with gradients 1, 2, 3, 4, then two clipped steps with unequal components."""
    groups = megatron_lw.ParallelGroups.create(**sizes)
    model = Bag({"fp32_bias": (5,)}, torch.float32)
    megatron_lw.annotate(model.fp32_bias, keep_fp32=True)
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    config = megatron_lw.OptimizerConfig(lr=0.1, clip_grad=1.0)
    optimizer = megatron_lw.get_megatron_optimizer(config, [ddp])
    rank = groups.replicas.rank
    optimizer.zero_grad()
    ddp({"fp32_bias": torch.full((5,), rank + 1.0)}).backward()
    megatron_lw.finalize_model_grads([ddp])
    reduced = [float(b.grad_row[0]) for b in ddp.buckets if list(b.row_slots())]
    optimizer.step()
    for step in range(2):
        optimizer.zero_grad()
        ddp({"fp32_bias": torch.arange(5.0) * (rank + 1) + step}).backward()
        norm = optimizer.step()[1]
    return reduced, norm, model.fp32_bias.detach()


@pytest.mark.parametrize(
    "sizes",
    [{}, {"expert": 2}, {"tensor": 2}, {"context": 2}, {"context": 4}],
    ids=["D4", "D4E2", "D2T2", "D2C2", "C4"],
)
def test_fp32_replicas_average_over_every_rank_and_stay_equal(sizes):
    """Class bitwise: gradients 1, 2, 3, 4 end at 2.5; after two clipped steps nothing differs."""
    results = run_ranks(replica_gradients, 4, sizes)
    assert [value for reduced, _, _ in results for value in reduced] == [2.5]
    assert all(norm > 1.0 for _, norm, _ in results), "the clip is at work"
    for _, _, weight in results[1:]:
        assert torch.equal(weight, results[0][2])
