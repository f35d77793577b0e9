"""The rows of docs/limits.md that no other test shows. One process, no torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatron_lw
from megatron_lw import ConfigError, StateError
from megatron_lw.optimizer.describe import ParamInfo
from megatron_lw.optimizer.matrix_view import matrix_view
from tests.distributed.cases import build, initial_values, integer_grads, relative
from tests.reference import Reference, Settings

SINGLE = megatron_lw.ParallelGroups.single()
MUON = {"optimizer": "muon", "lr": 0.05, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
SHAPES = {"a_weight": (24, 40), "b_bias": (40,)}

Built = tuple[megatron_lw.DistributedDataParallel, megatron_lw.LayerWiseDistributedOptimizer]


def wrapped(module: nn.Module, **settings: Any) -> Built:
    ddp = megatron_lw.DistributedDataParallel(module, SINGLE)
    config = megatron_lw.OptimizerConfig(**{"lr": 0.05, "clip_grad": 0.0, **settings})
    return ddp, megatron_lw.get_megatron_optimizer(config, [ddp])


def backward(ddp: megatron_lw.DistributedDataParallel, grads: dict[str, torch.Tensor]) -> None:
    ddp.zero_grad_buffer()
    ddp(grads).backward()


def weights(ddp: megatron_lw.DistributedDataParallel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def trained(shapes: dict[str, Any], tags: dict[str, Any] | None = None, steps: int = 2) -> Any:
    ddp, optimizer = build(shapes, MUON, tags=tags, groups=SINGLE)
    for step in range(steps):
        backward(ddp, integer_grads(shapes, 0, step))
        optimizer.step()
    return weights(ddp)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
@pytest.mark.filterwarnings("ignore:Complex modules")
def test_weights_of_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"parameter '(bias|weight)'.*{str(dtype)[6:]}"):
        wrapped(nn.Linear(4, 4).to(dtype))


def test_a_parameter_on_meta_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ConfigError, match="meta device"):
        wrapped(layers)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_its_forward_rewrites_is_refused(kind: type[nn.Module]) -> None:
    """torch steps from the rows that were scaled down in place; masters would not know of them."""
    with pytest.raises(ConfigError, match=r"module 'table' has max_norm = 0\.5.*drop max_norm"):
        wrapped(nn.ModuleDict({"table": kind(8, 4, max_norm=0.5), "b": nn.Linear(4, 4)}))
    frozen = kind(8, 4, max_norm=0.5).requires_grad_(False)
    wrapped(nn.ModuleDict({"table": frozen, "b": nn.Linear(4, 4)}))


@pytest.mark.parametrize(
    ("shape", "tags"),
    [
        ((4, 6, 8), {"matrices": 4, "tp_dim": 0}),
        ((24, 8), {"matrices": 4, "tp_dim": 0}),
        ((8, 4, 3, 3), {"tp_dim": 2}),
    ],
)
def test_shards_that_are_no_rows_or_columns_are_refused(
    shape: tuple[int, ...], tags: dict[str, Any]
) -> None:
    """Decided from facts alone: a parameter as one of two tensor-parallel ranks would hold it."""
    info = ParamInfo(
        name="a", local_name="a", chunk=0, dtype="float32", local_shape=shape, global_shape=shape,
        boxes=(), role="matrix", **tags,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="use_muon=False"):
        matrix_view(info)


def test_gradients_are_not_all_reduced() -> None:
    ddp, _ = build(SHAPES, MUON, groups=SINGLE)
    with pytest.raises(ConfigError, match="force_all_reduce=True"):
        megatron_lw.finalize_model_grads([ddp], force_all_reduce=True)


def test_wrappers_and_groups_of_others_are_refused() -> None:
    config = megatron_lw.OptimizerConfig(lr=0.1)
    with pytest.raises(ConfigError, match=r"wrapped in megatron_lw\.DistributedDataParallel"):
        megatron_lw.get_megatron_optimizer(config, [nn.DataParallel(nn.Linear(4, 4))])
    ddp = megatron_lw.DistributedDataParallel(nn.Linear(4, 4), SINGLE)
    others = megatron_lw.ParallelGroups.single()
    with pytest.raises(ConfigError, match="pg_collection is not the ParallelGroups"):
        megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=others)


def test_state_dict_is_refused() -> None:
    ddp, optimizer = build(SHAPES, MUON, groups=SINGLE)
    with pytest.raises(StateError, match="sharded checkpoints"):
        optimizer.state_dict()
    with pytest.raises(StateError, match="sharded checkpoints"):
        optimizer.load_state_dict({})
    assert set(ddp.state_dict()) == set(SHAPES), "weights are saved under the model's own names"


def test_a_closure_is_refused_and_changes_nothing() -> None:
    """Class bitwise."""
    ddp, optimizer = build(SHAPES, MUON, groups=SINGLE)
    before = weights(ddp)
    backward(ddp, integer_grads(SHAPES, 0, 0))
    closure: Any = lambda: 0.0  # noqa: E731
    with pytest.raises(ConfigError, match="before step"):
        optimizer.step(closure)
    assert all(torch.equal(value, before[name]) for name, value in weights(ddp).items())
    assert optimizer.step()[0]


def test_a_sparse_gradient_is_stepped_as_a_dense_one() -> None:
    """Class bitwise; a row that was not looked up decays all the same."""
    tables = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(10, 8, sparse=sparse)
        start = table.weight.detach().clone()
        ddp, optimizer = wrapped(table, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.tensor([1, 3, 1])).square().sum().backward()
            optimizer.step()
        tables.append(table.weight.detach().clone())
    assert torch.equal(*tables)
    torch.testing.assert_close(tables[0][0], start[0] * (1 - 0.05 * 0.5) ** 2)


def test_a_convolution_is_one_matrix_of_its_output_channels() -> None:
    """Class exact sums: 4-D against the reference's matrix; depthwise against its Adam."""
    shapes = {"a_conv": (8, 4, 3, 3), "b_depthwise": (8, 1, 3, 3)}
    settings = {
        "a_conv": Settings(lr=0.05, weight_decay=0.01, matrix=(8, 36)),
        "b_depthwise": Settings(lr=0.05, weight_decay=0.01),
    }
    reference = Reference(initial_values(shapes), settings)
    for step in range(2):
        reference.step(integer_grads(shapes, 0, step))
    ours = trained(shapes)
    assert relative(ours["a_conv"], reference.masters["a_conv"]) < 1e-5
    assert torch.equal(ours["b_depthwise"], reference.masters["b_depthwise"])


