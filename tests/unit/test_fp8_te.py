"""The adapter of Transformer Engine, on the tensor classes of its own wheel (see `te_stub`).

Class *bitwise* wherever bytes, scales or values are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import megatron_lw
from megatron_lw.errors import ConfigError
from megatron_lw.fp8.kinds import planes_of, put_planes
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import dequantise, quantise_bucket
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.te import recipe_of, take_initial, write_planes
from megatron_lw.optimizer.describe import ParamInfo, describe
from tests import te_stub
from tests.te_weights import (
    BF16,
    FILL,
    RECIPES,
    grouped,
    keep_initial,
    nvfp4,
    quantizer,
    theirs,
    weight,
)

pytestmark = pytest.mark.skipif(not te_stub.present(), reason=te_stub.MISSING)

EVERY = pytest.mark.parametrize("kind", RECIPES)
SHAPES = ((64, 96), (160, 288), (32, 32))


@pytest.fixture
def te() -> Iterator[Any]:
    with te_stub.installed() as module:
        yield module


def quantised(recipe: Recipe, seed: int = 0) -> Planes:
    generator = torch.Generator().manual_seed(seed)
    counts = [rows * cols for rows, cols in SHAPES]
    values = torch.randn(sum(counts), generator=generator)
    values *= torch.exp2(torch.randint(-20, 20, values.shape, generator=generator))
    offsets = [sum(counts[:i]) for i in range(len(counts))]
    return quantise_bucket(values.to(BF16), SHAPES, offsets, recipe)


def buffers(param: Any) -> dict[str, torch.Tensor]:
    names = ("_data", "_transpose", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
    names += ("_columnwise_data", "_columnwise_scale_inv")
    found = {name: vars(param).get(name) for name in names}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@EVERY
@pytest.mark.parametrize("without", ["row", "col"])
def test_a_plane_that_a_weight_does_not_keep_is_made_from_the_other(
    te: Any, kind: str, without: str
) -> None:
    """As a frozen weight is saved; whoever loads it may keep both. Zeros would be multiplied."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 96, generator=generator).to(BF16)
    source, target = weight(te, kind, without=without), weight(te, kind)
    made = quantise_bucket(values.view(-1), [(64, 96)], [0], RECIPES[kind])
    write_planes({"w": source}, made)
    planes, held = planes_of("w", source)
    assert held != without
    put_planes("w", target, planes)
    kept = theirs(source, kind, held)
    one_scale = kind in ("tensor", "delayed")
    if not one_scale or held == "row":
        assert torch.equal(theirs(target, kind, held), kept)
    for plane in ("row", "col"):
        found = theirs(target, kind, plane)
        assert torch.allclose(found.float(), values.float(), rtol=0.15, atol=0.05), plane


@EVERY
def test_each_kind_has_its_recipe(te: Any, kind: str) -> None:
    assert recipe_of("w", weight(te, kind)) == RECIPES[kind]
    assert recipe_of("w", nn.Parameter(torch.zeros(4, 4))) is None


@EVERY
def test_planes_arrive_in_its_buffers_which_stay_where_they_are(te: Any, kind: str) -> None:
    params = {f"w{i}": weight(te, kind, shape) for i, shape in enumerate(SHAPES)}
    places = {n: {k: t.data_ptr() for k, t in buffers(p).items()} for n, p in params.items()}
    for seed in (0, 1):
        planes = quantised(RECIPES[kind], seed)
        write_planes(params, planes)
        for index, param in enumerate(params.values()):
            for plane in ("row", "col"):
                wanted = dequantise(planes, BF16, plane, index)
                assert torch.equal(theirs(param, kind, plane), wanted) and wanted.any()
    assert places == {
        n: {k: t.data_ptr() for k, t in buffers(p).items()} for n, p in params.items()
    }
    if kind in ("tensor", "delayed", "block", "block-fp32"):
        for index, param in enumerate(params.values()):  # MXFP8 dequantises on GPUs only
            wanted = dequantise(planes, BF16, "row", index)
            assert torch.equal(param.dequantize(dtype=BF16), wanted)


