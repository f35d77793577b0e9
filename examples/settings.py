"""The command line of `pretrain_gpt.py`: flags, their limits, and how a wrong one ends the run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

DEFAULT_STEPS = 110
DEFAULT_TARGET = 0.85
# Learning rates that suit the default model; the update of most is about as large as Adam's.
RATES = {
    "muon": 1e-2,
    "normuon": 1e-2,
    "adamuon": 1e-2,
    "soap": 1e-2,
    "adam": 1e-2,
    "lion": 1e-3,
    "sgd": 0.3,
}
FP8 = ("mxfp8", "mxfp8-2d", "block", "tensor", "delayed")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def give_up(message: str) -> NoReturn:
    """End the run with one line and status 2, on every rank at once.

    Rank 0 alone fails: torchrun stops all ranks when the first one fails, and that must not be
    before the message is out.
    """
    if os.environ.get("RANK", "0") != "0":
        raise SystemExit(0)
    sys.stderr.write(f"pretrain_gpt.py: error: {message}\n")
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        """End the run on every rank."""
        give_up(message)


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="pretrain_gpt.py",
        description="Pretrain a small GPT over bytes; the top of the file says more.",
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
    model = parser.add_argument_group("model").add_argument
    model("--layers", type=int, default=4)
    model("--width", type=int, default=128)
    model("--heads", type=int, default=4)
    model("--sequence", type=int, default=256, help="bytes in a sequence")
    model("--tied", action="store_true", help="one weight for the embedding and the output layer")
    model("--experts", type=int, help="experts in place of each MLP; 4 with --ep 2, else none")
    model(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the weights (masters are fp32); auto: bf16 on hardware that computes in it",
    )
    model("--fp8", choices=FP8, help="keep the matrices of attention and MLP in FP8; needs bf16")
    parallel = parser.add_argument_group("parallelism; what is left of the ranks is data parallel")
    way = parallel.add_argument
    sizes = {"type": int, "choices": (1, 2), "default": 1}
    way("--tp", **sizes, help="ranks that divide each matrix of attention and MLP (tensor)")
    way("--sp", action="store_true", help="divide the sequences between them too; needs --tp 2")
    way("--ep", **sizes, help="ranks over which experts are distributed, whole (expert)")
    way("--pp", **sizes, help="stages that divide the layers (pipeline)")
    way("--overlap", action="store_true", help="reduce during backward, gather during forward")
    batch = parser.add_argument_group("batch").add_argument
    batch("--global-batch", type=int, default=24, help="sequences in a step, over all ranks")
    batch("--micro-batches", type=int, default=2, help="forwards of a rank in a step")
    optim = parser.add_argument_group("optimizer").add_argument
    optim("--optimizer", choices=tuple(RATES), default="muon", help="for the matrices")
    optim("--lr", type=float, help=f"None: {', '.join(f'{n} {r:g}' for n, r in RATES.items())}")
    optim("--weight-decay", type=float, default=0.1)
    optim("--warmup", type=float, default=0.05, help="share of the steps with a rising rate")
    keep = parser.add_argument_group("checkpoints; any layout of ranks loads them").add_argument
    keep("--save", type=Path, metavar="DIR", help="write a checkpoint here at the end")
    keep("--save-interval", type=int, metavar="N", help="and every N steps, beside training")
    keep("--load", type=Path, metavar="DIR", help="go on from the newest checkpoint in it")
    show = parser.add_argument_group("progress").add_argument
    show("--log-every", type=int, default=20, help="steps between lines where there is no terminal")
    show("--eval-every", type=int, default=40, help="steps between held-out losses")
    show("--eval-windows", type=int, default=120, help="held-out sequences in a measurement")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse numbers out of range, and set what depends on other arguments.

    Raises:
        ValueError: naming the flag.
    """
    for name in ("steps", "log_every", "eval_every", "eval_windows"):
        if vars(args)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} {vars(args)[name]}: must be at least 1")
    if args.save_interval is not None and args.save_interval < 1:
        raise ValueError(f"--save-interval {args.save_interval}: must be at least 1")
    if args.save_interval is not None and args.save is None:
        raise ValueError(f"--save-interval {args.save_interval}: needs --save DIR")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed {args.seed}: must be in 0 ... 2^31 - 1")
    if not 0 <= args.warmup <= 1:
        raise ValueError(f"--warmup {args.warmup}: must be a share, 0 ... 1")
    _check_parallelism(args)
    if args.lr is None:
        args.lr = RATES[args.optimizer]
    _settle_dtype(args)
    if args.target is None and args.steps == DEFAULT_STEPS and not args.data:
        args.target = DEFAULT_TARGET


def _settle_dtype(args: argparse.Namespace) -> None:
    """FP8 weights need bf16; else bf16 where it is fast."""
    if args.fp8 and args.dtype == "fp32":
        raise ValueError(f"--fp8 {args.fp8}: needs --dtype bf16")
    if args.dtype == "auto":
        args.dtype = "bf16" if args.fp8 or has_bf16_arithmetic() else "fp32"


def _check_parallelism(args: argparse.Namespace) -> None:
    """Refuse what no layout can do; that sizes divide is checked where things are divided."""
    if args.sp and args.tp == 1:
        raise ValueError("--sp: needs --tp 2, whose ranks divide the sequences")
    if args.experts is None:
        args.experts = 4 if args.ep > 1 else 0
    if args.experts < 0 or (args.ep > 1 and not args.experts):
        raise ValueError(f"--experts {args.experts}: must be at least {0 if args.ep == 1 else 1}")
    if (args.sp or args.experts) and args.sequence % args.tp:
        raise ValueError(f"--sequence {args.sequence} must be a multiple of --tp {args.tp}")


def has_bf16_arithmetic() -> bool:
    """Whether bf16 is fast here: in software it is ten times slower than fp32."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    probe = vars(torch.cpu).get("get_capabilities", dict)  # older releases of torch cannot tell
    capabilities = probe()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
