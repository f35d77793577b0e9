"""Pretrain a small GPT with Muon and Adam over data-parallel ranks.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --data mine.txt --steps 1000
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
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

import megatron_lw
from data import BatchSource, load_corpus, unigram_entropy
from gpt import GPT, GPTConfig
from megatron_lw.distributed import collectives
from megatron_lw.distributed.group import Group
from report import Clock, Reporter, StepRecord, time_table, write_csv, write_curve
from settings import DTYPES, check_arguments, give_up, make_parser

Batches = list[tuple[Tensor, Tensor]]


def start() -> tuple[megatron_lw.ParallelGroups, torch.device]:
    """Join the ranks that torchrun started, or be the only one; all are data parallel."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return megatron_lw.ParallelGroups.single(), device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return megatron_lw.ParallelGroups.create(), device


def leave() -> None:
    """End what `start` began; a process that ends with its groups still open may abort."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is trained on what.

    Attributes:
        model: the same on every rank.
        source: draws this rank's batches.
        held_out: this rank's part of the held-out windows.
        entropy: unigram entropy of the held-out text, nats a byte.
        text: the text in words.
    """

    model: GPT
    source: BatchSource
    held_out: Batches
    entropy: float
    text: str


def prepare(args: argparse.Namespace, group: Group, device: torch.device) -> Run:
    """Read the text and make the model, for this rank of the data-parallel group.

    Raises:
        OSError: the folder for the results cannot be made.
        ValueError: a number or a file on the command line cannot be used.
    """
    check_arguments(args)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(args.data, args.sequence)
    entropy = unigram_entropy(corpus.held_out)
    source = BatchSource(
        text=corpus.train.to(device),
        global_batch=args.global_batch,
        micro_batches=args.micro_batches,
        sequence=args.sequence,
        rank=group.rank,
        ranks=group.size,
        seed=args.seed,
    )
    config = GPTConfig(
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        sequence=args.sequence,
        tied=args.tied,
        dtype=DTYPES[args.dtype],
    )
    torch.manual_seed(args.seed)
    return Run(
        model=GPT(config).to(device),
        source=source,
        held_out=source.held_out(corpus.held_out.to(device), args.eval_windows),
        entropy=entropy,
        text=f"{corpus.source}: {corpus.train.numel():,} bytes to train on, "
        f"{corpus.held_out.numel():,} held out with a unigram entropy of {entropy:.4f} nats a byte",
    )


def prepare_on_all(
    args: argparse.Namespace, groups: megatron_lw.ParallelGroups, device: torch.device
) -> Run:
    """`prepare`; what is wrong on any rank ends the run on all of them, with one line."""
    run: Run | None = None
    problem: Exception | None = None
    try:
        run = prepare(args, groups.dp, device)
    except (OSError, ValueError) as error:
        problem = error
    try:
        collectives.agree_or_raise(problem, groups.world)
    except (OSError, ValueError) as error:
        leave()
        give_up(str(error))
    return cast(Run, run)


def optimizer_config(args: argparse.Namespace) -> megatron_lw.OptimizerConfig:
    """Settings under Megatron's names; with 0.2 x spectral scale Muon and Adam share one rate."""
    return megatron_lw.OptimizerConfig(
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
        timings = optimizer.timings()
    clock.split("optimizer", timings)
    return torch.stack(losses).mean(), math.nan if grad_norm is None else grad_norm


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
    write_csv(args.out / "loss.csv", reporter.records)
    drawn = write_curve(args.out / "loss.png", reporter.records, entropy)
    files = "loss.csv and loss.png" if drawn else "loss.csv (no curve: matplotlib is missing)"
    reporter.say(f"wrote {files} in {args.out}")
    held_out = cast(float, reporter.records[-1].held_out)  # measured after the last step, always
    reporter.say(
        f"held-out loss {held_out:.4f} = {held_out / entropy:.3f} x the held-out text's unigram "
        f"entropy {entropy:.4f} nats a byte"
    )
    if args.target is not None and not held_out <= args.target * entropy:
        reporter.say(f"FAILED: the held-out loss is above {args.target} x unigram entropy")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Train, measure, report; return the exit status."""
    args = make_parser().parse_args(arguments)
    groups, device = start()
    run = prepare_on_all(args, groups, device)

    # What shapes do not tell: these two are tables and no matrices, so they go to Adam.
    megatron_lw.annotate(run.model.embedding.weight, embedding=True)
    if not args.tied:
        megatron_lw.annotate(run.model.head.weight, output=True)
    ddp = megatron_lw.DistributedDataParallel(run.model, groups, megatron_lw.DDPConfig())
    optimizer = megatron_lw.get_megatron_optimizer(
        optimizer_config(args), [ddp], pg_collection=groups
    )

    reporter = Reporter(args.steps, enabled=groups.world.rank == 0, log_every=args.log_every)
    reporter.say(optimizer.routing_report())
    reporter.say(f"{args.dtype} weights, {groups.dp.size} data-parallel ranks on {device.type}")
    reporter.say(run.text)
    clock = Clock()
    with reporter:
        for step in range(args.steps):
            begin = clock.elapsed
            share = learning_rate_share(step, args.steps, args.warmup)
            lr = set_learning_rate(optimizer.param_groups, share)
            with clock.stage("data"):
                batches = run.source.step(step)
            loss, grad_norm = train_step(ddp, optimizer, batches, clock)
            with clock.stage("mean loss over the ranks"):
                mean = mean_over(loss, groups.dp)
            seconds = clock.elapsed - begin
            measured = None
            if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
                with clock.stage("held-out loss"):
                    measured = held_out_loss(ddp, run.held_out, groups.dp)
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
    leave()
    return finish(args, reporter, clock, run.entropy) if reporter.enabled else 0


if __name__ == "__main__":
    sys.exit(main())
