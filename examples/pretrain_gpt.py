"""Pretrain a small GPT with Muon and Adam over data-parallel ranks.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tensor-parallel 2 --data mine.txt
    python examples/pretrain_gpt.py --steps 20                    # one rank, no torchrun

Runs on GPUs with NCCL where there are any, else on CPU with gloo. The text is the source of
Python's own standard library, unless `--data` gives another. At the same seed any number of ranks
trains on the same batches. Leaves a CSV file and a loss curve in `--out`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist

import megatron_lw
from data import BatchSource, load_corpus, unigram_entropy
from gpt import GPT, GPTConfig
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from report import Clock, Reporter, StepRecord, time_table, write_csv, write_curve
from tensor_parallel import divide

DEFAULT_STEPS = 200
DEFAULT_TARGET = 0.85
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Batches = list[tuple[Tensor, Tensor]]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        """Print the message on rank 0 and exit with status 2."""
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{self.prog}: error: {message}\n")
        raise SystemExit(2)


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a small GPT over bytes; the top of this file says more.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help="your own text")
    add("--steps", type=int, default=DEFAULT_STEPS)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("out"), help="folder for the CSV file and the curve")
    add(
        "--target",
        type=float,
        help="fail if the held-out loss is above this x unigram entropy; "
        f"{DEFAULT_TARGET} where text and steps are the default",
    )
    add("--tensor-parallel", type=int, default=1, help="ranks that share each matrix")
    model = parser.add_argument_group("model").add_argument
    model("--layers", type=int, default=4)
    model("--width", type=int, default=128)
    model("--heads", type=int, default=4)
    model("--sequence", type=int, default=256, help="bytes in a sequence")
    model("--tied", action="store_true", help="one weight for the embedding and the output layer")
    model(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the weights (masters are fp32); auto: bf16 on hardware that computes in it",
    )
    batch = parser.add_argument_group("batch").add_argument
    batch("--global-batch", type=int, default=24, help="sequences in a step, over all ranks")
    batch("--micro-batches", type=int, default=2, help="forwards of a rank in a step")
    optim = parser.add_argument_group("optimizer").add_argument
    optim("--optimizer", choices=("muon", "adam"), default="muon", help="for the matrices")
    optim("--lr", type=float, default=6e-3)
    optim("--weight-decay", type=float, default=0.1)
    optim("--warmup", type=float, default=0.05, help="share of the steps with a rising rate")
    show = parser.add_argument_group("progress").add_argument
    show("--log-every", type=int, default=20, help="steps between lines where there is no terminal")
    show("--eval-every", type=int, default=50, help="steps between held-out losses")
    show("--eval-windows", type=int, default=128, help="held-out sequences in a measurement")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse numbers out of range, and set what depends on other arguments.

    Raises:
        ValueError: naming the flag.
    """
    for name in ("steps", "log_every", "eval_every", "eval_windows"):
        if vars(args)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {vars(args)[name]}: must be at least 1")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed {args.seed}: must be in 0 ... 2^31 - 1")
    if not 0 <= args.warmup <= 1:
        raise ValueError(f"--warmup {args.warmup}: must be a share, 0 ... 1")
    if args.dtype == "auto":
        args.dtype = "bf16" if has_bf16_arithmetic() else "fp32"
    if args.target is None and args.steps == DEFAULT_STEPS and not args.data:
        args.target = DEFAULT_TARGET


def has_bf16_arithmetic() -> bool:
    """Whether bf16 is fast here: in software it is ten times slower than fp32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    probe = vars(torch.cpu).get("get_capabilities", dict)  # older releases of torch cannot tell
    capabilities = probe()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def start(tensor_parallel: int) -> tuple[megatron_lw.ParallelGroups, torch.device]:
    """Join the ranks that torchrun started, or be the only one, on this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return megatron_lw.ParallelGroups.create(tensor=tensor_parallel), device
    if tensor_parallel > 1:
        raise ValueError(f"--tensor-parallel {tensor_parallel} needs more ranks: use torchrun")
    return megatron_lw.ParallelGroups.single(), device


def make_model(
    args: argparse.Namespace, groups: megatron_lw.ParallelGroups, device: torch.device
) -> GPT:
    """The same model on every rank, and what the optimizer has to know about its parameters."""
    torch.manual_seed(args.seed)
    model = GPT(
        GPTConfig(
            layers=args.layers,
            width=args.width,
            heads=args.heads,
            sequence=args.sequence,
            tied=args.tied,
            dtype=DTYPES[args.dtype],
        )
    )
    megatron_lw.annotate(model.embedding.weight, embedding=True)
    if not args.tied:
        megatron_lw.annotate(model.head.weight, output=True)
    for block in model.blocks:  # fused matrices, which Muon takes one by one
        megatron_lw.annotate(block.attention.qkv.weight, blocks=(args.width,) * 3)
        megatron_lw.annotate(block.mlp.gate_up.weight, blocks=(3 * args.width,) * 2)
    divide(model, groups.tp)
    return model.to(device)


