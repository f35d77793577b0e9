"""`Linear` and `quantize_model`: which plane is read when, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import megatron_lw
from megatron_lw import fp8
from megatron_lw.errors import ConfigError
from megatron_lw.fp8.quantise import dequantise
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.optimizer.describe import describe
from tests.unit.test_fp8_numerics import EVERY, RECIPES

BF16 = torch.bfloat16


def layer(recipe: Recipe, bias: bool = True) -> fp8.Linear:
    torch.manual_seed(0)
    made = fp8.quantize_model(nn.Linear(96, 64, bias=bias, dtype=BF16), recipe)
    assert isinstance(made, fp8.Linear)
    return made


def run(made: nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Output, gradient of the input, gradients of the parameters."""
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(1)).to(BF16)
    x.requires_grad_()
    made.zero_grad()
    out = made(x)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(BF16))
    assert x.grad is not None
    return out.detach(), x.grad, {n: p.grad for n, p in made.named_parameters()}


@EVERY
@pytest.mark.parametrize("bias", [True, False])
def test_it_equals_a_bf16_layer_with_the_values_of_its_planes(recipe: Recipe, bias: bool) -> None:
    """Class *bitwise*: the output with the row-wise values, the rest with the column-wise ones."""
    made = layer(recipe, bias)
    for plane, pick in (("row", 0), ("col", 1)):
        plain = nn.Linear(96, 64, bias=bias, dtype=BF16)
        with torch.no_grad():
            plain.weight.copy_(dequantise(made.weight.planes, BF16, plane))
            if bias:
                plain.bias.copy_(made.bias)
        ours, theirs = run(made), run(plain)
        assert torch.equal(ours[pick], theirs[pick]) and ours[pick].any()
    assert ours[2].keys() == theirs[2].keys()
    for name, grad in ours[2].items():
        assert type(grad) is torch.Tensor and torch.equal(grad, theirs[2][name]) and grad.any()


@EVERY
def test_forward_reads_the_row_wise_plane_and_backward_the_column_wise_one(recipe: Recipe) -> None:
    out, grad, grads = run(layer(recipe))
    for plane in ("row", "col"):
        for what in ("data", "scale"):
            made = layer(recipe)
            tensor = made.weight.planes.tensors()[f"{plane}_{what}"]
            tensor.copy_(tensor.flip(0) if what == "data" else tensor + 3)
            spoilt = run(made)
            assert torch.equal(out, spoilt[0]) == (plane == "col"), what
            assert torch.equal(grad, spoilt[1]) == (plane == "row"), what
            assert torch.equal(grads["weight"], spoilt[2]["weight"])


@pytest.mark.parametrize("name", ["tensor", "delayed"])
def test_scaled_mm_multiplies_bytes(name: str) -> None:
    """Class *numerical*: activations are quantised too, E4M3 forward and E5M2 backward."""
    made = layer(RECIPES[name])
    plain = run(made)
    made.matmul = "scaled_mm"
    scaled = run(made)
    for exact, found, bound in zip(plain[:2], scaled[:2], (0.04, 0.08), strict=True):
        error = float((exact.float() - found.float()).norm() / exact.float().norm())
        assert 0 < error < bound
    assert torch.equal(plain[2]["weight"], scaled[2]["weight"])
    for plane in ("row", "col"):
        spoilt = copy.deepcopy(made)
        data = spoilt.weight.planes.tensors()[f"{plane}_data"]
        data.copy_(data.flip(0))
        out, grad, _ = run(spoilt)
        assert torch.equal(out, scaled[0]) == (plane == "col")
        assert torch.equal(grad, scaled[1]) == (plane == "row")


@pytest.mark.parametrize("matmul", ["dequantise", "scaled_mm"])
def test_no_tokens(matmul: str) -> None:
    """An expert may get none."""
    made = layer(RECIPES["tensor"])
    made.matmul = matmul
    x = torch.zeros(0, 96, dtype=BF16, requires_grad=True)
    out = made(x)
    out.sum().backward()
    assert out.shape == (0, 64) and x.grad is not None and x.grad.shape == (0, 96)
    assert not made.weight.grad.any() and not made.bias.grad.any()


def test_scaled_mm_needs_one_scale() -> None:
    made = layer(RECIPES["mxfp8"])
    made.matmul = "scaled_mm"
    with pytest.raises(ConfigError, match="scaled_mm"):
        run(made)


