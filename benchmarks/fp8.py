"""Quantise many small weights in one call and one by one; a large bucket against torchao.

    OMP_NUM_THREADS=1 python benchmarks/fp8.py [--device cuda] [--json FILE]

Prints nanoseconds of processor time an element, the best of several runs on one thread; on a GPU
the time of day until its queue is empty. torchao's column is empty where torchao is not installed.
On a GPU also a linear layer, forward and backward: BF16, FP8 weights whose values
are multiplied in BF16, and FP8 weights whose bytes are (`torch._scaled_mm`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_lw.fp8.linear import quantize_model
from megatron_lw.fp8.quantise import quantise
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.runs import plan_runs, whole_parts
from megatron_lw.fp8.tensor import QuantisedTensor
from megatron_lw.fp8.weights import QuantisedWeights

SMALL, NUM_SMALL, LARGE, RUNS = 256, 200, 2048, 5
LAYER, TOKENS = (8192, 4096), 8192
SCALED_CAPABILITY = (8, 9)
FORMATS = (
    Recipe(format="mxfp8"),
    Recipe(format="mxfp8-2d"),
    Recipe(format="block"),
    Recipe(format="tensor"),
)


def now(device: str) -> float:
    """Processor time of this thread in seconds, or the time of day once a GPU's queue is empty."""
    if device == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def best(call: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    call()
    times = []
    for _ in range(RUNS):
        start = now(device)
        call()
        times.append(now(device) - start)
    return min(times)


def small(recipe: Recipe, device: str) -> tuple[float, float]:
    """Seconds for all small weights in one call, and by `copy_` of each tensor."""
    values = torch.randn(NUM_SMALL * SMALL * SMALL, device=device).bfloat16()
    matrices = values.view(NUM_SMALL, SMALL, SMALL)
    tensors = [QuantisedTensor.from_values(each, recipe) for each in matrices]
    one_by_one = best(lambda: [t.copy_(v) for t, v in zip(tensors, matrices, strict=True)], device)
    weights = QuantisedWeights({str(i): tensor for i, tensor in enumerate(tensors)})
    layout = weights.planes.layout
    runs = plan_runs(whole_parts(layout.shapes, layout.data[:-1]), layout)
    return best(lambda: quantise(values, runs, weights.planes), device), one_by_one


def large(recipe: Recipe, device: str) -> float:
    """Seconds for both planes of one large matrix."""
    values = torch.randn(LARGE * LARGE, device=device).bfloat16()
    weights = QuantisedWeights(
        {"w": QuantisedTensor.from_values(values.view(LARGE, LARGE), recipe)}
    )
    layout = weights.planes.layout
    runs = plan_runs(whole_parts(layout.shapes, [0]), layout)
    return best(lambda: quantise(values, runs, weights.planes), device)


def layers(device: str) -> dict[str, float]:
    """Seconds of a linear layer, forward and backward, by how it multiplies; for a GPU."""
    rows, cols = LAYER
    torch.manual_seed(0)
    x = torch.randn(TOKENS, cols, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(TOKENS, rows, device=device, dtype=torch.bfloat16)
    plain = nn.Linear(cols, rows, bias=False, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        plain.weight.normal_(0.0, 0.02)
    made: dict[str, nn.Module] = {"bf16": plain}
    has_bytes = torch.cuda.get_device_capability(device) >= SCALED_CAPABILITY
    for how in ("dequantise", "scaled_mm") if has_bytes else ("dequantise",):
        layer = nn.Linear(cols, rows, bias=False, dtype=torch.bfloat16, device=device)
        layer.load_state_dict(plain.state_dict())
        made[how] = quantize_model(layer, "tensor", matmul=how)  # type: ignore[arg-type]
    found = {}
    for name, layer in made.items():

        def both(layer: nn.Module = layer) -> None:
            layer(x).backward(grad)
            x.grad = None
            layer.zero_grad(set_to_none=True)

        found[name] = best(both, device)
    return found


def torchao(device: str) -> float | None:
    """Seconds of torchao's `to_mx` of the matrix and of its transpose; None without torchao."""
    if importlib.util.find_spec("torchao") is None:
        return None
    formats: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    mode = formats.ScaleCalculationMode.RCEIL
    values = torch.randn(LARGE, LARGE, device=device).bfloat16()

    def both() -> None:
        for each in (values, values.t().contiguous()):
            formats.to_mx(each, torch.float8_e4m3fn, 32, mode)

    return best(both, device)


def measure(device: str) -> dict[str, dict[str, float]]:
    """Nanoseconds an element of each recipe; on a GPU also milliseconds of each layer."""
    torch.set_num_threads(1)
    theirs = torchao(device)
    found: dict[str, dict[str, float]] = {}
    for recipe in FORMATS:
        batched, single = small(recipe, device)
        count = NUM_SMALL * SMALL * SMALL
        row = {
            "one call": batched / count * 1e9,
            "copy_ each": single / count * 1e9,
            "ratio": single / batched,
            "large": large(recipe, device) / LARGE**2 * 1e9,
        }
        found[recipe.format] = (
            row if theirs is None else {**row, "torchao": theirs / LARGE**2 * 1e9}
        )
    if device != "cpu":
        times = layers(device)
        found |= {
            f"layer, {name}": {"ms": 1e3 * seconds, "ratio": times["bf16"] / seconds}
            for name, seconds in times.items()
        }
    return found


def main() -> None:
    """Measure, print, optionally write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    found = measure(options.device)
    print(f"{NUM_SMALL} weights of {SMALL}x{SMALL}, ns an element; {LARGE}x{LARGE}, both planes")
    columns = ("one call", "copy_ each", "ratio", "large", "torchao", "ms")
    print(f"{'':20}" + "".join(f"{column:>11}" for column in columns))
    for name, row in found.items():
        cells = (f"{row[column]:11.2f}" if column in row else " " * 11 for column in columns)
        print(f"{name:20}" + "".join(cells))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
