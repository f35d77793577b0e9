"""FP8 on a GPU: the bytes of the CPU, no waiting for the device, products of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import megatron_lw
from megatron_lw import fp8
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
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.runs import Part, plan_runs, whole_parts
from tests.gpu.wrapped import wrap
from tests.unit.test_fp8_numerics import DTYPES, EVERY, KINDS, hard_values

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CONFIG = {"optimizer": "muon", "lr": 0.01, "bf16": True}
DEVICE = "cuda"
SHAPES = ((96, 160), (32, 256), (32, 256), (288, 64))
COUNTS = [rows * cols for rows, cols in SHAPES]
STARTS = [sum(COUNTS[:i]) for i in range(len(COUNTS))]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same(found: Planes, wanted: Planes) -> None:
    for name, tensor in wanted.tensors().items():
        assert torch.equal(found.tensors()[name].cpu(), tensor), name


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@EVERY
def test_a_gpu_gives_the_bytes_of_the_cpu(recipe: Recipe, kind: str, dtype: torch.dtype) -> None:
    """Class *bitwise*: matrices of several shapes in one call, both planes, and their values."""
    values = hard_values(kind, sum(COUNTS), dtype)
    wanted = quantise_bucket(values, SHAPES, STARTS, recipe)
    on_device = values.to(DEVICE)
    runs = plan_runs(whole_parts(SHAPES, STARTS), wanted.layout)
    found = Planes.empty(SHAPES, recipe, DEVICE)
    with no_waiting():
        quantise(on_device, runs, found, "restart")
    same(found, wanted)
    for index in range(len(SHAPES)):
        for plane in ("row", "col"):
            ours = dequantise(found, BF16, plane, index).cpu()
            theirs = dequantise(wanted, BF16, plane, index)
            assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@EVERY
def test_rows_that_cut_a_matrix_give_the_same_bytes(recipe: Recipe) -> None:
    """Class *bitwise*: maxima of two rows, the larger of each, then each row casts its part."""
    if recipe.format == "mxfp8":
        pytest.skip("both planes need whole matrices, or the row-wise one travels by itself")
    values = hard_values("wide", sum(COUNTS), BF16)
    wanted = quantise_bucket(values, SHAPES, STARTS, recipe)
    found = Planes.empty(SHAPES, recipe, DEVICE)
    cut = STARTS[3] + 64 * 100 + 37  # inside a row of blocks of the last matrix
    first = [*whole_parts(SHAPES, STARTS)[:3], _part(0, cut - STARTS[3], STARTS[3])]
    second = [_part(cut - STARTS[3], sum(COUNTS) - cut, 0)]
    on_device = values.to(DEVICE)
    rows = [
        (on_device[:cut], plan_runs(first, found.layout)),
        (on_device[cut:], plan_runs(second, found.layout)),
    ]
    with no_waiting():
        maxima = torch.stack([measure(row, runs, found.layout) for row, runs in rows]).amax(0)
        multipliers = set_scales(found, maxima, BF16, "restart")
        for row, runs in rows:
            for run in runs:
                at = found.layout.data[run.matrix] + run.start
                out = found.row_data[at : at + run.numel]
                cast_run(row, run, multipliers, found.layout, out)
        derive_columns(found)
    same(found, wanted)


def _part(start: int, numel: int, offset: int) -> Part:
    return Part(matrix=3, start=start, numel=numel, offset=offset)


@EVERY
def test_all_work_is_on_the_current_stream(recipe: Recipe) -> None:
    """Class *bitwise*: work elsewhere would read the values before they are doubled."""
    values = hard_values("wide", sum(COUNTS), BF16)
    wanted = quantise_bucket(values * 2, SHAPES, STARTS, recipe)
    made = values.to(DEVICE)
    runs = plan_runs(whole_parts(SHAPES, STARTS), wanted.layout)
    found = Planes.empty(SHAPES, recipe, DEVICE)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        quantise(made.mul_(2), runs, found, "restart")
    side.synchronize()
    same(found, wanted)


def _run(made: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    made.zero_grad()
    out = made(x)
    out.backward(grad)
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in made.parameters() if p.grad is not None)]


def _layer(recipe: str, matmul: str = "auto", device: str = DEVICE) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Linear(256, 128, dtype=BF16).to(device)  # the same on any device
    made = fp8.quantize_model(plain, recipe)
    made.matmul = matmul
    return made


def _close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    assert wanted.any()
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert float(error) < bound


@pytest.mark.parametrize("recipe", ["tensor", "delayed"])
def test_bytes_are_multiplied_where_the_gpu_can(recipe: str) -> None:
    """Class *numerical*: activations are quantised too. "auto" takes that kernel, bit by bit."""
    x, grad = torch.randn(3, 40, 256), torch.randn(3, 40, 128)
    x, grad = x.to(DEVICE, BF16), grad.to(DEVICE, BF16)
    plain = _run(_layer(recipe, "dequantise"), x, grad)
    auto = _run(_layer(recipe), x, grad)
    if torch.cuda.get_device_capability() < (8, 9):
        assert all(torch.equal(one, other) for one, other in zip(plain, auto, strict=True))
        return
    scaled = _run(_layer(recipe, "scaled_mm"), x, grad)
    assert all(torch.equal(one, other) for one, other in zip(scaled, auto, strict=True))
    assert not torch.equal(plain[0], scaled[0])
    for found, wanted, bound in zip(scaled, plain, (0.04, 0.08, 0.001, 0.001), strict=True):
        _close(found, wanted, bound)


def test_bytes_that_are_not_aligned_are_not_multiplied() -> None:
    """Class *bitwise*: behind a matrix of 63 bytes, cuBLAS could not read them."""
    x, grad = torch.randn(40, 256, device=DEVICE).to(BF16), torch.randn(40, 128, device=DEVICE)
    made = _layer("tensor")
    made.weight.rebind(Planes.empty([(7, 9), (128, 256)], made.weight.recipe, DEVICE).one(1))
    found = _run(made, x, grad.to(BF16))
    wanted = _run(_layer("tensor", "dequantise"), x, grad.to(BF16))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("recipe", ["block", "mxfp8", "mxfp8-2d"])
def test_weights_with_blocks_are_multiplied_in_bf16(recipe: str) -> None:
    """Class *numerical*: against the CPU, of the same bytes."""
    x, grad = torch.randn(40, 256).to(BF16), torch.randn(40, 128).to(BF16)
    found = _run(_layer(recipe), x.to(DEVICE), grad.to(DEVICE))
    wanted = _run(_layer(recipe, device="cpu"), x, grad)
    for ours, theirs in zip(found, wanted, strict=True):
        _close(ours.cpu(), theirs, 0.01)


def _swizzled(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[rows, blocks]` in the order that cuBLAS reads: tiles of 128 x 4, as 32 x 4 x 4."""
    rows, cols = codes.shape
    tall, broad = -(-rows // 128), -(-cols // 4)
    padded = codes.new_zeros(tall * 128, broad * 4)
    padded[:rows, :cols] = codes
    tiles = padded.view(tall, 4, 32, broad, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-2d"])
def test_the_gpu_reads_our_mxfp8_planes(recipe: str) -> None:
    """Class *numerical*: a product of row-wise planes on GPUs that multiply MXFP8."""
    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("MXFP8 products need compute capability 10.0")
    matrices = torch.randn(2, 128, 256, device=DEVICE).to(BF16)
    planes = [
        quantise_bucket(m.view(-1), [(128, 256)], [0], Recipe(format=recipe)) for m in matrices
    ]
    data = [p.row_data.view(128, 256).view(torch.float8_e4m3fn) for p in planes]
    high = 1 if recipe == "mxfp8" else 32
    codes = [p.row_scale.view(-1, 8).repeat_interleave(high, 0) for p in planes]
    left, right = (_swizzled(each) for each in codes)
    found = torch._scaled_mm(data[0], data[1].t(), scale_a=left, scale_b=right, out_dtype=BF16)
    values = [dequantise(p, torch.float32) for p in planes]
    _close(found, values[0].double() @ values[1].double().t(), 0.005)


@pytest.mark.parametrize("recipe", ["mxfp8", "block", "delayed"])
def test_training_with_and_without_overlap(recipe: str) -> None:
    """Class *bitwise*: on one GPU; published bytes are those that a CPU makes of the masters."""
    runs = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(128, 256, dtype=BF16, device=DEVICE),
            nn.GELU(),
            nn.Linear(256, 128, dtype=BF16, device=DEVICE),
        )
        fp8.quantize_model(model, recipe, matmul="dequantise")
        ddp, optimizer = wrap(model, CONFIG, overlap=overlap, fp8_param_gather=True)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(16, 128, generator=torch.Generator().manual_seed(step))
            loss = ddp(x.to(DEVICE, BF16)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        optimizer.check()
        runs.append((losses, [t.clone() for b in ddp.buckets for t in b.weight_tensors()]))
        for bucket, publisher in zip(ddp.buckets, ddp.publishers, strict=True):
            _as_on_cpu(bucket, publisher.master.row)
    assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) == 4
    assert all(torch.equal(one, other) for one, other in zip(runs[0][1], runs[1][1], strict=True))


def _as_on_cpu(bucket: megatron_lw.distributed.buffers.BucketBuffer, row: torch.Tensor) -> None:
    for name, slot in bucket.row_slots():
        param = bucket.params[name]
        if not isinstance(param, fp8.QuantisedTensor):
            continue
        values = row[slot.row_start : slot.row_start + slot.numel].cpu().to(BF16)
        made = Planes.empty([tuple(param.shape)], param.recipe)
        if made.history is not None:
            made.history.copy_(param.planes.history)
        runs = plan_runs(whole_parts(made.layout.shapes, [0]), made.layout)
        quantise(values, runs, made, "keep")
        same(param.planes, made)


def test_casts_of_every_bf16_number() -> None:
    """Class *bitwise*: also those beyond 448, which the CPU's cast saturates by itself."""
    numbers = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(BF16)
    for values in (numbers, numbers.float()):
        found = torch.empty(1 << 16, dtype=torch.uint8, device=DEVICE)
        wanted = torch.empty(1 << 16, dtype=torch.uint8)
        rules.cast(values.to(DEVICE), found)
        rules.cast(values.clone(), wanted)
        assert torch.equal(found.cpu(), wanted)
