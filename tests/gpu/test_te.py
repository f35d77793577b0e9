"""Transformer Engine's own kernels: the bytes that ours should be, and a model of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_lw.fp8.planes import Planes
from megatron_lw.fp8.quantise import quantise_bucket
from megatron_lw.fp8.te import read_planes, recipe_of
from tests.gpu.wrapped import wrap

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CONFIG = {"optimizer": "muon", "lr": 0.01, "bf16": True}
SHAPE = (256, 384)
# The first compute capability whose kernels quantise to it.
CAPABILITY = {"tensor": (8, 9), "block": (9, 0), "mxfp8": (10, 0)}
EVERY = pytest.mark.parametrize("kind", CAPABILITY)


@pytest.fixture
def te(kind: str) -> Any:
    module = pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    if torch.cuda.get_device_capability() < CAPABILITY[kind]:
        pytest.skip(f"{kind} needs compute capability {CAPABILITY[kind]}")
    return module


def quantizer(te: Any, kind: str) -> Any:
    code = te.DType.kFloat8E4M3
    if kind == "tensor":
        return te.Float8CurrentScalingQuantizer(code, torch.device("cuda"))
    if kind == "block":
        return te.Float8BlockQuantizer(code, rowwise=True, columnwise=True)
    return te.MXFP8Quantizer(code)


@EVERY
def test_its_kernels_give_our_bytes(te: Any, kind: str) -> None:
    """Class *bitwise*: bytes and scales of both planes, of values of every size."""
    values = torch.randn(SHAPE, device="cuda")
    values = (values * torch.exp2(torch.randint(-30, 30, SHAPE, device="cuda"))).to(BF16)
    made = quantizer(te, kind)(values)
    recipe = recipe_of("w", made)
    assert recipe is not None and recipe.format == kind
    found = Planes.empty([SHAPE], recipe, "cuda")
    read_planes("w", made, found)
    wanted = quantise_bucket(values.view(-1), [SHAPE], [0], recipe)
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name


def recipe_for(kind: str) -> Any:
    from transformer_engine.common import recipe

    return {
        "tensor": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }[kind]()


@EVERY
def test_a_model_of_its_layers_trains(te: Any, kind: str) -> None:
    """Class *bitwise*: overlap on and off; check() finds its buffers to be those of the masters."""
    runs = []
    for overlap in (False, True):
        torch.manual_seed(0)
        with te.quantized_model_init(
            recipe=recipe_for(kind), preserve_high_precision_init_val=True
        ):
            layers = [te.Linear(256, 256, params_dtype=BF16, device="cuda") for _ in range(2)]
        model = nn.Sequential(*layers)
        ddp, optimizer = wrap(model, CONFIG, overlap=overlap, fp8_param_gather=True)
        assert all(bucket.quantised for bucket in ddp.buckets if "0.weight" in bucket.params)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to("cuda", BF16)
            with te.autocast(enabled=True, recipe=recipe_for(kind)):
                loss = ddp(x).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.check()
        runs.append((losses, [t.clone() for b in ddp.buckets for t in b.weight_tensors()]))
    assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) == 4
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))
