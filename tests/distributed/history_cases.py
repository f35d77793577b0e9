"""Runs with delayed scales that are saved in the middle and loaded by others."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatron_lw
from megatron_lw import dist_checkpointing, fp8
from megatron_lw.dist_checkpointing import CheckpointWarning
from megatron_lw.fp8.kinds import stored
from megatron_lw.fp8.recipe import Recipe
from tests.distributed.fp8_cases import BF16, RECIPES, Optimizer, build, everything, train

STEP = 4
State = dict[str, torch.Tensor]
Wrapped = megatron_lw.DistributedDataParallel


def weights(ddp: Wrapped) -> State:
    """Weights, planes and histories, which do not depend on the number of ranks."""
    ddp.finish_param_sync()
    return {label: t.clone() for b in ddp.buckets for label, t in b.stored().items()}


def save(
    folder: Path, recipe: str | Recipe, background: bool = False
) -> tuple[State, list[Any], State]:
    """Save in the middle and go on: weights at the save, what is seen then, all at the end."""
    ddp, optimizer = build(recipe)
    train(ddp, optimizer, range(STEP))
    before = weights(ddp)
    dist_checkpointing.save(folder, ddp, optimizer, step=STEP, background=background)
    seen = train(ddp, optimizer, range(STEP, STEP + 4))
    dist_checkpointing.wait(optimizer)
    return before, seen, everything(ddp, optimizer)


def spoil(module: nn.Module) -> None:
    """Other weights, with a past that no load may leave."""
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.full(param.shape, 7.0))
            if isinstance(param, fp8.QuantisedTensor) and param.planes.history is not None:
                param.planes.history.fill_(99.0)


def load(
    folder: Path, recipe: str | Recipe, options: dict[str, Any], go_on: bool = False
) -> tuple[State, list[str], list[Any], State]:
    """Weights after a load into others, its warnings, and what `save` returns of going on."""
    ddp, optimizer = build(recipe)
    spoil(ddp.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist_checkpointing.load(folder, ddp, optimizer, **options)
    optimizer.check()
    told = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
    after = weights(ddp)
    seen = train(ddp, optimizer, range(STEP, STEP + 4)) if go_on else []
    return after, told, seen, everything(ddp, optimizer)


def resave(folder: Path, recipe: str, to: Path) -> None:
    """Load with another recipe, and save."""
    ddp, optimizer = build(recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        dist_checkpointing.load(folder, ddp, optimizer)
    dist_checkpointing.save(to, ddp, optimizer, step=STEP)


def divided(tensor: int, frozen: bool = False) -> tuple[Wrapped, Optimizer]:
    """Two matrices of which tensor parallelism divides the first, by rows; it may be frozen."""
    groups = megatron_lw.ParallelGroups.create(tensor=tensor)
    torch.manual_seed(0)
    # Parts of very different size, so that each has a scale of its own.
    whole = torch.randn(128, 64) * torch.linspace(0.01, 1.0, 128)[:, None]
    cut, full = (nn.Linear(64, n, bias=False, dtype=BF16) for n in (128 // tensor, 64))
    with torch.no_grad():
        cut.weight.copy_(whole.chunk(tensor)[groups.tp.rank])
    megatron_lw.annotate(cut.weight, tp_dim=0).requires_grad_(not frozen)
    model = fp8.quantize_model(nn.Sequential(cut, full), RECIPES["delayed"])
    ddp = megatron_lw.DistributedDataParallel(model, groups, megatron_lw.DDPConfig())
    config = megatron_lw.OptimizerConfig(optimizer="adam", lr=0.05, bf16=True)
    return ddp, megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=groups)


def step_divided(ddp: Wrapped, optimizer: Optimizer, steps: range) -> None:
    """Steps with gradients that shrink the weights; no forward."""
    for step in steps:
        optimizer.zero_grad()
        for param in ddp.module.parameters():
            values = param.dequantize().detach().float()
            param.main_grad.copy_(values if step % 2 else values.sign())
        optimizer.step()


def save_divided(folder: Path, tensor: int) -> tuple[State, State]:
    """Weights at the save and after more steps."""
    ddp, optimizer = divided(tensor)
    step_divided(ddp, optimizer, range(STEP))
    before = weights(ddp)
    dist_checkpointing.save(folder, ddp, optimizer, step=STEP)
    step_divided(ddp, optimizer, range(STEP, STEP + 3))
    return before, weights(ddp)


def load_divided(folder: Path, tensor: int) -> tuple[State, list[str], State]:
    """Weights after a load, its warnings, weights after more steps."""
    ddp, optimizer = divided(tensor)
    spoil(ddp.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist_checkpointing.load(folder, ddp, optimizer)
    optimizer.check()
    after = weights(ddp)
    step_divided(ddp, optimizer, range(STEP, STEP + 3))
    told = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
    return after, told, weights(ddp)


def freeze(model: nn.Module) -> None:
    """The largest matrix, and an expert."""
    model.mid.weight.requires_grad_(False)
    model.experts[1].weight.requires_grad_(False)


def frozen_weights(ddp: Wrapped) -> State:
    """Everything that the weights consist of that `freeze` freezes."""
    model = ddp.module
    found = {"mid.weight": model.mid.weight, "experts.1.weight": model.experts[1].weight}
    return {
        key: tensor.clone()
        for name, param in found.items()
        for key, tensor in stored(name, param).items()
    }


def save_frozen(folder: Path, recipe: str, frozen: bool = True) -> tuple[State, State]:
    """Save frozen weights that are quantised; they, and their values in bf16."""
    ddp, optimizer = build(recipe, tweak=freeze if frozen else None)
    assert ddp.module.mid.weight.initial is None
    train(ddp, optimizer, range(2))
    dist_checkpointing.save(folder, ddp, optimizer, step=2)
    values = {"mid.weight": ddp.module.mid.weight, "experts.1.weight": ddp.module.experts[1].weight}
    return frozen_weights(ddp), {name: p.dequantize().detach() for name, p in values.items()}


def load_frozen(
    folder: Path, recipe: str, frozen: bool = True, leave_out: tuple[str, ...] = ()
) -> tuple[State, State, list[str]]:
    """Frozen weights after a load into others, their values, and what was left out."""
    ddp, optimizer = build(recipe, tweak=freeze if frozen else None)
    spoil(ddp.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        loaded = dist_checkpointing.load(folder, ddp, optimizer, leave_out=leave_out)
    optimizer.check()
    values = {"mid.weight": ddp.module.mid.weight, "experts.1.weight": ddp.module.experts[1].weight}
    found = {name: param.dequantize().detach() for name, param in values.items()}
    return frozen_weights(ddp), found, list(loaded.left_out)


def frozen_parts(folder: Path, tensor: int, save: bool) -> State:
    """Bytes and scales of a frozen weight that tensor parallelism divides."""
    ddp, optimizer = divided(tensor, frozen=True)
    if save:
        dist_checkpointing.save(folder, ddp, optimizer, step=0)
    else:
        spoil(ddp.module)
        dist_checkpointing.load(folder, ddp, optimizer)
    param = ddp.module[0].weight
    return {"values": param.dequantize().detach(), **stored("it", param)}