@pytest.mark.parametrize("kind", ["block", "mxfp8", "mxfp8-2d"])
def test_padding_is_left_alone(te: Any, kind: str) -> None:
    params = {f"w{i}": weight(te, kind, shape) for i, shape in enumerate(SHAPES)}
    planes = quantised(RECIPES[kind])
    write_planes(params, planes)
    _, (rows, cols), _ = SHAPES
    padded: Any = params["w1"]
    if kind == "block":
        assert padded._rowwise_scale_inv.shape == (2, 4)
        assert (padded._rowwise_scale_inv[:, 3:] == FILL).all()
        assert (padded._columnwise_scale_inv[:, 2:] == FILL).all()
        return
    row, col = padded._rowwise_scale_inv, padded._columnwise_scale_inv
    assert row.shape == (256, 12) and col.shape == (8, 384)
    assert (row[rows:] == FILL).all() and (row[:, cols // 32 :] == FILL).all()
    assert (col[rows // 32 :] == FILL).all() and (col[:, cols:] == FILL).all()
    if kind == "mxfp8":
        one = planes.one(1)
        assert torch.equal(row[:rows, : cols // 32].reshape(-1), one.row_scale)
        assert torch.equal(col[: rows // 32, :cols].reshape(-1), one.col_scale)


@EVERY
@pytest.mark.parametrize("without", ["row", "col"])
def test_where_it_keeps_one_plane_that_one_is_written(te: Any, kind: str, without: str) -> None:
    params = {f"w{i}": weight(te, kind, shape, without) for i, shape in enumerate(SHAPES)}
    before = {name: set(buffers(param)) for name, param in params.items()}
    planes = quantised(RECIPES[kind])
    write_planes(params, planes)
    assert before == {name: set(buffers(param)) for name, param in params.items()}
    plane = "row" if without == "col" else "col"
    for index, (name, param) in enumerate(params.items()):
        wanted = dequantise(planes, BF16, plane, index)
        assert torch.equal(theirs(param, kind, plane), wanted)
        assert torch.equal(take_initial(name, param), wanted) and wanted.any()


@pytest.mark.parametrize("kind", ["tensor", "delayed"])
def test_a_transpose_is_written_too_or_marked_as_stale(te: Any, kind: str) -> None:
    params: dict[str, Any] = {f"w{i}": weight(te, kind, shape) for i, shape in enumerate(SHAPES)}
    planes = quantised(RECIPES[kind])
    params["w0"]._transpose_invalid = True
    params["w1"]._transpose, params["w1"]._transpose_invalid = None, False
    write_planes(params, planes)
    assert [p._transpose_invalid for p in params.values()] == [False, True, False]
    assert torch.equal(theirs(params["w0"], kind, "col"), dequantise(planes, BF16, "col", 0))


@EVERY
def test_initial_values_are_taken_once(te: Any, kind: str) -> None:
    planes = quantised(RECIPES[kind])
    params = {f"w{i}": weight(te, kind, shape) for i, shape in enumerate(SHAPES)}
    write_planes(params, planes)
    values = torch.randn(SHAPES[0]).to(BF16)
    param: Any = params["w0"]
    keep_initial(te, param, values)
    assert torch.equal(take_initial("w0", param), values)
    assert param.get_high_precision_init_val() is None
    again = take_initial("w0", param)
    assert torch.equal(again, dequantise(planes, BF16, "row", 0)) and not torch.equal(again, values)


def test_a_stale_transpose_is_not_read(te: Any) -> None:
    param: Any = weight(te, "tensor", without="row")
    param._transpose_invalid = True
    with pytest.raises(ConfigError, match="'w' holds neither plane"):
        take_initial("w", param)


def described(param: nn.Parameter) -> tuple[ParamInfo, ...]:
    model = nn.Module()
    model.weight = param
    return describe([model], megatron_lw.ParallelGroups.single()).infos


@EVERY
def test_a_model_with_such_a_weight_is_described(te: Any, kind: str) -> None:
    [info] = described(weight(te, kind))
    planes = (
        "row_data, col_data, row_scale"
        if kind in ("tensor", "delayed")
        else ("row_data, row_scale, col_data, col_scale")
    )
    assert info.recipe == f"{RECIPES[kind]!r} of Transformer Engine, with {planes}"
    assert (info.name, info.dtype, info.role) == ("weight", "bfloat16", "matrix")


@pytest.mark.parametrize(("make", "name"), [(nvfp4, "NVFP4Tensor"), (grouped, "GroupedTensor")])
def test_other_kinds_are_refused_by_name(te: Any, make: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'weight', a {name} of Transformer.*not supported"):
        described(nn.Parameter(make(te)))


def test_a_kind_is_its_class_and_not_what_it_can_do(te: Any) -> None:
    class Own(te.MXFP8Tensor):
        pass

    param = weight(te, "mxfp8")
    data: Any = param.data
    data.__class__ = Own
    with pytest.raises(ConfigError, match="'weight' is a Own; weights are plain tensors"):
        described(nn.Parameter(data))
    Own.__module__ = "transformer_engine.pytorch.tensor"
    with pytest.raises(ConfigError, match=r"a Own of .*MXFP8Tensor"):
        recipe_of("weight", data)


@pytest.mark.parametrize(
    ("kind", "settings", "options", "words"),
    [
        ("tensor", {}, {"force_pow_2_scales": True}, "force_pow_2_scales=True"),
        ("tensor", {}, {"amax_epsilon": 1e-3}, "amax_epsilon=0.001"),
        ("tensor", {}, {"with_amax_reduction": True}, "with_amax_reduction=True"),
        ("block", {}, {"amax_epsilon": 1e-3}, "amax_epsilon=0.001"),
        ("block", {"is_2D_scaled": False}, {}, "is_2D_scaled=False"),
        ("mxfp8", {"with_gemm_swizzled_scales": True}, {}, "with_gemm_swizzled_scales=True"),
        ("mxfp8", {"dtype": torch.float32}, {}, "torch.float32; build the model in bfloat16"),
    ],
)
def test_settings_that_make_other_bytes_are_refused(
    te: Any, kind: str, settings: Any, options: Any, words: str
) -> None:
    param = weight(te, kind, quantizer=quantizer(te, kind, **options), **settings)
    with pytest.raises(ConfigError, match=f"'w', a .*{words}"):
        recipe_of("w", param)


def test_other_formats_and_quantizers_are_refused(te: Any) -> None:
    with pytest.raises(ConfigError, match="kFloat8E5M2"):
        recipe_of("w", weight(te, "mxfp8", fp8_dtype=te.DType.kFloat8E5M2))
    for kind in ("tensor", "block", "mxfp8"):
        param: Any = weight(te, kind)
        param._quantizer = None
        with pytest.raises(ConfigError, match="no quantizer"):
            recipe_of("w", param)
        param._quantizer = quantizer(te, "mxfp8" if kind != "mxfp8" else "block")
        with pytest.raises(ConfigError, match="whose rules are not known"):
            recipe_of("w", param)


def test_a_weight_that_does_not_fit_leaves_all_others_as_they_were(te: Any) -> None:
    planes = quantised(RECIPES["mxfp8"])
    params: dict[str, Any] = {f"w{i}": weight(te, "mxfp8", shape) for i, shape in enumerate(SHAPES)}
    params["w2"]._rowwise_scale_inv = torch.zeros(8, 1, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"'w2'.*row_scale has shape"):
        write_planes(params, planes)
    params["w2"] = weight(te, "mxfp8-2d", SHAPES[2])
    with pytest.raises(ConfigError, match="'w2' is no longer kept as"):
        write_planes(params, planes)
    assert (params["w0"]._rowwise_data == FILL).all()
    with pytest.raises(ConfigError, match="no tensor of Transformer Engine"):
        take_initial("w", nn.Parameter(torch.zeros(2, 2)))
