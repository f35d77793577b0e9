"""Newton-Schulz against the bare products, and batches against single calls. One thread, CPU.

    python -m benchmarks.newton_schulz [--quick]

`ratio` holds our call against the same products with their outputs preallocated, on an input that
is normalised and row-major already. The difference is what a call adds: checks, normalisation,
range safety, gathering a batch, transposing a tall result. `gain` holds a batch against the faster
of two loops over its matrices: our own call and, in bf16, the function in `torch.optim.Muon`, whose
bits are compared on the way. Runs alternate; printed are medians of the CPU time of this process,
which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from megatron_lw.optimizer.children.coefficients import COEFFICIENT_SETS, resolve_coefficients
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.ns_workspace import workspace_numel

STEPS = 5
SINGLE = ((256, 256), (256, 1024), (1024, 256), (512, 512), (512, 2048), (2048, 512), (1024, 1024))
BATCHES = ((64, 32, 128), (64, 64, 256), (64, 256, 64), (16, 128, 512))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PROMISED_RATIO = {256: 0.80, 512: 0.90, 1024: 0.90}
PROMISED_GAIN = {("bf16", 32): 4.0, ("bf16", 64): 2.0}

Row = Mapping[str, float]
Timed = Mapping[str, tuple[Callable[[], object], Callable[[], object]]]


def measure(quick: bool = False) -> dict[str, Row]:
    """Time every case with one thread.

    Args:
        quick: fewer rounds, and no single matrix above a short side of 256.

    Returns:
        Case -> milliseconds, `ratio`, for batches `gain`, and `promise`, which is for the gain of a
        batch and for the ratio of a single matrix, where there is one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results: dict[str, Row] = {}
        for name in DTYPES:
            for rows, columns in SINGLE:
                if not quick or min(rows, columns) <= 256:
                    results[f"{name} {rows}x{columns}"] = _single(name, rows, columns, quick)
            for batch, rows, columns in BATCHES:
                key = f"{name} {batch} of {rows}x{columns}"
                results[key] = _batch(name, batch, rows, columns, quick)
        return results
    finally:
        torch.set_num_threads(threads)


def _single(name: str, rows: int, columns: int, quick: bool) -> Row:
    newton_schulz = _settings(name)
    dtype = newton_schulz.dtype
    x = torch.randn(rows, columns).to(dtype)
    out = torch.empty_like(x)
    workspace = torch.empty(workspace_numel(1, rows, columns), dtype=dtype)
    times = medians(
        {
            "bare": (nothing, bare_products(newton_schulz, x)),
            "ours": (nothing, lambda: newton_schulz(x, out=out, workspace=workspace)),
        },
        rounds=5 if quick else 9,
    )
    promise = PROMISED_RATIO[min(rows, columns)]
    return {**times, "ratio": times["bare"] / times["ours"], "promise": promise}


def _batch(name: str, batch: int, rows: int, columns: int, quick: bool) -> Row:
    newton_schulz = _settings(name)
    dtype = newton_schulz.dtype
    stacked = torch.randn(batch, rows, columns).to(dtype)
    xs = list(stacked.unbind())
    outs = [torch.empty_like(x) for x in xs]
    workspace = torch.empty(workspace_numel(batch, rows, columns), dtype=dtype)

    def loop() -> None:
        for x, out in zip(xs, outs, strict=True):
            newton_schulz(x, out=out, workspace=workspace)

    loops: dict[str, Callable[[], object]] = {"loop": loop}
    if dtype is torch.bfloat16:
        loops["torch"] = lambda: [_torch_muon(x) for x in xs]
    timed: Timed = {
        "bare": (nothing, bare_products(newton_schulz, stacked)),
        **{which: (nothing, call) for which, call in loops.items()},
        "ours": (nothing, lambda: newton_schulz.orthogonalise(xs, outs, workspace)),
    }
    times = medians(timed, rounds=5 if quick else 9)
    for x, out in zip(xs, outs, strict=True):
        if dtype is torch.bfloat16 and not torch.equal(out, _torch_muon(x)):
            raise ArithmeticError(f"{rows} x {columns}: not the bits of torch.optim.Muon")
    gain = min(times[which] for which in loops) / times["ours"]
    row = {**times, "ratio": times["bare"] / times["ours"], "gain": gain}
    promise = PROMISED_GAIN.get((name, min(rows, columns)))
    return row if promise is None else {**row, "promise": promise}


def _settings(name: str) -> NewtonSchulz:
    return NewtonSchulz(resolve_coefficients("simple", STEPS), dtype=DTYPES[name])


def _torch_muon(x: Tensor) -> Tensor:
    # A copy, since that function writes into an input which is in bf16 already (pytorch #190597).
    triple = COEFFICIENT_SETS["simple"].triples[0]
    return _zeropower_via_newtonschulz(x.clone(), triple, STEPS, eps=1e-7)


def bare_products(newton_schulz: NewtonSchulz, x: Tensor) -> Callable[[], object]:
    """The products of one call, nothing else, with their outputs preallocated."""
    short = x if x.size(-2) <= x.size(-1) else x.mT
    first = (short / short.norm(dim=(-2, -1), keepdim=True)).contiguous()
    places = (torch.empty_like(first), torch.empty_like(first))
    gram = torch.empty_like(first @ first.mT)
    update = torch.empty_like(gram)
    multiply, multiply_add = (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)

    def run() -> None:
        current = first
        for step, (a, b, c) in enumerate(newton_schulz.coefficients.triples):
            multiply(current, current.mT, out=gram)
            multiply_add(gram, gram, gram, beta=b, alpha=c, out=update)
            current = multiply_add(current, update, current, beta=a, out=places[step % 2])

    return run


def nothing() -> None:
    """What comes before a call that needs nothing."""


def clock(device: str) -> float:
    """Seconds: CPU time of this process, or on a GPU the time of day once its queue is empty."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def medians(timed: Timed, rounds: int, device: str = "cpu") -> dict[str, float]:
    """Milliseconds of each call, median over alternating rounds after one that warms up.

    Args:
        timed: name -> what comes before, outside the clock, and the call.
        rounds: how often each is called.
        device: where the calls compute.
    """
    times: dict[str, list[float]] = {which: [] for which in timed}
    for _ in range(rounds + 1):
        for which, (before, call) in timed.items():
            before()
            start = clock(device)
            call()
            times[which].append((clock(device) - start) * 1e3)
    return {which: statistics.median(values[1:]) for which, values in times.items()}


def table(results: Mapping[str, Row]) -> str:
    """One line a case: milliseconds, ratio or gain, and the promise."""
    columns = ("bare", "ours", "loop", "torch", "ratio", "gain", "promise")
    lines = [f"{'milliseconds, one thread':26}" + "".join(f"{column:>10}" for column in columns)]
    for case, row in results.items():
        cells = (f"{row[c]:10.3f}" if c in row else " " * 10 for c in columns)
        promised = row.get("gain", row["ratio"]) >= row.get("promise", 0.0)
        lines.append(f"{case:26}" + "".join(cells) + ("" if promised else "  not met"))
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no large matrices")
    print(table(measure(parser.parse_args().quick)))


if __name__ == "__main__":
    main()
