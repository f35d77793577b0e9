"""Reports of section D: which matrix is orthogonalised: whole ones, without padding.

Class *numerical*: within 1e-5 of one process. Every view in every mode is in
`tests/distributed/test_matrix_views.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_lw
from tests.distributed.cases import relative
from tests.harness import run_ranks
from tests.regressions.given import MUON, Tensors, backward, build, weights

SIDES = (48, 24)


def gradient(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Singular values that fall as 1/k."""
    g = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    return u @ torch.diag(s.max() / torch.arange(1, len(s) + 1)) @ v


def divided(tensor: int, mode: str, dim: int, expert: bool) -> tuple[Tensors, str]:
    """A matrix and a fused one, cut along `dim`; two steps."""
    sizes = {"expert_tensor": tensor} if expert else {"tensor": tensor}
    groups = megatron_lw.ParallelGroups.create(**sizes)
    group = groups.expert_tp if expert else groups.tp
    tags: dict[str, dict[str, Any]] = {
        "a_weight": {"tp_dim": dim, "expert": expert},
        "qkv_weight": {"tp_dim": dim, "expert": expert, "qkv": (4, 2, 2)},
    }
    parts = {}
    for name in tags:
        parts[name] = gradient(name, SIDES).chunk(tensor, dim)[group.rank].contiguous()
    config = {**MUON} if mode == "default" else {**MUON, "muon_tp_mode": mode}
    values = {name: torch.zeros(part.shape) for name, part in parts.items()}
    built = build(values, config=config, tags=tags, **sizes)
    for sign in (1.0, -0.5):
        backward(built, {name: sign * part for name, part in parts.items()})
        built[1].step()
    return weights(built), built[1].config.muon_tp_mode


def put_together(results: list[tuple[Tensors, str]], dim: int) -> Tensors:
    return {n: torch.cat([found[n] for found, _ in results], dim) for n in results[0][0]}


@pytest.mark.parametrize("expert", [False, True], ids=["dense", "expert"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_d3_the_update_does_not_depend_on_tensor_parallelism(dim: int, expert: bool) -> None:
    """DeepSpeed#8437, ML#6380, PaddleFleet#1703, DeepSpeed#8384: each shard was taken alone."""
    whole = put_together(run_ranks(divided, 1, 1, "default", dim, expert), dim)
    for tensor in (2, 3):
        results = run_ranks(divided, tensor, tensor, "default", dim, expert)
        for name, weight in put_together(results, dim).items():
            assert relative(weight, whole[name]) < 1e-5, (name, tensor)
    apart = run_ranks(divided, 2, 2, "blockwise", dim, expert)
    assert results[0][1] != "blockwise" and apart[0][1] == "blockwise"
    assert relative(put_together(apart, dim)["a_weight"], whole["a_weight"]) > 0.1


def padded(rows: int, tensor: int, with_padding: bool, pad: float) -> tuple[Tensors, Any]:
    """A matrix of six rows, alone or at the head of eight; junk in the gradient's padding."""
    groups = megatron_lw.ParallelGroups.create(tensor=tensor)
    real = gradient("padded", (rows, 12))
    grad = torch.cat([real, torch.full((rows // 3, 12), pad)]) if with_padding else real
    tag: dict[str, Any] = {"logical_rows": rows} if with_padding else {}
    if tensor > 1:
        tag["tp_dim"] = 0
        grad = grad.chunk(tensor, 0)[groups.tp.rank].contiguous()
    config = {**MUON, "clip_grad": 1e-3}
    values = {"a_weight": torch.zeros(grad.shape), "b_bias": torch.zeros(3)}
    built = build(values, config=config, tags={"a_weight": tag}, tensor=tensor)
    result = None
    for _ in range(2):
        backward(built, {"a_weight": grad, "b_bias": torch.ones(3)})
        result = built[1].step()
    return weights(built), result


@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (3, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("rows", [6, 24])
def test_d4_alignment_rows_enter_no_product_and_stay_zero(
    ranks: int, tensor: int, rows: int
) -> None:
    """NVIDIA/Megatron-LM#6740: junk of 1e3 in two rows of padding was orthogonalised too."""
    [(plain, expected)] = run_ranks(padded, 1, rows, 1, False, 0.0)
    results = run_ranks(padded, ranks, rows, tensor, True, 1e3)
    parts = [found["a_weight"] for found, _ in results]
    weight = torch.cat(parts[:tensor]) if tensor > 1 else parts[0]
    assert weight.shape[0] == rows + rows // 3
    assert relative(weight[:rows], plain["a_weight"]) < 1e-5
    assert torch.equal(weight[rows:], torch.zeros(rows // 3, 12))
    for found, (success, norm, zeros) in results:
        assert success and zeros == expected[2]
        assert norm == pytest.approx(expected[1], rel=1e-6)
        assert relative(found["b_bias"], plain["b_bias"]) < 1e-5
