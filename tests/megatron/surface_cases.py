"""One check for each member that Megatron calls; all on one model, inside Megatron's own loop."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_lw.distributed.buffers import GradState
from megatron_lw.integrations import megatron as megatron_lw
from tests.megatron import surface_chunk_cases
from tests.megatron.surface_world import World, refuses, same
from tests.megatron.training import train

FLAGS = (
    "--bf16 --train-iters 1 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
)


# Optimizer


def optimizer_param_groups(world: World) -> None:
    scheduler = OptimizerParamScheduler(
        world.optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=0,
        lr_decay_steps=10,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="constant",
    )
    scheduler.max_lr = 1e-2
    for group in world.optimizer.param_groups:
        group["max_lr"], group["min_lr"] = 1e-2, 1e-3
    scheduler.step(5)
    groups = world.optimizer.param_groups
    assert {round(group["lr"], 6) for group in groups} == {0.0055}
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}  # biases and norms: wd_mult 0
    assert {group["optimizer"] for group in groups} == {"adam", "muon"}
    assert any(group["default_config"] for group in groups)


def optimizer_config(world: World) -> None:
    assert world.optimizer.config.optimizer == "muon"
    assert world.optimizer.config.bf16


def optimizer_is_stub_optimizer(world: World) -> None:
    assert world.optimizer.is_stub_optimizer is False


def optimizer_grad_norms_by_group(world: World) -> None:
    assert world.optimizer.grad_norms_by_group == {}


def optimizer_chained_optimizers(world: World) -> None:
    views = world.optimizer.chained_optimizers
    assert {view.name for view in views} == {"adam", "muon"}
    assert sum(len(view.get_parameters()) for view in views) == len(list(world.chunk.parameters()))
    assert not any(view.is_stub_optimizer for view in views)


def optimizer_optimizer(world: World) -> None:
    assert world.optimizer.optimizer.param_groups is world.optimizer.param_groups


def optimizer_step(world: World) -> None:
    before = world.weights()
    updated, norm, zeros = world.step()
    assert updated is True
    assert isinstance(norm, float)
    assert isinstance(zeros, int)
    assert not same(before, world.weights())
    calls: list[Any] = []
    original = world.optimizer.step
    world.optimizer.step = lambda: calls.append(original()) or calls[0]
    assert world.step() is calls[0]
    del world.optimizer.step
    assert world.step()[0] is True
    assert len(calls) == 1


def optimizer_zero_grad(world: World) -> None:
    world.backward()
    world.optimizer.zero_grad()
    assert world.states() == {GradState.EMPTY}


def optimizer_scale_loss(world: World) -> None:
    assert world.optimizer.scale_loss(torch.tensor(3.0)).item() == 3.0


def optimizer_get_loss_scale(world: World) -> None:
    scale = world.optimizer.get_loss_scale()
    assert scale.shape == (1,)
    assert scale.item() == 1.0


def optimizer_get_parameters(world: World) -> None:
    found = {id(param) for param in world.optimizer.get_parameters()}
    assert found == {id(param) for param in world.chunk.parameters()}


def optimizer_prepare_model_params_for_param_sync(world: World) -> None:
    before = world.weights()
    world.optimizer.prepare_model_params_for_param_sync()
    world.chunk.start_param_sync(force_sync=True)
    assert same(before, world.weights())


def optimizer_reload_model_params(world: World) -> None:
    world.chunk.finish_param_sync()
    with torch.no_grad():
        for param in world.chunk.parameters():
            param.mul_(0.5)
    halved = world.weights()
    world.optimizer.reload_model_params()
    world.chunk.masters_newer = True
    world.chunk.start_param_sync(force_sync=True)
    assert same(halved, world.weights())
    refuses(lambda: world.optimizer.reload_model_params({}), "--load-main-params-from-ckpt")


def _refused(name: str, *args: Any) -> Callable[[World], None]:
    def check(world: World) -> None:
        refuses(lambda: getattr(world.optimizer, name)(*args), "--no-save-optim")

    return check


def optimizer_offload_to_cpu(world: World) -> None:
    rows = list(world.optimizer._state_tensors())
    kept = [row.clone() for row in rows]
    world.optimizer.offload_to_cpu()
    world.optimizer.offload_to_cpu()
    assert {row.untyped_storage().nbytes() for row in rows} == {0}
    world.backward()
    for use in (world.optimizer.step, world.optimizer.settle, world.optimizer.reload_model_params):
        refuses(use, "restore_from_cpu")
    world.optimizer.restore_from_cpu()
    assert same(kept, rows)


def optimizer_restore_from_cpu(world: World) -> None:
    world.optimizer.restore_from_cpu()  # nothing was offloaded
    world.optimizer.offload_to_cpu()
    world.optimizer.restore_from_cpu()
    assert world.step()[0] is True


CHECKS: dict[str, Callable[[World], None]] = {
    f"{kind}.{name.removeprefix(kind + '_')}": check
    for name, check in {**globals(), **vars(surface_chunk_cases)}.items()
    for kind in ("optimizer", "chunk", "param")
    if name.startswith(kind + "_") and callable(check)
} | {
    "optimizer.state_dict": _refused("state_dict"),
    "optimizer.save_parameter_state": _refused("save_parameter_state", "x"),
    "optimizer.load_parameter_state": _refused("load_parameter_state", "x"),
    "optimizer.save_state_dict_to_file": _refused("save_state_dict_to_file", "x"),
    "optimizer.load_state_dict_from_file": _refused("load_state_dict_from_file", "x"),
}


def check_all() -> dict[str, str]:
    """Member -> what is wrong with it; empty text where nothing is."""
    found: dict[str, str] = {}

    def probe(model: Any, optimizer: Any) -> None:
        assert isinstance(model[0], MegatronDDP)
        assert isinstance(model[0], megatron_lw.DistributedDataParallel)
        for member, check in CHECKS.items():
            torch.manual_seed(dist.get_rank())
            optimizer.zero_grad()
            try:
                check(World(model[0], optimizer))
                found[member] = ""
            except Exception:
                found[member] = traceback.format_exc()
        optimizer.zero_grad()

    train(FLAGS.split(), probe=probe)
    return found


def inherited_from_megatron() -> list[str]:
    """Public members of Megatron's class that ours takes over instead of defining them."""
    ours = megatron_lw.DistributedDataParallel
    own = [kind for kind in ours.__mro__ if kind.__module__.startswith("megatron_lw")]
    return [
        name
        for name in vars(MegatronDDP)
        if not name.startswith("_") and not any(name in vars(kind) for kind in own)
    ]
