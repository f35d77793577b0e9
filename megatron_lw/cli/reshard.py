"""`megatron-lw reshard`: a checkpoint in another layout of ranks, on one machine."""

from __future__ import annotations

import argparse

from megatron_lw.cli.progress import progress_bar
from megatron_lw.cli.sizes import add_layout_arguments, parse_size
from megatron_lw.dist_checkpointing.reshard import reshard
from megatron_lw.topology import Topology


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "reshard",
        help="write a checkpoint as another layout of ranks would have saved it",
        description="Write a checkpoint again in another layout of ranks, without processes. Any "
        "run loads any checkpoint; this is for laying one out ahead.",
    )
    parser.add_argument("src", help="a checkpoint, or a directory of checkpoints: its newest one")
    parser.add_argument("dst", help="a directory of checkpoints to write to")
    add_layout_arguments(parser)
    parser.add_argument(
        "--vocab-multiple",
        type=int,
        metavar="N",
        help="pad the rows of embeddings and output layers to a multiple of N x tp "
        "(default: as they are stored)",
    )
    parser.add_argument(
        "--max-memory",
        type=parse_size,
        default=1 << 30,
        metavar="SIZE",
        help="bytes of tensors in memory, 96MiB at least (default: 1GiB)",
    )
    parser.add_argument(
        "--drop-rank-values",
        action="store_true",
        help="leave out values that differ between the ranks that saved, such as random-number "
        "state, where the number of ranks changes",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigError: If the sizes do not fit together or to the model.
        CheckpointError: If the checkpoint is not whole, or cannot be planned without a run.
    """
    etp = args.tp if args.etp is None else args.etp
    topology = Topology(dp=args.dp, tp=args.tp, ep=args.ep, pp=args.pp, etp=etp)
    with progress_bar("resharding") as progress:
        directory = reshard(
            args.src,
            args.dst,
            topology,
            bucket_size=args.bucket_size,
            vocab_multiple=args.vocab_multiple,
            drop_rank_values=args.drop_rank_values,
            max_memory=args.max_memory,
            progress=progress,
        )
    print(f"{directory}: as {topology.world} ranks would have saved it")
    return 0
