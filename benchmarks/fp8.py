"""Quantise many small weights in one call and one by one; a large bucket against torchao.

    OMP_NUM_THREADS=1 python benchmarks/fp8.py

Prints nanoseconds of processor time an element, the best of several runs on one thread. torchao's
column is empty where torchao is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_lw.fp8.quantise import quantise
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.fp8.runs import plan_runs, whole_parts
from megatron_lw.fp8.tensor import QuantisedTensor
from megatron_lw.fp8.weights import QuantisedWeights

SMALL, NUM_SMALL, LARGE, RUNS = 256, 200, 2048, 5
FORMATS = (
    Recipe(format="mxfp8"),
    Recipe(format="mxfp8-2d"),
    Recipe(format="block"),
    Recipe(format="tensor"),
)


def best(call: Callable[[], object]) -> float:
    """Processor seconds of the fastest of several runs, after one to warm up."""
    call()
    times = []
    for _ in range(RUNS):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def small(recipe: Recipe) -> tuple[float, float]:
    """Seconds for all small weights in one call, and by `copy_` of each tensor."""
    values = torch.randn(NUM_SMALL * SMALL * SMALL).bfloat16()
    matrices = values.view(NUM_SMALL, SMALL, SMALL)
    tensors = [QuantisedTensor.from_values(each, recipe) for each in matrices]
    one_by_one = best(lambda: [t.copy_(v) for t, v in zip(tensors, matrices, strict=True)])
    weights = QuantisedWeights({str(i): tensor for i, tensor in enumerate(tensors)})
    layout = weights.planes.layout
    runs = plan_runs(whole_parts(layout.shapes, layout.data[:-1]), layout)
    return best(lambda: quantise(values, runs, weights.planes)), one_by_one


def large(recipe: Recipe) -> float:
    """Seconds for both planes of one large matrix."""
    values = torch.randn(LARGE * LARGE).bfloat16()
    weights = QuantisedWeights(
        {"w": QuantisedTensor.from_values(values.view(LARGE, LARGE), recipe)}
    )
    layout = weights.planes.layout
    runs = plan_runs(whole_parts(layout.shapes, [0]), layout)
    return best(lambda: quantise(values, runs, weights.planes))


def torchao() -> float | None:
    """Seconds of torchao's `to_mx` of the matrix and of its transpose; None without torchao."""
    if importlib.util.find_spec("torchao") is None:
        return None
    formats: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    mode = formats.ScaleCalculationMode.RCEIL
    values = torch.randn(LARGE, LARGE).bfloat16()

    def both() -> None:
        for each in (values, values.t().contiguous()):
            formats.to_mx(each, torch.float8_e4m3fn, 32, mode)

    return best(both)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    theirs = torchao()
    print(f"{NUM_SMALL} weights of {SMALL}x{SMALL}, ns an element; {LARGE}x{LARGE}, both planes")
    print(
        f"{'recipe':10} {'one call':>9} {'copy_ each':>11} {'ratio':>6} {'large':>7} {'torchao':>8}"
    )
    for recipe in FORMATS:
        batched, single = small(recipe)
        count = NUM_SMALL * SMALL * SMALL
        other = "" if theirs is None else f"{theirs / LARGE**2 * 1e9:8.2f}"
        print(
            f"{recipe.format:10} {batched / count * 1e9:9.2f} {single / count * 1e9:11.2f} "
            f"{single / batched:6.2f} {large(recipe) / LARGE**2 * 1e9:7.2f} {other:>8}"
        )


if __name__ == "__main__":
    main()