def learning_rate_share(step: int, steps: int, warmup: float) -> float:
    """Position between a group's `min_lr` (0) and `max_lr` (1) at a step: warm-up, then cosine."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / max(1, steps - rising))


def set_learning_rate(groups: list[dict[str, Any]], share: float) -> float:
    """Set the rate of every parameter group; return the highest."""
    for group in groups:
        rate = group["min_lr"] + share * (group["max_lr"] - group["min_lr"])
        group["lr"] = rate * group["lr_mult"]
    return max(group["lr"] for group in groups)


def train_step(
    ddp: megatron_lw.DistributedDataParallel,
    optimizer: megatron_lw.LayerWiseDistributedOptimizer,
    batches: Batches,
    clock: Clock,
) -> tuple[Tensor, float]:
    """One step over this rank's micro-batches: its mean loss, and the whole gradient's norm."""
    optimizer.zero_grad()
    losses = []
    for index, (tokens, targets) in enumerate(batches):
        last = index == len(batches) - 1
        with nullcontext() if last else ddp.no_sync():  # gradients are reduced with the last one
            with clock.stage("forward"):
                loss = ddp(tokens, targets)
            with clock.stage("backward"):
                (loss / len(batches)).backward()
        losses.append(loss.detach())
    with clock.stage("optimizer"):
        _, grad_norm, _ = optimizer.step()
    clock.split("optimizer", optimizer.timings())
    return torch.stack(losses).mean(), grad_norm


@torch.no_grad()
def held_out_loss(
    ddp: megatron_lw.DistributedDataParallel, batches: Batches, group: Group
) -> float:
    """Mean loss over every rank's held-out batches, nats a byte."""
    sequences = sum(len(tokens) for tokens, _ in batches)
    losses = [ddp(tokens, targets) * (len(tokens) / sequences) for tokens, targets in batches]
    return mean_over(torch.stack(losses).sum(), group)


def mean_over(value: Tensor, group: Group) -> float:
    """Mean of a number over the ranks of a group: an all-reduce, in place."""
    collectives.all_reduce(value, group)
    return value.item() / group.size


def finish(args: argparse.Namespace, reporter: Reporter, clock: Clock, entropy: float) -> int:
    """Write the files, print the results, and hold the held-out loss against the target."""
    reporter.say(time_table(clock, args.steps))
    if reporter.enabled:
        write_csv(args.out / "loss.csv", reporter.records)
        drawn = write_curve(args.out / "loss.png", reporter.records, entropy)
        files = "loss.csv and loss.png" if drawn else "loss.csv (no curve: matplotlib is missing)"
        reporter.say(f"wrote {files} in {args.out}")
    held_out = reporter.records[-1].held_out
    reporter.say(
        f"held-out loss {held_out:.4f} = {held_out / entropy:.3f} x the held-out text's unigram "
        f"entropy {entropy:.4f} nats a byte"
    )
    if args.target is not None and held_out > args.target * entropy:
        reporter.say(f"FAILED: the held-out loss is above {args.target} x unigram entropy")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train, measure, report; return the exit status."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    try:
        check_arguments(args)
        args.out.mkdir(parents=True, exist_ok=True)
        groups, device = start(args.tensor_parallel)
        corpus = load_corpus(args.data, args.sequence)
        source = BatchSource(
            text=corpus.train.to(device),
            global_batch=args.global_batch,
            micro_batches=args.micro_batches,
            sequence=args.sequence,
            rank=groups.dp.rank,
            ranks=groups.dp.size,
            seed=args.seed,
        )
        held_out = source.held_out(corpus.held_out.to(device), args.eval_windows)
        model = make_model(args, groups, device)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    ddp = megatron_lw.DistributedDataParallel(model, groups, megatron_lw.DDPConfig())
    config = megatron_lw.OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=0.0,
        weight_decay=args.weight_decay,
        bf16=args.dtype == "bf16",
        clip_grad=1.0,
        adam_beta2=0.95,
        muon_momentum=0.95,
        muon_nesterov=True,
        muon_scale_mode="spectral",
        muon_extra_scale_factor=0.2,
    )
    optimizer = megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=groups)

    reporter = Reporter(args.steps, enabled=groups.world.rank == 0, log_every=args.log_every)
    entropy = unigram_entropy(corpus.held_out)
    reporter.say(optimizer.routing_report())
    reporter.say(
        f"{groups.dp.size} data-parallel x {groups.tp.size} tensor-parallel ranks, {args.dtype} "
        f"weights, {sum(p.numel() for p in model.parameters()):,} on this rank"
    )
    reporter.say(
        f"{corpus.source}: {corpus.train.numel():,} bytes to train on, "
        f"{corpus.held_out.numel():,} held out with a unigram entropy of {entropy:.4f} nats a byte"
    )
    clock = Clock()
    with reporter:
        for step in range(args.steps):
            begin = clock.elapsed
            share = learning_rate_share(step, args.steps, args.warmup)
            lr = set_learning_rate(optimizer.param_groups, share)
            with clock.stage("data"):
                batches = source.step(step)
            loss, grad_norm = train_step(ddp, optimizer, batches, clock)
            with clock.stage("mean loss over the ranks"):
                mean = mean_over(loss, groups.dp)
            seconds = clock.elapsed - begin
            measured = None
            if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
                with clock.stage("held-out loss"):
                    measured = held_out_loss(ddp, held_out, groups.dp)
            reporter.step(
                StepRecord(
                    step=step + 1,
                    loss=mean,
                    grad_norm=grad_norm,
                    lr=lr,
                    tokens_per_second=args.global_batch * args.sequence / seconds,
                    held_out=measured,
                )
            )
    return finish(args, reporter, clock, entropy)


if __name__ == "__main__":
    sys.exit(main())
