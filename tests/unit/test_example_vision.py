"""The vision tower of the examples: its rotary frequencies on the meta device, its positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.example_modules import example

gpt = example("gpt")
vision = example("vision")

HEAD = 16
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001])
"""10000^(-4 i / 16)."""


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return vision.VisionTower()


def check_frequencies(tower: torch.nn.Module) -> None:
    """Bitwise those of a rotary built on the CPU; those are the formula's to fp32's precision."""
    found = tower.rotary.frequencies
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    assert torch.equal(found, vision.GridRotary(HEAD).frequencies)
    torch.testing.assert_close(found, FREQUENCIES, rtol=1e-6, atol=0)
    assert [name for name, _ in tower.named_buffers()] == ["rotary.frequencies"]
    assert not any("rotary" in name for name in tower.state_dict())


def test_frequencies_are_real_on_the_meta_device() -> None:
    tower = on_meta()
    assert {weight.device.type for weight in tower.parameters()} == {"meta"}
    check_frequencies(tower)


CONVERSIONS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "to_empty": lambda tower: tower.to_empty(device="cpu"),
    "bfloat16": lambda tower: tower.bfloat16(),
    "bfloat16, to_empty": lambda tower: tower.bfloat16().to_empty(device="cpu"),
    "to_empty, half, float": lambda tower: tower.to_empty(device="cpu").half().float(),
    "to meta": lambda tower: tower.to("meta"),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_frequencies_stay_what_they_are(convert: Callable[..., torch.nn.Module]) -> None:
    """Whatever is done to the tower; rounded to bf16, or left as memory was, they would differ."""
    assert not torch.equal(FREQUENCIES.bfloat16().float(), FREQUENCIES)
    for tower in (on_meta(), vision.VisionTower()):
        check_frequencies(convert(tower))


def test_a_default_dtype_does_not_reach_the_frequencies() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        tower = vision.VisionTower()
    finally:
        torch.set_default_dtype(torch.float32)
    assert tower.patches.weight.dtype == torch.bfloat16
    check_frequencies(tower)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tower_from_meta_is_the_one_built_in_memory(dtype: torch.dtype) -> None:
    """Bitwise, weights and logits: nothing is left of what memory held before."""
    torch.manual_seed(3)
    direct = vision.VisionTower().to(dtype)
    direct.reset_parameters()
    tower = on_meta().to(dtype).to_empty(device="cpu")
    for weight in tower.parameters():
        weight.data.fill_(float("nan"))
    for model in (direct, tower):
        torch.manual_seed(5)
        model.reset_parameters()
    images = torch.randn(2, vision.SIDE, vision.SIDE)
    assert all(map(torch.equal, direct.state_dict().values(), tower.state_dict().values()))
    logits = tower(images)
    assert logits.dtype == torch.float32 and logits.isfinite().all() and logits.any()
    assert torch.equal(logits, direct(images))


def test_scores_depend_on_the_difference_of_rows_and_of_columns() -> None:
    """Numerical, 1e-5: a query and a key of equal values everywhere, on a grid of 4 x 4."""
    cos, sin = vision.GridRotary(HEAD)(4)
    query, key = torch.randn(2, 1, HEAD).expand(2, 16, HEAD)
    scores = scored(gpt.rotate(query, cos, sin), gpt.rotate(key, cos, sin))
    moved, stayed = scores[1:, 1:, 1:, 1:], scores[:3, :3, :3, :3]
    torch.testing.assert_close(moved, stayed, rtol=1e-5, atol=1e-5)
    assert (scores[0, 0, 0, 1] - scores[0, 0, 1, 0]).abs() > 1e-3, "rows are not columns"
    assert (scores[0, 0, 0, 1] - scores[0, 0, 0, 2]).abs() > 1e-3


def scored(query: Tensor, key: Tensor) -> Tensor:
    """Scores [row, column, row, column] of queries and keys."""
    return (query @ key.T).unflatten(1, (4, 4)).unflatten(0, (4, 4))


def test_the_tower_sees_every_patch_both_ways() -> None:
    """No causal mask: the first patch attends to the last one's pixels."""
    torch.manual_seed(0)
    block = vision.VisionTower(width=64, heads=4).blocks[0]
    torch.nn.init.normal_(block.attention.output.weight, std=0.1)
    x = torch.randn(1, 16, 64, requires_grad=True)
    tables = vision.GridRotary(HEAD)(4)
    [gradient] = torch.autograd.grad(block(x, *tables)[0, 0].sum(), x)
    assert gradient.abs().sum(dim=-1).gt(0).all()


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="width is 40: it must be a multiple of 4 x heads = 16"):
        vision.VisionTower(width=40)
