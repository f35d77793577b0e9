"""Muon on one core: against torch's, against itself in Gram space, product by product.

    python benchmarks/muon.py [--quick] [--device cuda] [--json FILE]

- step: `LayerWiseDistributedOptimizer` on one process, everything that a step does (reduce, norm,
  check of finiteness, exchange of nothing, publish), against `torch.optim.Muon` on the same fp32
  weights; bf16 products, five steps of the `simple` polynomial. Matrices: one layer of gpt2-124m,
  one of llama3-8b with its sides divided by 4, and many small ones. The weights of both are
  compared bit by bit on the way.
- gram: the Gram-space iteration against our standard one, fp32, on matrices of 1:4.
- products: the sequence of bare products with preallocated outputs against our call.
- emerging: the same step against `emerging_optimizers`, where that is installed (Python 3.12).
- variants: a step of each, on one layer of gpt2-124m with its sides divided by 2, over Muon's.

Printed are medians of the CPU time of this process over rounds in which the contenders take turns.
On a GPU there is the step alone, of whole layers, in time until its queue is empty, with the
relative difference of the weights: batches are multiplied by other kernels there than single
matrices.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatron_lw
import newton_schulz
from megatron_lw.optimizer.children.coefficients import resolve_coefficients
from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz
from megatron_lw.optimizer.children.ns_workspace import workspace_numel
from megatron_lw.presets import model_params, preset

LR, DECAY, MOMENTUM = 1e-3, 0.1, 0.95
SMALL = [(32, 128)] * 256
LESS_SMALL = [(64, 256)] * 64
LONG = ((256, 1024), (512, 2048), (768, 3072))
PRODUCTS = ((256, 1024), (512, 2048), (768, 768), (768, 3072))
PROMISED_STEP = {"gpt2-124m layer": 1.0, "llama3-8b layer / 4": 1.0, "256 of 32x128": 4.0}
PROMISED_GRAM = 1.5
PROMISED_PRODUCTS = {256: 0.80, 512: 0.90, 768: 0.90}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "muon": {"optimizer": "muon"},
    "muon, cautious decay": {"optimizer": "muon", "weight_decay_mode": "cautious"},
    "normuon": {"optimizer": "normuon"},
    "adamuon": {"optimizer": "adamuon"},
    "adam": {"optimizer": "adam"},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "whole: torch.optim:Adagrad": {
        "optimizer": "whole",
        "whole_optimizer": "torch.optim:Adagrad",
    },
}

Shape = tuple[int, int]
Rows = dict[str, dict[str, float]]


def layer(name: str, divisor: int = 1) -> list[Shape]:
    """The matrices of the first layer of a public model, sides divided."""
    shapes = [
        param.shape
        for param in model_params(preset(name), fused=False)
        if param.layer == 0 and param.kind == "matrix"
    ]
    return [(rows // divisor, columns // divisor) for rows, columns in shapes]


def cases(quick: bool, device: str) -> dict[str, list[Shape]]:
    """Matrices of each case."""
    less = 4 if quick else 1
    if device != "cpu":
        return {
            "gpt2-124m layer": layer("gpt2-124m", less),
            "llama3-8b layer": layer("llama3-8b", less),
            "256 of 32x128": SMALL,
        }
    return {
        "gpt2-124m layer": layer("gpt2-124m", less),
        "llama3-8b layer / 4": layer("llama3-8b", 4 * less),
        "256 of 32x128": SMALL,
        "64 of 64x256": LESS_SMALL,
    }


class Matrices(nn.Module):
    """Named matrices with small values."""

    def __init__(self, shapes: Sequence[Shape], device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number, shape in enumerate(shapes):
            value = (torch.randn(shape, generator=generator) * 0.02).to(device)
            self.register_parameter(f"m{number:04d}_weight", nn.Parameter(value))


class Ours:
    """Our optimizer on one process, gradients given."""

    def __init__(self, shapes: Sequence[Shape], device: str = "cpu", **settings: Any) -> None:
        groups = megatron_lw.ParallelGroups.single()
        self.ddp = megatron_lw.DistributedDataParallel(Matrices(shapes, device), groups)
        config = megatron_lw.OptimizerConfig(
            **{
                "optimizer": "muon",
                "lr": LR,
                "weight_decay": DECAY,
                "clip_grad": 0.0,
                "muon_momentum": MOMENTUM,
                "muon_coefficient_type": "simple",
                "muon_scale_mode": "shape_scaling",
                **settings,
            }
        )
        self.optimizer = megatron_lw.get_megatron_optimizer(
            config, [self.ddp], pg_collection=groups
        )
        self.params = list(self.ddp.module.parameters())
        self._grads = gradients(shapes, device)

    def load(self) -> None:
        """Put the gradients where backward would."""
        self.optimizer.zero_grad()
        for param, grad in zip(self.params, self._grads, strict=True):
            param.main_grad.copy_(grad)

    def step(self) -> None:
        """One step."""
        self.optimizer.step()


class Theirs:
    """An optimizer of torch's kind on the same values and gradients."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        device: str = "cpu",
    ) -> None:
        self.params = list(Matrices(shapes, device).parameters())
        self._grads = gradients(shapes, device)
        self.optimizer = make(self.params)

    def load(self) -> None:
        """Hand out the gradients."""
        for param, grad in zip(self.params, self._grads, strict=True):
            param.grad = grad

    def step(self) -> None:
        """One step."""
        self.optimizer.step()


def gradients(shapes: Sequence[Shape], device: str) -> list[torch.Tensor]:
    """Gradients, the same for all contenders."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def torch_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same settings under torch's names."""
    return torch.optim.Muon(
        params,
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        nesterov=False,
        adjust_lr_fn="original",
    )


