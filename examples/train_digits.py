"""Train a vision tower on the handwritten digits that ship with scikit-learn, with Muon and Adam.

    python examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py --steps 300

1,797 images of 8 x 8 pixels, every fifth held out. Fails if too few of those are recognised. At the
same seed any number of ranks trains the same model on the same batches. Leaves a CSV file in
`--out`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import megatron_lw
from data import draw_starts
from prepare import layout, leave, start
from pretrain_gpt import learning_rate_share, mean_loss, optimizer_config, set_learning_rate
from report import Clock, Reporter, StepRecord, time_table, write_csv
from settings import DTYPES, has_bf16_arithmetic
from vision import GRID, VisionTower

DEFAULT_STEPS = 200
DEFAULT_TARGET = 0.96
BATCH = 96
"""Images in a step, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images and what they show.

    Attributes:
        images: fp32 [count, 8, 8], about 0 on average.
        labels: int64 [count], 0 to 9.
    """

    images: Tensor
    labels: Tensor


def load_digits(device: torch.device) -> tuple[Digits, Digits]:
    """The images to train on, and every fifth of all to test with."""
    try:
        from sklearn import datasets
    except ImportError:
        raise SystemExit("scikit-learn is missing, which has the images: install it") from None
    found = datasets.load_digits()
    images = torch.from_numpy(found.images / 16 - 0.3).float().to(device)
    labels = torch.from_numpy(found.target).long().to(device)
    test = torch.arange(len(labels), device=device) % 5 == 0
    return (
        Digits(images=images[~test], labels=labels[~test]),
        Digits(images=images[test], labels=labels[test]),
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line; what else `prepare` and `optimizer_config` ask for is set."""
    parser = argparse.ArgumentParser(
        description="Train a vision tower on digits; the top of the file says more.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=DEFAULT_STEPS)
    add("--seed", type=int, default=0)
    add("--lr", type=float, default=1e-2)
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the weights")
    add("--out", type=Path, default=Path("out/digits"), help="folder for the CSV file")
    add("--target", type=float, default=DEFAULT_TARGET, help="least test accuracy")
    parser.set_defaults(tp=1, ep=1, pp=1, sp=False, optimizer="muon", weight_decay=0.1)
    return parser


def build(args: argparse.Namespace, device: torch.device) -> VisionTower:
    """The tower, built without memory, then materialised and drawn: every rank draws alike."""
    with torch.device("meta"):
        tower = VisionTower()
    tower.to(DTYPES[args.dtype]).to_empty(device=device)
    torch.manual_seed(args.seed)
    tower.reset_parameters()
    megatron_lw.annotate(tower.head.weight, output=True)
    width = tower.norm.weight.numel()
    for block in tower.blocks:
        megatron_lw.annotate(block.attention.qkv.weight, blocks=(width,) * 3)
    return tower


def accuracy(ddp: megatron_lw.DistributedDataParallel, test: Digits) -> tuple[float, float]:
    """Share of the test images that are recognised, and their mean loss in nats; on every rank."""
    with torch.no_grad():
        logits = ddp(test.images)
    right = (logits.argmax(dim=-1) == test.labels).float().mean()
    return right.item(), functional.cross_entropy(logits, test.labels).item()


def train(
    args: argparse.Namespace,
    groups: megatron_lw.ParallelGroups,
    ddp: megatron_lw.DistributedDataParallel,
    data: tuple[Digits, Digits],
    reporter: Reporter,
) -> float:
    """Train, report every step, and return the test accuracy."""
    optimizer = megatron_lw.get_megatron_optimizer(
        optimizer_config(args), [ddp], pg_collection=groups
    )
    reporter.say(optimizer.routing_report())
    clock, (training, test), share = Clock(), data, 0.0
    for step in range(args.steps):
        begin = clock.elapsed
        rate = learning_rate_share(step, args.steps, 0.05)
        lr = set_learning_rate(optimizer.param_groups, rate)
        drawn = draw_starts(len(training.images), BATCH, 0, args.seed, step)
        mine = drawn[groups.dp.rank :: groups.dp.size]
        optimizer.zero_grad()
        with clock.stage("forward"):
            loss = functional.cross_entropy(ddp(training.images[mine]), training.labels[mine])
        with clock.stage("backward"):
            loss.backward()
        with clock.stage("optimizer"):
            _, grad_norm, _ = optimizer.step()
        mean = mean_loss(loss.detach(), groups)
        seconds, measured = clock.elapsed - begin, None
        if step + 1 == args.steps:
            share, measured = accuracy(ddp, test)
        reporter.step(
            StepRecord(
                step=step + 1,
                loss=mean,
                grad_norm=grad_norm,
                lr=lr,
                tokens_per_second=BATCH * GRID**2 / seconds,
                held_out=measured,
            )
        )
    reporter.say(time_table(clock, args.steps))
    return share


def main(arguments: list[str] | None = None) -> int:
    """Train, test, report; return the exit status."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    if args.dtype == "auto":
        args.dtype = "bf16" if has_bf16_arithmetic() else "fp32"
    groups, device = start(args)
    if BATCH % groups.dp.size:
        leave()
        parser.error(f"{groups.dp.size} ranks do not divide a batch of {BATCH} images")
    data = load_digits(device)
    ddp = megatron_lw.DistributedDataParallel(build(args, device), groups)
    with Reporter(args.steps, enabled=groups.world.rank == 0, log_every=20) as reporter:
        reporter.say(f"{args.dtype} weights, {layout(groups, args)} on {device.type}")
        share = train(args, groups, ddp, data, reporter)
    leave()
    if not reporter.enabled:
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    write_csv(args.out / "loss.csv", reporter.records)
    reporter.say(f"wrote loss.csv in {args.out}")
    reporter.say(f"test accuracy {share:.4f} of {len(data[1].labels)} images")
    if share < args.target:
        reporter.say(f"FAILED: the test accuracy is below {args.target}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
