"""One check for each member that Megatron calls; all on one model, inside Megatron's own loop."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.utils import calc_params_l2_norm

from megatron_lw.distributed.buffers import GradState, WeightState
from megatron_lw.errors import CheckpointError, StateError
from megatron_lw.integrations import megatron as megatron_lw
from tests.megatron.training import train

FLAGS = (
    "--bf16 --train-iters 1 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
)


class World:
    """A wrapped model and its optimizer after one step of the loop."""

    def __init__(self, chunk: Any, optimizer: Any) -> None:
        self.chunk = chunk
        self.optimizer = optimizer

    def forward(self) -> torch.Tensor:
        tokens = torch.randint(0, 100, (2, 32))
        positions = torch.arange(32).repeat(2, 1)
        mask = torch.ones(2, 1, 32, 32).triu(1).bool()
        return self.chunk(tokens, positions, mask, labels=tokens).mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.scale_loss(self.forward()).backward()

    def step(self) -> Any:
        self.backward()
        return self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        self.chunk.finish_param_sync()
        return [param.detach().clone() for param in self.chunk.parameters()]

    def states(self) -> set[GradState]:
        return {bucket.grad_state for bucket in self.chunk.buckets}


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def refuses(call: Callable[[], Any], text: str) -> None:
    try:
        call()
    except StateError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised that says {text!r}")


def refuses_checkpoint(call: Callable[[], Any], text: str) -> None:
    try:
        call()
    except CheckpointError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised that says {text!r}")


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
    refuses(world.optimizer.step, "restore_from_cpu")
    world.optimizer.restore_from_cpu()
    assert same(kept, rows)


def optimizer_restore_from_cpu(world: World) -> None:
    world.optimizer.restore_from_cpu()  # nothing was offloaded
    world.optimizer.offload_to_cpu()
    world.optimizer.restore_from_cpu()
    assert world.step()[0] is True


# Chunk


def chunk_module(world: World) -> None:
    assert type(unwrap_model([world.chunk])[0]).__name__ == "GPTModel"


def chunk_config(world: World) -> None:
    assert get_model_config(world.chunk) is world.chunk.config


def chunk_force_all_reduce(world: World) -> None:
    world.optimizer.zero_grad()
    torch.manual_seed(7)  # equal batches: the mean is what each rank has
    world.forward().backward()
    mine = [param.main_grad.clone() for param in world.chunk.parameters()]
    world.chunk.force_all_reduce = True
    world.optimizer.zero_grad()
    torch.manual_seed(7)
    world.forward().backward()
    world.chunk.finish_grad_sync()
    world.chunk.force_all_reduce = False
    torch.testing.assert_close([param.main_grad for param in world.chunk.parameters()], mine)
    world.chunk.scale_gradients(torch.tensor(2.0))
    doubled = [2 * grad for grad in mine]
    torch.testing.assert_close([param.main_grad for param in world.chunk.parameters()], doubled)
    torch.manual_seed(dist.get_rank())


def chunk_ddp_config(world: World) -> None:
    assert world.chunk.ddp_config.use_megatron_fsdp is False
    assert world.chunk.ddp_config.overlap_param_gather


def chunk_buffers(world: World) -> None:
    assert len(world.chunk.buffers) > 2
    assert world.chunk.buffers == list(world.chunk.buckets)


def chunk_expert_parallel_buffers(world: World) -> None:
    assert world.chunk.expert_parallel_buffers == []


def chunk_remove_forward_pre_hook_handles(world: World) -> None:
    world.chunk.enable_forward_pre_hook()
    assert len(world.chunk.remove_forward_pre_hook_handles) > 5
    world.chunk.disable_forward_pre_hook()
    assert len(world.chunk.remove_forward_pre_hook_handles) == 0


def chunk_zero_grad_buffer(world: World) -> None:
    world.backward()
    world.chunk.zero_grad_buffer()
    assert world.states() == {GradState.EMPTY}
    assert all(param.main_grad.count_nonzero() == 0 for param in world.chunk.parameters())


def _reduces(world: World) -> int:
    return world.chunk.groups.dp.traffic.calls["reduce_scatter"]


def chunk_no_sync(world: World) -> None:
    """Gradient accumulation with overlap: one reduce-scatter a bucket a step."""
    world.optimizer.zero_grad()
    before = _reduces(world)
    with world.chunk.no_sync():
        world.forward().backward()
        world.forward().backward()
        assert _reduces(world) == before
        assert world.states() == {GradState.ACCUMULATING}
    world.forward().backward()
    assert _reduces(world) - before == len(world.chunk.buckets)  # all of them during backward
    assert world.states() == {GradState.REDUCING}
    assert world.optimizer.step()[0] is True
    assert _reduces(world) - before == len(world.chunk.buckets)


def chunk_start_grad_sync(world: World) -> None:
    world.optimizer.zero_grad()
    with world.chunk.no_sync():
        world.forward().backward()
    world.chunk.start_grad_sync(world.chunk.parameters())
    assert world.states() == {GradState.REDUCING}


def chunk_finish_grad_sync(world: World) -> None:
    world.backward()
    world.chunk.finish_grad_sync(force_all_reduce=False)
    assert world.states() == {GradState.REDUCED}
    assert world.chunk.finalized


def chunk_scale_gradients(world: World) -> None:
    world.backward()
    world.chunk.finish_grad_sync()
    rows = [bucket.grad_row.clone() for bucket in world.chunk.buckets]
    world.chunk.scale_gradients(torch.tensor(0.5))
    assert same([bucket.grad_row for bucket in world.chunk.buckets], [0.5 * row for row in rows])


def chunk_start_param_sync(world: World) -> None:
    world.step()
    assert {b.weight_state for b in world.chunk.buckets} == {WeightState.GATHERING}
    world.chunk.start_param_sync(world.chunk.parameters())  # nothing is newer
    world.chunk.start_param_sync(force_dispatch=True)
    world.chunk.start_param_sync(force_sync=True)
    assert {b.weight_state for b in world.chunk.buckets} == {WeightState.PUBLISHED}
    world.optimizer.check()


def chunk_enable_forward_pre_hook(world: World) -> None:
    world.chunk.disable_forward_pre_hook()
    world.step()
    world.chunk.enable_forward_pre_hook()
    world.forward()
    assert {b.weight_state for b in world.chunk.buckets} == {WeightState.PUBLISHED}
    world.optimizer.check()


def chunk_disable_forward_pre_hook(world: World) -> None:
    for param_sync in (True, False):
        world.step()
        world.chunk.disable_forward_pre_hook(param_sync=param_sync)
        assert {b.weight_state for b in world.chunk.buckets} == {WeightState.PUBLISHED}
        world.optimizer.check()


def chunk_free_overlap_buffers(world: World) -> None:
    world.step()
    world.chunk.free_overlap_buffers()
    assert {b.weight_state for b in world.chunk.buckets} == {WeightState.PUBLISHED}
    world.optimizer.check()


def optimizer_sharded_state_dict(world: World) -> None:
    metadata: dict[str, Any] = {"distrib_optim_sharding_type": "dp_reshardable"}
    model = world.chunk.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    found = world.optimizer.sharded_state_dict(model, metadata=metadata)
    assert metadata["distrib_optim_sharding_type"] == "fully_reshardable"
    written = [each.key for each in nested_values(found) if isinstance(each, ShardedTensor)]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, written)
    keys = [key for of_rank in gathered for key in of_rank]
    assert keys.count("optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc1.weight") == 2
    assert keys.count("optimizer.state.fp32_param.embedding.word_embeddings.weight") == 1
    refuses_checkpoint(
        lambda: world.optimizer.sharded_state_dict({}, metadata=metadata), "state dict"
    )


def optimizer_load_state_dict(world: World) -> None:
    world.step()
    model = world.chunk.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    wanted = world.optimizer.sharded_state_dict(model, is_loading=True)
    refuses_checkpoint(lambda: world.optimizer.load_state_dict(model), "sharded_state_dict")
    for each in nested_values(wanted):
        if isinstance(each, ShardedTensor):
            each.data.fill_(0.25)
    before = world.weights()
    tensors = {key: each.data for key, each in wanted["megatron_lw_tensors"].items()}
    plan = wanted["megatron_lw_plan"].unwrap()
    assert same(before, world.weights())
    world.optimizer.load_state_dict({"megatron_lw_plan": plan, "megatron_lw_tensors": tensors})
    assert all((weight == 0.25).all() for weight in world.weights())
    world.optimizer.check()


def chunk_broadcast_params(world: World) -> None:
    world.chunk.finish_param_sync()
    with torch.no_grad():
        for param in world.chunk.parameters():
            param.fill_(float(dist.get_rank() + 1))
    world.chunk.broadcast_params()
    assert all((weight == 1.0).all() for weight in world.weights())


def chunk_state_dict_for_save_checkpoint(world: World) -> None:
    found = world.chunk.state_dict_for_save_checkpoint()
    assert "embedding" in str(found.keys())


def chunk_sharded_state_dict(world: World) -> None:
    found = world.chunk.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    assert "decoder.final_layernorm.weight" in found


def chunk_load_state_dict(world: World) -> None:
    saved = {
        key: value.clone() for key, value in world.chunk.state_dict().items() if value is not None
    }
    before = world.weights()
    world.step()
    world.chunk.load_state_dict(saved, strict=False)
    assert same(before, world.weights())
    world.optimizer.reload_model_params()
    world.optimizer.check()


# Parameter


def param_main_grad(world: World) -> None:
    world.backward()
    assert all(param.grad is None for param in world.chunk.parameters())
    assert any(param.main_grad.count_nonzero() for param in world.chunk.parameters())
    assert {param.main_grad.dtype for param in world.chunk.parameters()} == {torch.float32}


def param_grad_added_to_main_grad(world: World) -> None:
    """What autograd leaves of such a parameter is a placeholder, but for the tied embedding's."""
    for param in world.chunk.parameters():
        param.grad_added_to_main_grad = True
    world.backward()
    # The flag is taken back as the gradient arrives, and nothing was added.
    for param in world.chunk.parameters():
        assert param.grad_added_to_main_grad is False
        tied = getattr(param, "zero_out_wgrad", False)
        assert bool(param.main_grad.count_nonzero()) == tied


def param_main_param(world: World) -> None:
    """The norm that --log-params-norm prints is that of the masters, also before they are sent."""
    world.step()
    rows = [publisher.master.row for publisher in world.chunk.publishers]
    total = sum((row.double().square().sum() for row in rows), torch.zeros((), dtype=torch.double))
    dist.all_reduce(total)
    found = calc_params_l2_norm(world.chunk)
    assert abs(found / total.sqrt().item() - 1) < 1e-6
    held = [p.main_param for p in world.chunk.parameters() if p.main_param is not None]
    assert sum(part.numel() for part in held) < sum(p.numel() for p in world.chunk.parameters())
    assert {part.untyped_storage().data_ptr() for part in held} == {
        row.untyped_storage().data_ptr() for row in rows if row.count_nonzero()
    }


def param_main_param_sharded(world: World) -> None:
    assert all(param.main_param_sharded is True for param in world.chunk.parameters())


CHECKS: dict[str, Callable[[World], None]] = {
    f"{kind}.{name.removeprefix(kind + '_')}": check
    for name, check in list(globals().items())
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