def test_input_dtypes() -> None:
    made = layer(RECIPES["mxfp8"])
    x = torch.randn(2, 96)
    with pytest.raises(ConfigError, match=r"torch\.float32"):
        made(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made(x), made(x.to(BF16)))


def test_functional_linear_and_dequantize_pass_gradients() -> None:
    made = layer(RECIPES["block"], bias=False)
    x = torch.randn(4, 96).to(BF16)
    seen = []
    for product in (
        lambda: functional.linear(x, made.weight),
        lambda: functional.linear(input=x, weight=made.weight),
        lambda: x @ made.weight.dequantize().t(),
    ):
        made.zero_grad()
        out = product()
        out.sum().backward()
        seen.append((out.detach(), made.weight.grad))
    for out, grad in seen[1:]:
        assert torch.equal(out, seen[0][0]) and torch.equal(grad, seen[0][1]) and grad.any()


def test_recomputed_activations_read_the_planes_of_their_moment() -> None:
    made = layer(RECIPES["mxfp8"])
    x = torch.randn(2, 96).to(BF16).requires_grad_()
    torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False).sum().backward()
    again = torch.autograd.grad(made(x).sum(), x)[0]
    assert x.grad is not None and torch.equal(x.grad, again)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32, dtype=BF16)
        self.up = nn.Linear(32, 64, dtype=BF16)
        self.down = nn.Linear(64, 32, bias=False, dtype=BF16)
        self.head = nn.Linear(32, 8, bias=False, dtype=BF16)


def test_quantize_model_takes_linear_layers_and_keeps_the_rest() -> None:
    torch.manual_seed(0)
    model = Block()
    before = {name: param.clone() for name, param in model.named_parameters()}
    megatron_lw.annotate(model.up.weight, output=True)
    model.eval()
    made = fp8.quantize_model(model, "mxfp8", lambda name, m: name in ("up", "down"))
    assert made is model
    kinds = {name: isinstance(p, fp8.QuantisedTensor) for name, p in model.named_parameters()}
    assert [name for name, found in kinds.items() if found] == ["up.weight", "down.weight"]
    assert list(kinds) == list(before)
    assert isinstance(model.up, fp8.Linear) and not model.up.training
    assert torch.equal(model.up.weight.initial, before["up.weight"])
    assert torch.equal(model.up.bias, before["up.bias"])
    assert "weight=mxfp8" in repr(model)
    roles = {i.name: i.role for i in describe([model], megatron_lw.ParallelGroups.single()).infos}
    assert roles["up.weight"] == "output" and roles["down.weight"] == "matrix"


class Scaled(nn.Module):
    """No linear layer of torch's, but it uses functional.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32).to(BF16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * functional.linear(x, self.weight)


def test_quantize_model_takes_other_modules_by_the_predicate() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(32, 32, dtype=BF16))
    fp8.quantize_model(model, Recipe(format="block"), lambda _, m: isinstance(m, Scaled))
    assert isinstance(model[0], Scaled) and isinstance(model[0].weight, fp8.QuantisedTensor)
    assert not model[0].weight.requires_grad and type(model[1]) is nn.Linear
    x = torch.randn(3, 32).to(BF16)
    assert torch.equal(model[0](x), 2 * functional.linear(x, model[0].weight.dequantize()))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(64, 32, dtype=BF16), nn.Linear(32, 64, dtype=BF16))
    model[1].weight = model[0].weight
    return model


class Foreign(torch.Tensor):
    """A tensor that handles operations in its own way."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.zeros(4, 4).as_subclass(cls)


def test_tensors_of_other_kinds_are_refused_by_name() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(Foreign))
    with pytest.raises(ConfigError, match=r"'weight' is a Foreign"):
        describe([model], megatron_lw.ParallelGroups.single())


@pytest.mark.parametrize(
    ("model", "predicate", "words"),
    [
        (lambda: nn.Linear(32, 32), None, "float32"),
        (lambda: nn.Sequential(nn.Linear(40, 32, dtype=BF16)), None, "module '0'.*multiples of 32"),
        (tied, None, "used by another module"),
        (lambda: nn.LayerNorm(32), None, "no module"),
        (lambda: nn.Sequential(nn.ReLU()), lambda n, _: n == "0", "no parameter 'weight'"),
        (lambda: nn.LayerNorm(32, dtype=BF16), lambda *_: True, "matrices"),
    ],
)
def test_what_cannot_be_quantised_is_named(model, predicate, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fp8.quantize_model(model(), "mxfp8", predicate)
