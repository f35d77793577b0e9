"""The step inside Megatron, ours against its own layer-wise optimizer, in turn in one run.

    python -m benchmarks.megatron [--quick] [--json FILE]

Needs megatron-core and emerging-optimizers, so the environment of `make test-megatron`. A GPT of 8
layers and hidden size 512 in BF16, on gloo, one thread a rank: optimizer step plus gather of the
weights, from gradients that are reduced already. Both sides get the same gradients, and both
orthogonalise in bf16. Megatron's side has its layout of parameters for layer-wise optimizers, a
DistributedOptimizer for what Muon does not take, and `--muon-tp-mode duplicated`, which computes
what ours computes.

The slowest rank counts; medians over the rounds are compared: time, and processor time, which other
programs on the machine hardly change. Bytes and calls are counted at the functions of
torch.distributed, on both sides alike: what one rank sends by the ring algorithm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import measure_on
from benchmarks.wire import Wire

LAYOUTS = {"DP 2": (2, 1), "DP 4": (4, 1), "TP 2": (2, 2)}
TARGETS = {"DP 2": 0.85, "TP 2": 0.5}
FLAGS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 8191 --optimizer muon "
    "--use-distributed-optimizer --muon-no-split-qkv --muon-tp-mode duplicated "
    "--transformer-impl local --attention-backend unfused --distributed-backend gloo "
    "--use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--no-check-for-nan-in-loss-and-grad"
)


class Iterations:
    """Shapes of the matrices that this rank orthogonalises, on both sides.

    Attributes:
        shapes: of those since the last `load`.
    """

    def __init__(self) -> None:
        from emerging_optimizers.orthogonalized_optimizers import muon_utils

        from megatron_lw.optimizer.children.newton_schulz import NewtonSchulz

        self.shapes: list[tuple[int, int]] = []
        theirs, ours = muon_utils.newton_schulz, NewtonSchulz.orthogonalise

        def noted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.shapes.append((x.size(0), x.size(1)))
            return theirs(x, *args, **kwargs)

        def noted_batch(engine: Any, matrices: Sequence[torch.Tensor], *args: Any) -> Any:
            self.shapes.extend((x.size(0), x.size(1)) for x in matrices)
            return ours(engine, matrices, *args)

        muon_utils.newton_schulz = noted
        NewtonSchulz.orthogonalise = noted_batch  # type: ignore[method-assign]

    def load(self) -> tuple[int, float]:
        """Matrices, and their cost: longer side times the square of the shorter, in 1e9."""
        cost = sum(max(shape) * min(shape) ** 2 for shape in self.shapes)
        count = len(self.shapes)
        self.shapes.clear()
        return count, cost / 1e9


class Side:
    """A wrapped model with its optimizer.

    Args:
        chunk: wrapped by Megatron's DDP or by ours.
        optimizer: steps it.
    """

    def __init__(self, chunk: Any, optimizer: Any) -> None:
        self.chunk = chunk
        self.optimizer = optimizer

    def reduce(self, grads: Sequence[torch.Tensor]) -> None:
        """Gradients of this rank to where the step wants them."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for param, grad in zip(self.chunk.module.parameters(), grads, strict=True):
            param.main_grad.copy_(grad)
        self.chunk.finish_grad_sync()


def build() -> tuple[Side, Side, Iterations]:
    """The same model under Megatron's optimizer and under ours."""
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.training import training
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    from megatron_lw.integrations import megatron as megatron_lw

    args = parse_and_validate_args()
    dataset_utils.compile_helpers = lambda: None  # there is no data
    initialize_megatron()
    iterations = Iterations()
    config = core_transformer_config_from_args(args)

    def module() -> Any:
        torch.manual_seed(1)
        model = GPTModel(
            config, get_gpt_layer_local_spec(), args.padded_vocab_size, args.seq_length
        )
        return Float16Module(config, model)

    settings, overrides = training.get_megatron_optimizer_config(args)
    [theirs] = training.wrap_model_chunks_with_ddp(
        [module()],
        config,
        training.get_megatron_ddp_config(args),
        use_layer_wise_distributed_optimizer=True,
    )
    [ours] = megatron_lw.wrap_model_chunks(
        [module()], config, training.get_megatron_ddp_config(args)
    )
    return (
        Side(theirs, get_megatron_optimizer(settings, [theirs], dict(overrides))),
        Side(ours, megatron_lw.get_megatron_optimizer(settings, [ours], dict(overrides))),
        iterations,
    )


