"""Megatron's own pretraining loop on a tiny GPT and mock data, with what each step returned.

Imported on ranks only, after `cuda_on_cpu.install()`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, training
from megatron.training.argument_utils import (
    ArgumentGroupFactory,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

from megatron_lw.integrations import megatron as megatron_lw
from tests.megatron import stand_ins
from tests.megatron.runs import Run
from tests.megatron.saving import writers

dataset_utils.compile_helpers = lambda: None  # the wheel ships them built


def _read_sources_once() -> None:
    """Megatron reads its own source for help texts whenever it parses: a third of a short run."""
    factory: Any = ArgumentGroupFactory
    read = factory._get_field_docstrings
    known: dict[type, Any] = {}

    def remembered(self: Any, kind: type) -> Any:
        if kind not in known:
            known[kind] = read(self, kind)
        return known[kind]

    factory._get_field_docstrings = remembered


_read_sources_once()

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 20 "
    "--lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 120 --make-vocab-size-divisible-by 16 "
    "--optimizer muon --use-distributed-optimizer "
    "--muon-tp-mode duplicated --log-num-zeros-in-grad "
    "--transformer-impl local --attention-backend unfused --distributed-backend gloo "
    "--use-cpu-initialization --num-workers 0 --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--log-interval 100 --eval-iters 0 --eval-interval 1000"
).split()


Probe = Callable[[Sequence[Any], Any], Any]
Around = Callable[[Sequence[Any], Any, Callable[[], Any]], Any]


def train(
    flags: Iterable[str] = (),
    *,
    ours: bool = True,
    ddp: bool = True,
    base: Sequence[str] = BASE,
    without: Sequence[str] = (),
    probe: Probe | None = None,
    around: Around | None = None,
    prepare: Callable[[Any], None] | None = None,
    amend: Callable[[Any], None] | None = None,
    core: type | None = None,
) -> Run:
    """Train as a script would, by `pretrain`.

    Args:
        flags: command-line arguments after `base`; the last of a name wins.
        base: what stands before them.
        ours: whether `install()` is called first.
        ddp: whether with our DDP.
        without: what is left out of them.
        probe: called with model and optimizer after each step.
        around: called with model, optimizer and its step, in place of that step.
        prepare: called with each model chunk before it is wrapped.
        amend: called with the arguments once the model is configured.
        core: attention, see `stand_ins.installed`.
    """
    run = Run()
    argv = sys.argv
    sys.argv = ["pretrain", *(flag for flag in (*base, *flags) if flag not in without)]
    if ours:
        megatron_lw.install(ddp=ddp)
    try:
        saving = writers(beside_training="--async-save" in sys.argv)
        with _watched(run, probe, around), stand_ins.installed(core), saving:
            args = parse_and_validate_args()
            model_config = gpt_config_from_args(args)
            if prepare is not None:
                model_config.pre_wrap_hooks.append(partial(_prepared, prepare))
            if amend is not None:
                amend(args)
            training.pretrain(
                pretrain_cfg_container_from_args(args, model_config),
                _datasets,
                ModelType.encoder_or_decoder,
                _forward_step,
            )
    finally:
        megatron_lw.uninstall()
        sys.argv = argv
        training.destroy_global_state()
    return run


def run_script(path: str, flags: Iterable[str] = ()) -> Run:
    """Run a script of a user's, which calls `install` itself, with `BASE` and flags."""
    run = Run()
    argv = sys.argv
    sys.argv = [path, *BASE, *flags]
    try:
        with _watched(run, None, None):
            runpy.run_path(path, run_name="__main__")
    finally:
        megatron_lw.uninstall()
        sys.argv = argv
        training.destroy_global_state()
    return run


def _prepared(prepare: Callable[[Any], None], chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        prepare(chunk)
    return chunks


@contextmanager
def _watched(run: Run, probe: Probe | None, around: Around | None) -> Iterator[None]:
    """Note what each `train_step` returns, and the weights at the end."""
    step, setup = training.train_step, training.setup_model_and_optimizer
    built: list[Any] = []

    def watched_setup(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        built[:] = result[:2]
        model, optimizer, _ = result
        if around is not None:
            optimizer.step = partial(around, model, optimizer, optimizer.step)
        return result

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        losses, skipped, *_, norm, zeros, _ = result
        run.losses += [float(value) for value in losses.values()]
        run.skipped += skipped
        run.norms.append(None if norm is None else float(norm))
        run.zeros.append(None if zeros is None else int(zeros))
        if probe is not None:
            run.extra.append(probe(*built))
        return result

    training.train_step, training.setup_model_and_optimizer = watched_step, watched_setup
    try:
        yield
    finally:
        training.train_step, training.setup_model_and_optimizer = step, setup
    for number, chunk in enumerate(built[0]):
        plain = (pair for pair in chunk.named_parameters() if type(pair[1]) is torch.nn.Parameter)
        for name, param in plain:
            run.weights[f"{number}.{name}"] = param.detach().float().clone()


def _datasets(sizes: Any, vp_stage: Any = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=args.seq_length,
        blend=None,
        split="90,5,5",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


_datasets.is_distributed = True  # type: ignore[attr-defined]


def _forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = next(data)
    for key in ("tokens", "position_ids", "labels", "loss_mask"):
        batch[key] = stand_ins.part_of_sequence(batch[key])
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
    )
    return output, partial(_loss, batch["loss_mask"].float())


def _loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, Any, dict[str, Any]]:
    total = (output.float().view(-1) * mask.view(-1)).sum()
    tokens = mask.sum()
    report = torch.stack([total.detach(), tokens.float()])
    return total, tokens.to(torch.int), {"lm loss": report}
