"""Weights of Transformer Engine whose bytes are views of our planes.

Class *bitwise* wherever bytes, scales or values are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import megatron_lw
from megatron_lw.fp8.quantise import dequantise
from megatron_lw.fp8.weights import TransformerEngineWeights
from megatron_lw.optimizer.held import held_buckets
from tests import te_stub
from tests.te_weights import BF16, FILL, RECIPES, inner, keep_initial, storage, theirs, weight

pytestmark = pytest.mark.skipif(not te_stub.present(), reason=te_stub.MISSING)

EVERY = pytest.mark.parametrize("kind", RECIPES)
SHAPES = ((64, 96), (160, 288), (32, 32))
DATA = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")


@pytest.fixture
def te() -> Iterator[Any]:
    with te_stub.installed() as module:
        yield module


def grouped(
    te: Any, kind: str, without: str = "", shapes: tuple[tuple[int, int], ...] = SHAPES
) -> TransformerEngineWeights:
    params = {f"w{i}": weight(te, kind, shape, without) for i, shape in enumerate(shapes)}
    return TransformerEngineWeights(params, RECIPES[kind])


def drawn(weights: TransformerEngineWeights, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(weights.planes.layout.data[-1], generator=generator).to(BF16)


def step(weights: TransformerEngineWeights, values: torch.Tensor) -> None:
    weights.quantise(values, "advance")
    weights.deliver()


def places(param: nn.Parameter) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in inner(param).items()}


def check(
    weights: TransformerEngineWeights, kind: str, planes: tuple[str, ...] = ("row", "col")
) -> None:
    """Its buffers, read by its own layout, hold what was quantised last."""
    for index, param in enumerate(weights.params.values()):
        for plane in planes:
            wanted = dequantise(weights.planes, BF16, plane, index)
            assert torch.equal(theirs(param, kind, plane), wanted) and wanted.any()


@EVERY
@pytest.mark.parametrize("without", ["", "row", "col"])
def test_no_byte_is_held_twice(te: Any, kind: str, without: str) -> None:
    """What lies beside both planes, each once, is scales and histories."""
    weights = grouped(te, kind, without)
    numel = sum(param.numel() for param in weights.params.values())
    buffers = [t for param in weights.params.values() for t in inner(param).values()]
    scales = [t for p in weights.params.values() for n, t in inner(p).items() if n not in DATA]
    ours = [t for name, t in weights.planes.tensors().items() if not name.endswith("data")]
    assert len(buffers) - len(scales) == len(SHAPES) * (1 if without else 2)
    held = storage([*weights.planes.tensors().values(), *buffers])
    assert held == 2 * numel + storage([*scales, *ours])


@EVERY
def test_a_weight_moves_with_its_bytes_and_stays_there(te: Any, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    params = {f"w{i}": weight(te, kind, shape) for i, shape in enumerate(SHAPES)}
    for param in params.values():
        for tensor in inner(param).values():
            tensor.view(torch.uint8).copy_(
                torch.randint(0, 120, tensor.view(torch.uint8).shape, generator=generator)
            )
    before = {n: {k: t.clone() for k, t in inner(p).items()} for n, p in params.items()}
    weights = TransformerEngineWeights(params, RECIPES[kind])
    for name, param in params.items():
        for key, tensor in inner(param).items():
            assert (
                torch.equal(tensor, before[name][key]) and tensor.dtype == before[name][key].dtype
            )
    found = {name: places(param) for name, param in params.items()}
    for seed in (0, 1):
        step(weights, drawn(weights, seed))
        check(weights, kind)
    assert found == {name: places(param) for name, param in params.items()}


@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_a_view_that_would_not_be_aligned_is_none(te: Any, kind: str) -> None:
    """Products of FP8 need addresses that 16 divides."""
    weights = grouped(te, kind, shapes=((20, 30), (20, 30), (20, 28), (64, 64)))
    apart = []
    for index, param in enumerate(weights.params.values()):
        own, at = weights.planes.one(index), places(param)
        data = [at[name] for name in DATA if name in at]
        assert all(place % 16 == 0 for place in data)
        apart.append(data != [own.row_data.data_ptr(), own.col_data.data_ptr()])
    assert apart == [False, True, False, False]  # 600 bytes, 1200, 1760
    step(weights, drawn(weights))
    check(weights, kind)


@EVERY
@pytest.mark.parametrize("without", ["row", "col"])
def test_where_it_keeps_one_plane_that_one_is_a_view(te: Any, kind: str, without: str) -> None:
    weights = grouped(te, kind, without)
    held = [set(inner(param)) for param in weights.params.values()]
    step(weights, drawn(weights))
    assert held == [set(inner(param)) for param in weights.params.values()]
    check(weights, kind, ("col",) if without == "row" else ("row",))


@EVERY
@pytest.mark.parametrize("plane", [0, 1])
def test_a_buffer_that_was_replaced_gets_a_copy(te: Any, kind: str, plane: int) -> None:
    """As update_usage does with a transpose: it lets go of it, and makes another one later."""
    weights = grouped(te, kind)
    step(weights, drawn(weights))
    param = weights.params["w1"]
    name = [name for name in DATA if name in inner(param)][plane]
    vars(param)[name] = torch.full_like(vars(param)[name], FILL)
    place = vars(param)[name].data_ptr()
    step(weights, drawn(weights, 1))
    assert vars(param)[name].data_ptr() == place
    check(weights, kind)


@pytest.mark.parametrize("kind", ["tensor", "delayed"])
def test_a_transpose_that_was_dropped_stays_dropped(te: Any, kind: str) -> None:
    weights = grouped(te, kind)
    step(weights, drawn(weights))
    param: Any = weights.params["w1"]
    param._transpose, param._transpose_invalid = None, False
    step(weights, drawn(weights, 1))
    assert param._transpose is None and param._transpose_invalid
    check(weights, kind, ("row",))


@pytest.mark.parametrize("kind", ["tensor", "block", "mxfp8"])
def test_what_it_copies_into_a_weight_lands_in_our_planes(te: Any, kind: str) -> None:
    """`copy_` of its own, which `load_state_dict` calls; a deep copy has memory of its own."""
    weights, others = grouped(te, kind), grouped(te, kind)
    step(weights, drawn(weights))
    step(others, drawn(others, 1))
    found = [places(param) for param in weights.params.values()]
    copies = copy.deepcopy(list(weights.params.values()))
    with torch.no_grad():
        for param, other in zip(weights.params.values(), others.params.values(), strict=True):
            param.copy_(other)
    assert found == [places(param) for param in weights.params.values()]
    for name in ("row_data", "col_data"):
        mine, wanted = weights.planes.tensors()[name], others.planes.tensors()[name]
        assert torch.equal(mine, wanted)
    for index, each in enumerate(copies):
        assert not torch.equal(
            theirs(each, kind, "row"), dequantise(others.planes, BF16, "row", index)
        )


def trainer(te: Any, kind: str) -> tuple[Any, Any, Any]:
    """One weight in a wrapped model, and its optimizer."""
    model = nn.Module()
    model.weight = weight(te, kind)
    values = torch.linspace(-1, 1, 64 * 96).view(64, 96).to(BF16)
    keep_initial(te, model.weight, values)
    ddp = megatron_lw.DistributedDataParallel(model, megatron_lw.ParallelGroups.single())
    config = megatron_lw.OptimizerConfig(optimizer="adam", lr=0.1, bf16=True)
    return model.weight, ddp, megatron_lw.get_megatron_optimizer(config, [ddp])


def steps(param: Any, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        param.main_grad.fill_(1.0)
        optimizer.step()


@EVERY
def test_a_weight_that_left_the_planes_is_named_at_the_next_step(te: Any, kind: str) -> None:
    param, _, optimizer = trainer(te, kind)
    steps(param, optimizer, 2)
    param.data = weight(te, kind).data
    with pytest.raises(megatron_lw.StateError, match="'weight' no longer lies in its bucket"):
        steps(param, optimizer, 1)


def change(param: Any, how: str) -> None:
    """Write into a weight of one scale as somebody would who does not know its history."""
    data = param._data.view(-1)
    size = (data & 0x7F).int()
    if how == "a small byte":
        param._data.view(-1)[int(size.argmin())] = 1
    elif how == "the largest byte":
        data[size == size.max()] -= 8
    elif how == "the scale":
        param._scale_inv.mul_(2)
    param._transpose.copy_(param._data.t())


@pytest.mark.parametrize(
    ("how", "anew"),
    [("nothing", False), ("a small byte", False), ("the largest byte", True), ("the scale", True)],
)
def test_a_history_starts_anew_where_it_is_not_the_weights(te: Any, how: str, anew: bool) -> None:
    """The masters are what was written, with either history."""
    param, ddp, optimizer = trainer(te, "delayed")
    steps(param, optimizer, 3)
    [group] = ddp.buckets[0].quantised
    before = group.planes.history.clone()
    assert (before[:, :4] > 0).all()
    change(param, how)
    values = theirs(param, "delayed", "row").clone()
    optimizer.reload_model_params()
    optimizer.check()  # the weight is its quantised masters, under that history
    [held] = held_buckets(optimizer.runtime)
    assert torch.equal(held.master.row[: values.numel()], values.view(-1).float())
    if anew:
        assert group.planes.history[0, 0] == values.abs().max()
        assert not group.planes.history[:, 1:].any()
    else:
        assert torch.equal(group.planes.history, before)
        assert torch.equal(theirs(param, "delayed", "row"), values)