@pytest.mark.parametrize("shape", [(24, 40), (2, 12, 40)])
def test_a_stack_is_stepped_as_its_matrices(shape: tuple[int, ...]) -> None:
    """Class exact sums: both halves against the reference's two matrices."""
    stack, halves = {"a_stack": shape}, {"a_first": (12, 40), "a_second": (12, 40)}
    settings = dict.fromkeys(halves, Settings(lr=0.05, weight_decay=0.01, matrix=(12, 40)))
    values = initial_values(stack)["a_stack"].view(2, 12, 40)
    reference = Reference(dict(zip(halves, values, strict=True)), settings)
    for step in range(2):
        grads = integer_grads(stack, 0, step)["a_stack"].view(2, 12, 40)
        reference.step(dict(zip(halves, grads, strict=True)))
    ours = trained(stack, {"a_stack": {"matrices": 2}})["a_stack"].view(2, 12, 40)
    for half, name in zip(ours, halves, strict=True):
        assert relative(half, reference.masters[name]) < 1e-5


def test_what_is_not_noticed() -> None:
    """Two things that docs/limits.md warns of; a check of either would fail this test."""
    ddp, optimizer = wrapped(nn.Linear(8, 8, bias=False), weight_decay=0.0)
    start = ddp.module.weight.detach().clone()
    with torch.no_grad():
        ddp.module.weight.zero_()
    optimizer.zero_grad()
    assert optimizer.step()[0]
    assert torch.equal(ddp.module.weight, start), "the masters win"

    _, optimizer = wrapped(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), optimizer="muon")
    children = {r.info.name: r.child for r in optimizer.runtime.routing.routes}
    assert children == {"0.weight": "adam", "1.weight": "muon", "1.bias": "adam"}