def measure_rank(folder: Path, tensor_parallel: int, rounds: int) -> dict[str, object]:
    """All that one rank measures."""
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_RANK": str(rank), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    from tests.megatron import cuda_on_cpu

    wire = Wire()  # before Megatron takes the functions by name
    cuda_on_cpu.install()
    batch = str(size // tensor_parallel)
    sys.argv = ["benchmark", *FLAGS.split(), "--global-batch-size", batch]
    sys.argv += ["--tensor-model-parallel-size", str(tensor_parallel)]
    standard_output, sys.stdout = sys.stdout, open(os.devnull, "w")
    theirs, ours, iterations = build()
    sys.stdout = standard_output
    torch.manual_seed(rank)
    grads = [torch.randn(p.shape) * 1e-3 for p in ours.chunk.module.parameters()]
    seconds: dict[str, list[list[float]]] = {"theirs": [], "ours": []}
    report: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, side in (("theirs", theirs), ("ours", ours)):
            reduced = wire.over(lambda s=side: s.reduce(grads))
            iterations.load()
            if number:
                seconds[name].append(timed(side.optimizer.step))
            else:  # the first round warms up, and is counted
                calls, nbytes = wire.over(side.optimizer.step)
                report[name] = {"calls": calls, "mbytes": nbytes / 1e6, "reduce": reduced[1] / 1e6}
                report[name] |= dict(zip(("count", "cost"), iterations.load(), strict=True))
        if not number:
            report["difference"] = _difference(theirs.chunk, ours.chunk)
    for name, values in seconds.items():
        medians = [statistics.median(each) for each in zip(*values, strict=True)]
        report[name] |= dict(zip(("seconds", "cpu"), medians, strict=True))
    report["theirs"] |= {"padding": _padding_of_theirs(theirs), "state": _state(theirs)}
    report["ours"] |= {"padding": _padding_of_ours(ours), "state": _state_of_ours(ours)}
    return _over_ranks(report)


def timed(action: Callable[[], Any]) -> list[float]:
    """Seconds from a common start to the end of the slowest rank, and of the busiest processor."""
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    action()
    elapsed = [time.perf_counter() - start, time.process_time() - used]
    slowest = torch.tensor(elapsed, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def _over_ranks(report: dict[str, Any]) -> dict[str, object]:
    """The busiest rank's numbers; costs of all ranks, too."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, report)
    merged: dict[str, object] = {"difference": max(each["difference"] for each in gathered)}
    for side in ("theirs", "ours"):
        most = {key: max(each[side][key] for each in gathered) for key in report[side]}
        merged[side] = most | {"cost_of_all": sum(each[side]["cost"] for each in gathered)}
    return merged


def _difference(theirs: Any, ours: Any) -> float:
    pairs = zip(theirs.module.parameters(), ours.module.parameters(), strict=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs)


def _padding_of_theirs(side: Side) -> int:
    """Elements that a bucket has beyond its parameters, all buckets."""
    return sum(
        buffer.grad_data.numel() - sum(param.numel() for param in buffer.params)
        for buffer in (*side.chunk.buffers, *side.chunk.expert_parallel_buffers)
    )


def _padding_of_ours(side: Side) -> int:
    return sum(
        bucket.layout.numel - sum(bucket.layout.numels) for bucket in side.optimizer.runtime.buckets
    )


def _state(side: Side) -> float:
    """Megabytes of masters and states on this rank, without the weights."""
    return sum(tensor.nbytes for tensor in _tensors(side.optimizer)) / 1e6


def _tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    inside = vars(optimizer).get("chained_optimizers")
    if inside is not None:
        for each in inside:
            yield from _tensors(each)
        return
    for group in optimizer.optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, torch.Tensor))


def _state_of_ours(side: Side) -> float:
    return sum(tensor.nbytes for tensor in side.optimizer._state_tensors()) / 1e6


def table(reports: dict[str, Any]) -> str:
    """The numbers as a Markdown table: Megatron's, then ours."""
    columns = "time, ratio, CPU, ratio, reduce sends, step sends, calls, matrices, makespan, "
    columns += "padding, state"
    head = ["", *columns.split(", ")]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for layout, report in reports.items():
        theirs, ours = report["theirs"], report["ours"]
        ranks = LAYOUTS[layout][0]

        def pair(key: str, text: str, a: Any = theirs, b: Any = ours) -> str:
            return f"{text.format(a[key])} / {text.format(b[key])}"

        makespan = " / ".join(
            f"{each['cost'] / (ours['cost_of_all'] / ranks):.2f}" for each in (theirs, ours)
        )
        lines.append(
            f"| {layout} | {pair('seconds', '{:.2f} s')} "
            f"| {ours['seconds'] / theirs['seconds']:.2f} | {pair('cpu', '{:.2f} s')} "
            f"| {ours['cpu'] / theirs['cpu']:.2f} | {pair('reduce', '{:.2f} MB')} "
            f"| {pair('mbytes', '{:.2f} MB')} "
            f"| {pair('calls', '{}')} | {pair('count', '{}')} | {makespan} "
            f"| {pair('padding', '{}')} | {pair('state', '{:.0f} MB')} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print one table, optionally write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument("--only", choices=LAYOUTS, help="one layout")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    reports: dict[str, Any] = {}
    for layout, (ranks, tensor_parallel) in LAYOUTS.items():
        if options.only in (None, layout):
            rounds = 3 if options.quick else 9
            reports[layout] = measure_on(ranks, measure_rank, tensor_parallel, rounds)
            print(f"{layout}: weights after one step differ by {reports[layout]['difference']:.1e}")
            if layout in TARGETS:
                for kind in ("seconds", "cpu"):
                    one, two = (reports[layout][side][kind] for side in ("ours", "theirs"))
                    print(f"  {kind}: ratio {one / two:.3f}  (target <= {TARGETS[layout]})")
    print(table(reports))
    if options.json:
        options.json.write_text(json.dumps(reports, indent=2))


if __name__ == "__main__":
    main()