def emerging_muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same settings under the names of emerging-optimizers."""
    from emerging_optimizers.orthogonalized_optimizers import Muon

    return Muon(
        params,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        nesterov=False,
        coefficient_type="simple",
        num_ns_steps=5,
        scale_mode="shape_scaling",
    )


def race(
    contenders: Mapping[str, Ours | Theirs], rounds: int, device: str = "cpu"
) -> dict[str, float]:
    """Milliseconds of a step of each, in turn; gradients are handed out outside the clock."""

    def before(contender: Ours | Theirs) -> Callable[[], None]:
        return contender.load

    timed = {name: (before(each), each.step) for name, each in contenders.items()}
    return newton_schulz.medians(timed, rounds, device)


def difference(ours: Ours, theirs: Theirs) -> float:
    """The largest relative difference of a weight, by Frobenius norms."""
    with torch.no_grad():
        pairs = zip(ours.params, theirs.params, strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def measure_steps(
    quick: bool, make: Any, other: str, promised: Mapping[str, float], device: str = "cpu"
) -> Rows:
    """Our step against that of another optimizer."""
    found: Rows = {}
    for case, shapes in cases(quick, device).items():
        ours, theirs = Ours(shapes, device), Theirs(shapes, make, device)
        times = race({"ours": ours, other: theirs}, 3 if quick else 7, device)
        if other == "torch" and device == "cpu":
            for mine, param in zip(ours.params, theirs.params, strict=True):
                if not torch.equal(mine, param):
                    raise ArithmeticError(f"{case}: not the weights of torch.optim.Muon")
        row = {**times, "ratio": times[other] / times["ours"]}
        if device != "cpu":
            row["differ"] = difference(ours, theirs)
        found[case] = {**row, "promise": promised[case]} if case in promised else row
    return found


def measure_gram(quick: bool) -> Rows:
    """Gram space against our standard iteration, fp32."""
    found: Rows = {}
    for shape in LONG[:1] if quick else LONG:
        x, coefficients = torch.randn(shape), resolve_coefficients("quintic", 5)
        out, workspace = torch.empty_like(x), torch.empty(workspace_numel(1, *shape))

        def run(iteration: Any, x=x, out=out, workspace=workspace, using=coefficients):
            engine = NewtonSchulz(using, dtype=torch.float32, iteration=iteration)
            return lambda: engine(x, out=out, workspace=workspace)

        timed = {name: (newton_schulz.nothing, run(name)) for name in ("standard", "gram")}
        times = newton_schulz.medians(timed, 5 if quick else 11)
        ratio = times["standard"] / times["gram"]
        found["{}x{}".format(*shape)] = {**times, "ratio": ratio, "promise": PROMISED_GRAM}
    return found


def measure_products(quick: bool) -> Rows:
    """The bare products against our call, bf16."""
    found: Rows = {}
    for shape in PRODUCTS[:1] if quick else PRODUCTS:
        engine = NewtonSchulz(resolve_coefficients("simple", 5))
        x = torch.randn(shape).bfloat16()
        out, workspace = (
            torch.empty_like(x),
            torch.empty(workspace_numel(1, *shape), dtype=torch.bfloat16),
        )
        timed = {
            "products": (newton_schulz.nothing, newton_schulz.bare_products(engine, x)),
            "ours": (
                newton_schulz.nothing,
                lambda e=engine, x=x, o=out, w=workspace: e(x, out=o, workspace=w),
            ),
        }
        times = newton_schulz.medians(timed, 5 if quick else 9)
        promise = PROMISED_PRODUCTS[min(shape)]
        row = {**times, "ratio": times["products"] / times["ours"], "promise": promise}
        found["{}x{}".format(*shape)] = row
    return found


def measure_variants(quick: bool) -> Rows:
    """A step of each variant over that of Muon."""
    shapes = layer("gpt2-124m", 4 if quick else 2)
    contenders = {
        name: Ours(shapes, **{"weight_decay": DECAY, **settings})
        for name, settings in VARIANTS.items()
    }
    times = race(contenders, 3 if quick else 7)
    return {name: {"ours": t, "over muon": t / times["muon"]} for name, t in times.items()}


def measure(quick: bool, device: str = "cpu") -> dict[str, Rows]:
    """All tables; on a GPU that of the step."""
    if device != "cpu":
        title = "step, bf16, against torch.optim.Muon"
        return {title: measure_steps(quick, torch_muon, "torch", {}, device)}
    torch.set_num_threads(1)
    found = {
        "step, bf16, against torch.optim.Muon": measure_steps(
            quick, torch_muon, "torch", {} if quick else PROMISED_STEP
        ),
        "gram space, fp32": measure_gram(quick),
        "bare products, bf16": measure_products(quick),
        "variants": measure_variants(quick),
    }
    if importlib.util.find_spec("emerging_optimizers") is not None:
        found["step, bf16, against emerging-optimizers"] = measure_steps(
            quick, emerging_muon, "emerging", {}
        )
    return found


def table(title: str, rows: Rows) -> str:
    """One line a case; a promise that is not kept says so."""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [f"{title + ' (ms)':44}" + "".join(f"{column:>12}" for column in columns)]
    for case, row in rows.items():
        cells = (f"{row[c]:12.3f}" if c in row else " " * 12 for c in columns)
        kept = row.get("ratio", 1.0) >= row.get("promise", 0.0)
        lines.append(f"  {case:42}" + "".join(cells) + ("" if kept else "  not met"))
    return "\n".join(lines)


def main() -> None:
    """Measure, print the tables, optionally write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small matrices, few rounds")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    found = measure(options.quick, options.device)
    print("\n\n".join(table(title, rows) for title, rows in found.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
