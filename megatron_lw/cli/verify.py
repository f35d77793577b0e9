"""`megatron-lw verify`: every bit of a checkpoint read and checked; what is broken, by name."""

from __future__ import annotations

import argparse
import sys

from megatron_lw.cli.progress import progress_bar
from megatron_lw.cli.sizes import human_size
from megatron_lw.dist_checkpointing.verify import verify


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "verify",
        help="read a whole checkpoint and name what is broken",
        description="Read every bit of a checkpoint. Exit status 0: it is whole; 1: it is not, and "
        "what is broken is named; 2: there is none.",
    )
    parser.add_argument("path", help="a checkpoint, or a directory of checkpoints: its newest one")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if something is broken.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    with progress_bar("verifying") as progress:
        report = verify(args.path, progress=progress)
    for path in report.leftovers:
        print(f"{path}: left over from a save that did not end; it does no harm", file=sys.stderr)
    if report.is_whole:
        print(f"{report.path}: whole, {human_size(report.nbytes)} read")
        return 0
    for problem in report.problems:
        print(problem)
    count = len(report.problems)
    print(f"{report.path}: {'1 problem' if count == 1 else f'{count} problems'}")
    return 1
