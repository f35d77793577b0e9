"""Pretrain a small GPT with Muon and Adam over the ranks of any layout.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --data mine.txt --steps 1000
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --tp 2 --sp --pp 2 --tied
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --fp8 mxfp8
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --ep 2 --experts 8 --overlap
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --save checkpoints --save-interval 50
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --load checkpoints --steps 200
    python examples/pretrain_gpt.py --steps 20                    # one rank, no torchrun

Runs on GPUs with NCCL where there are any, else on CPU with gloo. The text is the source of
Python's own standard library, unless `--data` gives another. At the same seed any layout trains the
same model on the same batches. Leaves a CSV file and a loss curve in `--out`.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any, cast

from torch import Tensor

import megatron_lw
from megatron_lw import dist_checkpointing
from megatron_lw.distributed import collectives
from pipeline import Batches, Pipeline
from prepare import layout, leave, prepare_on_all, start
from report import Clock, Reporter, StepRecord, time_table, write_csv, write_curve
from settings import give_up, make_parser


def optimizer_config(args: argparse.Namespace) -> megatron_lw.OptimizerConfig:
    """Settings under Megatron's names; with 0.2 x spectral scale Muon and Adam share one rate.

    Of AdaMuon's update that size is a part. Newton-Schulz computes in the dtype of the weights.
    """
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
        muon_extra_scale_factor=1.0 if args.optimizer == "adamuon" else 0.2,
        muon_fp32_matmul_prec="medium" if args.dtype == "bf16" else "highest",
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
    pipeline: Pipeline,
    optimizer: megatron_lw.LayerWiseDistributedOptimizer,
    batches: Batches,
    clock: Clock,
) -> tuple[Tensor, float]:
    """One step over this rank's micro-batches: its mean loss, and the whole gradient's norm."""
    optimizer.zero_grad()
    loss = pipeline.train(batches)
    with clock.stage("optimizer"):
        _, grad_norm, _ = optimizer.step()
        timings = optimizer.timings()
    clock.split("optimizer", timings)
    return loss, math.nan if grad_norm is None else grad_norm


def mean_loss(loss: Tensor, groups: megatron_lw.ParallelGroups) -> float:
    """Mean of the last stage's ranks, on every rank; the other stages bring a zero.

    Each rank's loss is the mean of equally many tokens. Collective: all-reduce over `world`.
    """
    collectives.all_reduce(loss, groups.world)
    return loss.item() / groups.replicas.size


def resume(
    args: argparse.Namespace,
    ddp: megatron_lw.DistributedDataParallel,
    optimizer: megatron_lw.LayerWiseDistributedOptimizer,
) -> int:
    """Load the newest checkpoint where one is asked for; returns the number of steps taken.

    The batches depend on the step alone, so there is no position in the data to restore.
    """
    if args.load is None:
        return 0
    return dist_checkpointing.load(args.load, ddp, optimizer).step


def save_when_due(
    args: argparse.Namespace,
    ddp: megatron_lw.DistributedDataParallel,
    optimizer: megatron_lw.LayerWiseDistributedOptimizer,
    step: int,
) -> None:
    """Save at the end, and every `--save-interval` steps; the last two checkpoints are kept."""
    last = step == args.steps
    due = args.save_interval is not None and step % args.save_interval == 0
    if args.save is None or not (last or due):
        return
    dist_checkpointing.save(args.save, ddp, optimizer, step=step, keep_last=2, background=not last)


def finish(args: argparse.Namespace, reporter: Reporter, clock: Clock, entropy: float) -> int:
    """Write the files, print the results, and hold the held-out loss against the target."""
    reporter.say(time_table(clock, len(reporter.records)))
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
    groups, device = start(args)
    run = prepare_on_all(args, groups, device)

    overlap = megatron_lw.DDPConfig(
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap,
        fp8_param_gather=args.fp8 is not None,
    )
    ddp = megatron_lw.DistributedDataParallel(run.stage, groups, overlap, names=run.stage.names)
    optimizer = megatron_lw.get_megatron_optimizer(
        optimizer_config(args), [ddp], pg_collection=groups
    )

    reporter = Reporter(args.steps, enabled=groups.world.rank == 0, log_every=args.log_every)
    reporter.say(optimizer.routing_report())
    reporter.say(f"{args.dtype} weights, {layout(groups, args)} on {device.type}")
    reporter.say(run.text)
    clock = Clock()
    pipeline = Pipeline(ddp, groups.pp, clock)
    first = resume(args, ddp, optimizer)
    if first >= args.steps:
        give_up(f"--steps {args.steps}: the checkpoint has {first} steps already")
    if first:
        reporter.say(f"going on from step {first} of {args.load}")
    with reporter:
        for step in range(first, args.steps):
            begin = clock.elapsed
            share = learning_rate_share(step, args.steps, args.warmup)
            lr = set_learning_rate(optimizer.param_groups, share)
            with clock.stage("data"):
                batches = run.source.step(step)
            loss, grad_norm = train_step(pipeline, optimizer, batches, clock)
            with clock.stage("mean loss over the ranks"):
                mean = mean_loss(loss, groups)
            seconds = clock.elapsed - begin
            measured = None
            if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
                with clock.stage("held-out loss"):  # no stage inside: a clock of its own
                    measuring = Pipeline(ddp, groups.pp, Clock())
                    measured = mean_loss(measuring.evaluate(run.held_out), groups)
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
            with clock.stage("checkpoint"):
                save_when_due(args, ddp, optimizer, step + 1)
    leave()
    return finish(args, reporter, clock, run.entropy) if reporter.enabled else 0


if __name__ == "__main__":
    sys.exit(main())
