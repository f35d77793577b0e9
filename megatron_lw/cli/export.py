"""`megatron-lw export`: the weights of a checkpoint as plain safetensors files."""

from __future__ import annotations

import argparse

from megatron_lw.cli.progress import progress_bar
from megatron_lw.cli.sizes import human_size, parse_size
from megatron_lw.dist_checkpointing.export import export


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "export",
        help="write the weights of a checkpoint as safetensors files",
        description="Write whole weights in the dtypes of the model, a tied one once, with an "
        "index where there are several files. Needs little memory and no processes.",
    )
    parser.add_argument("src", help="a checkpoint, or a directory of checkpoints: its newest one")
    parser.add_argument("dst", help="a directory to write to")
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="most bytes in a file, such as 5GB or 512MiB (default: 5GB)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        CheckpointError: If there is nothing to export, or it is not whole.
    """
    with progress_bar("exporting") as progress:
        done = export(args.src, args.dst, max_shard_nbytes=args.max_shard_size, progress=progress)
    files = "1 file" if len(done.files) == 1 else f"{len(done.files)} files"
    print(f"{args.dst}: {done.num_weights} weights, {human_size(done.nbytes)} in {files}")
    return 0
