"""FP8 planes, bit for bit against the scalar implementation. Class *bitwise*."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from megatron_lw.errors import ConfigError
from megatron_lw.fp8 import rules
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import (
    cast_run,
    dequantise,
    derive_columns,
    measure,
    quantise,
    quantise_bucket,
    set_scales,
)
from megatron_lw.fp8.recipe import Recipe, as_recipe
from megatron_lw.fp8.runs import Part, plan_runs, whole_parts
from tests.unit import fp8_scalar as scalar

RECIPES = {
    "tensor": Recipe(format="tensor"),
    "delayed": Recipe(format="delayed"),
    "block": Recipe(format="block"),
    "block-fp32": Recipe(format="block", fp32_scales=True),
    "mxfp8": Recipe(format="mxfp8"),
    "mxfp8-derived": Recipe(format="mxfp8", derive_columns=True),
    "mxfp8-2d": Recipe(format="mxfp8-2d"),
}
EVERY = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])

BF16_MAX = float(torch.finfo(torch.bfloat16).max)
FP32_MAX = float(torch.finfo(torch.float32).max)


def hard_values(kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers on which a rule could slip."""
    generator = torch.Generator().manual_seed(len(kind))
    normal = torch.randn(numel, generator=generator)
    made = {
        "random": normal,
        "wide": normal * torch.exp2(torch.randint(-40, 40, (numel,), generator=generator)),
        "subnormal": normal * 2.0**-130,
        "near the smallest code": normal * 2.0**-118,
        "zero": torch.zeros(numel) * normal.sign(),
        "huge": normal.sign() * FP32_MAX * torch.rand(numel, generator=generator),
        "one NaN": torch.where(torch.arange(numel) % 37 == 5, math.nan, normal),
        "one infinity": torch.where(torch.arange(numel) % 53 == 7, -math.inf, normal),
        "nothing but NaN": torch.full((numel,), -math.nan),
        "borders": torch.tensor([448.0, 449, 480, 256, 464, 1, -448, 0.0009765625])[
            torch.randint(0, 8, (numel,), generator=generator)
        ],
    }
    return made[kind].to(dtype)


KINDS = [
    "random",
    "wide",
    "subnormal",
    "near the smallest code",
    "zero",
    "huge",
    "one NaN",
    "one infinity",
    "nothing but NaN",
    "borders",
]


def rows_of(values: torch.Tensor, shape: tuple[int, int]) -> scalar.Matrix:
    return values.float().view(shape).tolist()


