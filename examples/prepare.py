"""Before the first step: the ranks and their groups, the text, this rank's part of the model."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import cast

import torch
from torch import distributed as dist
from torch import nn

import megatron_lw
from data import BatchSource, load_corpus, unigram_entropy
from gpt import GPT, GPTConfig
from megatron_lw import fp8
from megatron_lw.distributed import agreement
from moe import add_experts
from parallel_layers import ColumnParallelLinear, RowParallelLinear, Stream, divide
from pipeline import Batches, Stage
from settings import DTYPES, check_arguments, give_up


def start(args: argparse.Namespace) -> tuple[megatron_lw.ParallelGroups, torch.device]:
    """Join the ranks that torchrun started, or be the only one, and divide them into groups."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    needed = args.pp * max(args.tp, args.ep)
    if ranks % needed:
        leave()
        give_up(
            f"--tp {args.tp} --ep {args.ep} --pp {args.pp} need a multiple of {needed} ranks, not "
            f"{ranks}: torchrun --nproc-per-node {needed} examples/pretrain_gpt.py ..."
        )
    return make_groups(args), device


def make_groups(args: argparse.Namespace) -> megatron_lw.ParallelGroups:
    """The process groups; tensor parallelism does not divide experts, which are whole."""
    if not dist.is_initialized():
        return megatron_lw.ParallelGroups.single()
    return megatron_lw.ParallelGroups.create(
        tensor=args.tp, pipeline=args.pp, expert=args.ep, expert_tensor=1
    )


def layout(groups: megatron_lw.ParallelGroups, args: argparse.Namespace) -> str:
    """How the ranks are divided, in words."""
    sizes = {"data": groups.dp, "tensor": groups.tp, "expert": groups.ep, "pipeline": groups.pp}
    ranks = ", ".join(f"{group.size} {name}-parallel" for name, group in sizes.items())
    return f"{ranks} ranks" + (", sequences in parts" if args.sp else "")


def leave() -> None:
    """End what `start` began; a process that ends with its groups still open may abort."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is trained on what.

    Attributes:
        stage: this rank's part of the model.
        source: draws this rank's batches.
        held_out: this rank's part of the held-out windows.
        entropy: unigram entropy of the held-out text, nats a byte.
        text: the text in words.
    """

    stage: Stage
    source: BatchSource
    held_out: Batches
    entropy: float
    text: str


def build(config: GPTConfig, args: argparse.Namespace, groups: megatron_lw.ParallelGroups) -> Stage:
    """This rank's part of the model; every rank draws the whole one, alike, and keeps its part.

    Raises:
        ValueError: a size does not divide.
    """
    torch.manual_seed(args.seed)
    model = GPT(config)
    stream = Stream(group=groups.tp, in_parts=args.sp)
    if args.experts:
        add_experts(model, args.experts, groups.ep, stream)
    divide(model, stream)
    return Stage(model, groups.pp, stream)


def is_block_matrix(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer of attention or MLP, divided or not; no router."""
    linear = isinstance(module, nn.Linear | ColumnParallelLinear | RowParallelLinear)
    return linear and name.split(".")[-1] in ("qkv", "output", "gate_up", "down") and "." in name


def prepare(
    args: argparse.Namespace, groups: megatron_lw.ParallelGroups, device: torch.device
) -> Run:
    """Read the text and make this rank's part of the model.

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
        rank=groups.dp.rank,
        ranks=groups.dp.size,
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
    stage = build(config, args, groups).to(device)
    if args.fp8:
        fp8.quantize_model(stage, args.fp8, is_block_matrix)
    return Run(
        stage=stage,
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
        run = prepare(args, groups, device)
    except (OSError, ValueError) as error:
        problem = error
    try:
        agreement.agree_or_raise(problem, groups.world)
    except (OSError, ValueError) as error:
        leave()
        give_up(str(error))
    return cast(Run, run)
