"""The entry point `megatron-lw`: one subcommand a module, errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_lw.cli import export, inspect, plan, reshard, verify
from megatron_lw.errors import LayerWiseError

COMMANDS = (plan, inspect, verify, export, reshard)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="megatron-lw",
        description="Layer-wise distributed optimizer: plan a model, look after checkpoints.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line on stderr that says what is wrong.

    Args:
        argv: Arguments without the program's name; None for those of the process.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except LayerWiseError as error:
        print(f"megatron-lw: error: {error}", file=sys.stderr)
        return 2