def expected(
    matrix: scalar.Matrix, recipe: Recipe, dtype: torch.dtype
) -> dict[str, list[list[float]]]:
    """Bytes and scales of both planes by the scalar implementation."""
    if recipe.format == "mxfp8":
        row_data, row_scale = scalar.mx_plane(matrix, 1, 32)
        source = matrix
        if recipe.derive_columns:
            source = [
                [scalar.decode(b) * 2.0 ** (row_scale[i][j // 32] - 127) for j, b in enumerate(row)]
                for i, row in enumerate(row_data)
            ]
            source = torch.tensor(source).bfloat16().tolist()
        col_data, col_scale = scalar.mx_plane(source, 32, 1)
    elif recipe.format == "mxfp8-2d":
        row_data, row_scale = col_data, col_scale = scalar.mx_plane(matrix, 32, 32)
    else:
        high, wide = recipe.block or (len(matrix), len(matrix[0]))
        largest = BF16_MAX if recipe.format == "block" and dtype == torch.bfloat16 else FP32_MAX
        powers = recipe.format == "block" and not recipe.fp32_scales
        row_data, row_scale = scalar.block_plane(matrix, high, wide, largest, powers)
        col_data, col_scale = scalar.transposed(row_data), scalar.transposed(row_scale)
    return {
        "row_data": row_data,
        "row_scale": row_scale,
        "col_data": col_data,
        "col_scale": col_scale,
    }


def flat(rows: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([each for row in rows for each in row], dtype=dtype)


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@EVERY
def test_both_planes_of_hard_values(recipe: Recipe, kind: str, dtype: torch.dtype) -> None:
    shape = (64, 32) if recipe.scales_are_codes else (130, 9)
    values = hard_values(kind, shape[0] * shape[1], dtype)
    planes = quantise_bucket(values, [shape], [0], recipe)
    for name, rows in expected(rows_of(values, shape), recipe, dtype).items():
        made = planes.tensors()[name]
        assert torch.equal(made, flat(rows, made.dtype)), (name, kind)


def test_all_256_bytes_decode_and_encode_to_themselves() -> None:
    data = torch.arange(256).to(torch.uint8)
    values = rules.numbers(data)
    wanted = [scalar.decode(byte) for byte in range(256)]
    assert repr(values.tolist()) == repr(wanted)
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(256, dtype=torch.uint8)
        rules.cast(values.to(dtype), out)
        assert out.tolist() == [*range(255), 0x7F]


def test_all_256_codes() -> None:
    codes = torch.arange(256).to(torch.uint8)
    power = rules.code_values(codes).double()
    assert power[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    inverse = rules.code_multipliers(codes).double()
    assert inverse[:255].tolist() == [2.0 ** (127 - code) for code in range(255)]
    assert power[255].isnan() and inverse[255].isnan()
    made = rules.exponent_codes((power[:247] * 448).float())  # beyond, fp32 has no such maximum
    assert made.tolist() == list(range(247))


def test_every_bf16_maximum_has_the_code_of_exact_arithmetic() -> None:
    """All 32,641 non-negative ones, up to infinity: the product with 1/448 never misleads."""
    amax = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = rules.exponent_codes(amax).int()
    exact = amax.double() / 448
    assert torch.all(exact[:-1] <= torch.exp2(codes[:-1].double() - 127))
    smaller = (codes > 0) & (codes < 254)
    assert torch.all(exact[smaller] > torch.exp2(codes[smaller].double() - 128))
    assert smaller.sum() > 30000


@pytest.mark.parametrize(
    ("block", "code"),
    [([448.0], 127), ([449.0], 128), ([480.0], 128), ([256.0], 127), ([0.0], 0)],
)
def test_the_table_of_known_blocks(block: list[float], code: int) -> None:
    """Codes that Transformer Engine's rule gives, where other rules differ."""
    values = torch.zeros(32 * 32)
    values[: len(block)] = torch.tensor(block)
    planes = quantise_bucket(values, [(32, 32)], [0], RECIPES["mxfp8"])
    assert int(planes.row_scale[0]) == code
    nearest = {449.0: 448.0}.get(block[0], block[0])
    assert float(dequantise(planes, torch.float32)[0, 0]) == nearest


def test_a_nan_stays_one_element_and_an_infinity_takes_the_block() -> None:
    values = torch.ones(32 * 32)
    values[3] = math.nan
    values[32] = math.inf
    planes = quantise_bucket(values, [(32, 32)], [0], RECIPES["mxfp8"])
    assert planes.row_scale[:2].tolist() == [119, 254]
    assert planes.row_data[:32].eq(0x7F).nonzero().flatten().tolist() == [3]
    assert planes.row_data[32] == 0x7E and not planes.row_data[33:64].any()


BUCKET = {
    True: [(64, 96), (32, 96), (96, 96), (64, 32), (64, 32), (32, 64), (128, 128)],
    False: [(130, 37), (128, 37), (256, 37), (5, 300), (5, 300), (1, 1), (128, 128), (128, 128)],
}


def bucket(recipe: Recipe, gap: int = 64) -> tuple[torch.Tensor, list, list[int]]:
    """Matrices of several shapes; some lie back to back, some behind a gap of garbage."""
    shapes = BUCKET[recipe.scales_are_codes]
    offsets, at = [], 64
    for index, (rows, cols) in enumerate(shapes):
        at += gap * (index % 3 == 2)
        offsets.append(at)
        at += rows * cols
    values = torch.randn(at + 64, generator=torch.Generator().manual_seed(1)) * 0.02
    return values.bfloat16(), shapes, offsets


@EVERY
def test_a_bucket_in_one_call_equals_its_matrices_one_by_one(recipe: Recipe) -> None:
    values, shapes, offsets = bucket(recipe)
    whole = quantise_bucket(values, shapes, offsets, recipe)
    for index, (shape, offset) in enumerate(zip(shapes, offsets, strict=True)):
        part = values[offset : offset + shape[0] * shape[1]].clone()
        alone = quantise_bucket(part, [shape], [0], recipe)
        assert alone.row_data.any() and alone.col_data.any()
        for name, tensor in whole.one(index).tensors().items():
            assert torch.equal(tensor, alone.tensors()[name]), (name, index)
    assert len(plan_runs(whole_parts(shapes, offsets), whole.layout)) < len(shapes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@EVERY
def test_parts_cut_anywhere_give_the_same_bytes(recipe: Recipe, ranks: int) -> None:
    """Rows of a bucket, each measured and cast by itself; the maxima agreed between."""
    if recipe.format == "mxfp8" and not recipe.derive_columns:
        assert recipe.block == (1, 32)  # BF16 travels: nothing is measured in parts
        return
    values, shapes, offsets = bucket(recipe)
    whole = quantise_bucket(values, shapes, offsets, recipe)
    made = Planes.empty(shapes, recipe)
    unit = 64 if recipe.scales_are_codes else 1
    ends = [0, *((len(values) * r // ranks // unit + 1) * unit for r in range(1, ranks))]
    ends.append(len(values))
    rows = []
    for low, high in pairwise(ends):
        parts = []
        for index, (shape, offset) in enumerate(zip(shapes, offsets, strict=True)):
            begin, end = max(low, offset), min(high, offset + shape[0] * shape[1])
            if begin < end:
                parts.append(
                    Part(
                        matrix=index,
                        start=begin - offset,
                        numel=end - begin,
                        offset=begin - low,
                    )
                )
        rows.append((values[low:high].clone(), plan_runs(parts, made.layout)))
    maxima = torch.stack([measure(row, runs, made.layout) for row, runs in rows]).amax(0)
    factors = set_scales(made, maxima, torch.bfloat16, "restart")
    for row, runs in rows:
        for run in runs:
            at = made.layout.data[run.matrix] + run.start
            cast_run(row, run, factors, made.layout, made.row_data[at : at + run.numel])
    derive_columns(made)
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, made.tensors()[name]), name
    assert ranks == 1 or any(not run.whole for _, runs in rows for run in runs)


@EVERY
def test_values_come_back_from_either_plane(recipe: Recipe) -> None:
    """Class *numerical*: three mantissa bits keep a value within 1/16, but near zero."""
    values, shapes, offsets = bucket(recipe)
    planes = quantise_bucket(values, shapes, offsets, recipe)
    for index, (shape, offset) in enumerate(zip(shapes, offsets, strict=True)):
        want = values[offset : offset + shape[0] * shape[1]].view(shape).float()
        for plane in ("row", "col"):
            found = dequantise(planes, torch.float32, plane, index)
            assert found.shape == shape
            assert torch.all((found - want).abs() <= want.abs() / 16 + want.abs().max() / 2**14)


def test_exact_in_bf16_where_scales_are_powers_of_two() -> None:
    for name in ("block", "mxfp8", "mxfp8-2d"):
        values, shapes, offsets = bucket(RECIPES[name])
        planes = quantise_bucket(values, shapes, offsets, RECIPES[name])
        exact = dequantise(planes, torch.float32)
        assert torch.equal(exact, dequantise(planes, torch.bfloat16).float()) and exact.any()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in RECIPES.values():
        values, shapes, offsets = bucket(recipe)
        before = quantise_bucket(values, shapes, offsets, recipe)
        monkeypatch.setattr("megatron_lw.fp8.blocks._CHUNK_CPU", 1)
        after = quantise_bucket(values, shapes, offsets, recipe)
        monkeypatch.undo()
        for name, tensor in before.tensors().items():
            assert torch.equal(tensor, after.tensors()[name]), (recipe, name)


def test_delayed_scales_follow_past_maxima() -> None:
    """The scale comes from the updates before; the same values again change no byte."""
    recipe = Recipe(format="delayed", history=2)
    planes = Planes.empty([(4, 4)], recipe)
    runs = plan_runs(whole_parts([(4, 4)], [0]), planes.layout)
    ones = torch.ones(16)
    seen = []
    for amax in (2.0, 4.0, 8.0, 1.0, 1.0, 1.0):
        quantise(ones * amax, runs, planes, "advance")
        seen.append(round(448 * float(planes.row_scale), 4))
        before = {name: tensor.clone() for name, tensor in planes.tensors().items()}
        quantise(ones * amax, runs, planes, "keep")
        assert all(torch.equal(before[name], t) for name, t in planes.tensors().items())
    assert seen == [2.0, 2.0, 4.0, 8.0, 8.0, 1.0]
    assert planes.history is not None and planes.history.tolist() == [[1.0, 1.0, 1.0]]
    quantise(ones * 3.0, runs, planes, "restart")
    assert planes.history.tolist() == [[3.0, 0.0, 0.0]]
    assert float(dequantise(planes, torch.float32)[0, 0]) == 3.0


def test_a_delayed_scale_that_is_too_large_saturates() -> None:
    recipe = Recipe(format="delayed", history=1)
    planes = Planes.empty([(2, 2)], recipe)
    runs = plan_runs(whole_parts([(2, 2)], [0]), planes.layout)
    quantise(torch.full((4,), 1.0), runs, planes, "advance")
    quantise(torch.full((4,), 8.0), runs, planes, "advance")
    assert planes.row_data.tolist() == [0x7E] * 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"format": "nvfp4"}, "nvfp4"),
        ({"format": "mxfp8", "fp32_scales": True}, "fp32_scales"),
        ({"format": "block", "history": 4}, "history"),
        ({"format": "mxfp8-2d", "derive_columns": True}, "derive_columns"),
        ({"format": "delayed", "history": 0}, "history"),
    ],
)
def test_recipes_that_contradict_themselves(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mxfp8", (32, 40)),
        ("mxfp8", (40, 32)),
        ("mxfp8-2d", (8, 8)),
        ("block", (4,)),
        ("tensor", (0, 4)),
    ],
)
def test_shapes_without_blocks_are_refused_by_name(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"weight 'w' of shape .* cannot be"):
        as_recipe(name).check_shape("weight 'w'", shape)
