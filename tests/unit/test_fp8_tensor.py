"""`QuantisedTensor` as a weight of a module. Class *bitwise* wherever values are compared."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from megatron_lw import fp8
from megatron_lw.errors import ConfigError, UnsupportedError
from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.tensor import QuantisedTensor
from tests.unit.test_fp8_numerics import EVERY, RECIPES

SHAPE = (64, 96)


def values(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(SHAPE, generator=generator) * 0.05).bfloat16()


def weight(recipe: Recipe, seed: int = 0, **options: bool) -> QuantisedTensor:
    param = nn.Parameter(QuantisedTensor.from_values(values(seed), recipe, **options))
    assert isinstance(param, QuantisedTensor) and isinstance(param, nn.Parameter)
    return param


def equal(one: Planes, other: Planes) -> bool:
    """Whether planes have the same bytes, and are not all zeros."""
    theirs = other.tensors()
    return one.layout == other.layout and all(
        torch.equal(tensor, theirs[name]) and bool(tensor.any())
        for name, tensor in one.tensors().items()
    )


def addresses(planes: Planes) -> set[int]:
    return {tensor.data_ptr() for tensor in planes.tensors().values()}


@EVERY
def test_it_looks_like_a_bf16_weight(recipe: Recipe) -> None:
    param = weight(recipe)
    assert param.dtype == torch.bfloat16 and param.shape == SHAPE and param.dim() == 2
    assert param.requires_grad and param.is_leaf and param.grad is None
    assert param.numel() == 64 * 96 and param.device.type == "cpu"
    assert f"format='{recipe.format}'" in repr(param)
    assert "Parameter of QuantisedTensor" in str(param) and "requires_grad=True" in str(param)
    shown = repr(param.detach())
    assert shown.startswith("QuantisedTensor(") and "requires_grad" not in shown


@EVERY
def test_detach_and_data_alias_and_clone_copies(recipe: Recipe) -> None:
    param = weight(recipe, keep_initial=True)
    for alias in (param.detach(), param.data):
        assert isinstance(alias, QuantisedTensor) and not alias.requires_grad
        assert addresses(alias.planes) == addresses(param.planes)
        assert alias.initial is param.initial
    made = param.detach().clone()
    assert isinstance(made, QuantisedTensor) and equal(made.planes, param.planes)
    assert not addresses(made.planes) & addresses(param.planes)


@EVERY
def test_copy_quantises_and_equal_recipes_copy_bytes(recipe: Recipe) -> None:
    param, other = weight(recipe), weight(recipe, 1)
    assert not equal(param.planes, other.planes)
    before = addresses(param.planes)
    with torch.no_grad():
        param.copy_(values(1))
        assert equal(param.planes, other.planes) and addresses(param.planes) == before
        param.copy_(values(1).float())
        assert equal(param.planes, other.planes)
        param.copy_(weight(recipe, 2))
        assert equal(param.planes, weight(recipe, 2).planes) and addresses(param.planes) == before
        plain = torch.zeros(SHAPE, dtype=torch.bfloat16)
        plain.copy_(param)
    assert torch.equal(plain, param.dequantize()) and plain.any()


def test_copy_between_recipes_goes_through_the_values() -> None:
    source = weight(RECIPES["block"], 1)
    for kept in (True, False):
        target = weight(RECIPES["mxfp8"])
        source = weight(RECIPES["block"], 1, keep_initial=kept)
        with torch.no_grad():
            target.copy_(source)
        wanted = values(1) if kept else source.dequantize()
        assert equal(target.planes, fp8.QuantisedTensor.from_values(wanted, target.recipe).planes)


def test_values_before_quantisation_follow_copies_until_they_are_freed() -> None:
    param = weight(RECIPES["mxfp8"], keep_initial=True)
    alias = param.detach()
    assert param.initial is not None and torch.equal(param.initial, values())
    assert not torch.equal(param.initial, param.dequantize())
    with torch.no_grad():
        param.copy_(values(1))
        assert torch.equal(param.initial, values(1))
        param.copy_(weight(RECIPES["mxfp8"], 2))
        assert torch.equal(param.initial, param.dequantize())
    param.free_initial()
    assert param.initial is None and alias.initial is None
    assert weight(RECIPES["mxfp8"]).initial is None


@EVERY
def test_state_dict_load_and_deepcopy(recipe: Recipe) -> None:
    module = nn.Module()
    module.weight = weight(recipe)
    state = module.state_dict()
    assert addresses(state["weight"].planes) == addresses(module.weight.planes)
    other = copy.deepcopy(module)
    assert isinstance(other.weight, QuantisedTensor) and isinstance(other.weight, nn.Parameter)
    assert other.weight.requires_grad and equal(other.weight.planes, module.weight.planes)
    assert not addresses(other.weight.planes) & addresses(module.weight.planes)
    with torch.no_grad():
        other.weight.copy_(values(3))
    assert not equal(other.weight.planes, module.weight.planes)
    other.load_state_dict(state)
    assert equal(other.weight.planes, module.weight.planes)
    plain = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, module.weight.dequantize())
    other.load_state_dict({"weight": values(4)})
    assert equal(other.weight.planes, weight(recipe, 4).planes)


@EVERY
def test_pickle_and_torch_save(recipe: Recipe) -> None:
    param = weight(recipe, keep_initial=True)
    param.tag = "kept"
    found = pickle.loads(pickle.dumps(param))
    file = io.BytesIO()
    torch.save({"weight": param}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["weight"]
    for made in (found, loaded):
        assert isinstance(made, nn.Parameter) and made.requires_grad and made.tag == "kept"
        assert equal(made.planes, param.planes) and torch.equal(made.initial, param.initial)


def test_moves_between_devices_stay_quantised_and_other_dtypes_are_plain() -> None:
    module = nn.Module()
    module.weight = weight(RECIPES["mxfp8"], keep_initial=True)
    moved = module.weight.to("meta")
    assert isinstance(moved, QuantisedTensor) and moved.planes.row_data.device.type == "meta"
    assert module.weight.to(torch.bfloat16) is module.weight
    wide = module.weight.detach().float()
    assert type(wide) is torch.Tensor and wide.dtype == torch.float32
    assert torch.equal(wide, module.weight.dequantize(torch.float32)) and wide.any()
    module.to("meta")
    assert isinstance(module.weight, nn.Parameter) and module.weight.device.type == "meta"
    assert module.weight.planes.col_scale.device.type == "meta"
    assert module.weight.initial is not None and module.weight.initial.device.type == "meta"


def test_a_module_is_not_converted_in_place() -> None:
    module = nn.Module()
    module.weight = weight(RECIPES["mxfp8"])
    before = copy.deepcopy(module.weight).planes
    for convert in (module.float, module.half, module.double):
        with pytest.raises(UnsupportedError, match="mxfp8 cannot become torch"):
            convert()
    assert equal(module.weight.planes, before) and module.weight.dtype == torch.bfloat16
    module.bfloat16()
    assert isinstance(module.weight, QuantisedTensor)


def test_data_takes_planes_of_the_same_layout_only() -> None:
    param, other = weight(RECIPES["block"]), weight(RECIPES["block"], 1)
    param.data = other.data
    assert addresses(param.planes) == addresses(other.planes)
    with pytest.raises(UnsupportedError, match="use copy_"):
        param.data = weight(RECIPES["tensor"]).data


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda w: w + 1, "add"),
        (lambda w: w.mul_(2), "mul_"),
        (lambda w: w.view(-1), "view"),
        (lambda w: w.t(), "aten.t"),
        (lambda w: w[0], "select"),
        (lambda w: torch.zeros_like(w), "zeros_like"),
        (lambda w: torch.ones(1, 96).bfloat16() @ w, "mm"),
        (lambda w: nn.init.zeros_(w), "zero_"),
        (lambda w: torch.equal(w, w), "equal"),
        (lambda w: nn.functional.linear(w, w), "functional.linear"),
    ],
)
def test_everything_else_raises_by_name(operation, name: str) -> None:
    with torch.no_grad(), pytest.raises(UnsupportedError, match=name) as caught:
        operation(weight(RECIPES["mxfp8"]))
    assert "dequantize()" in str(caught.value)


def test_copy_of_another_shape_is_refused() -> None:
    with torch.no_grad(), pytest.raises(ConfigError, match=r"\(96, 64\)"):
        weight(RECIPES["mxfp8"]).copy_(values().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_bf16_is_quantised(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="only bfloat16 weights"):
        QuantisedTensor.from_values(values().to(dtype), RECIPES["mxfp8"])


@EVERY
def test_rebind_moves_the_bytes(recipe: Recipe) -> None:
    param = weight(recipe)
    place = Planes.empty([SHAPE, SHAPE], recipe)
    before = copy.deepcopy(param).planes
    param.rebind(place.one(1))
    assert equal(param.planes, before) and equal(place.one(1), before)
    assert addresses(param.planes) <= addresses(place.one(1)) and not place.one(0).row_data.any()


def test_flatten_and_back() -> None:
    param = weight(RECIPES["delayed"])
    names, context = param.__tensor_flatten__()
    inner = {name: getattr(param, name) for name in names}
    made = QuantisedTensor.__tensor_unflatten__(inner, context, None, None)
    assert equal(made.planes, param.planes)
    with pytest.raises(AttributeError, match="main_grad"):
        _ = param.main_grad
