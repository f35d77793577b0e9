"""Checks as in `surface_cases`: of a model chunk, of a parameter, and of what is saved."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.utils import calc_params_l2_norm

from megatron_lw.distributed.buffers import GradState, WeightState
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.held import held_buckets
from tests.megatron.surface_world import World, refuses, same

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
    refuses(
        lambda: world.optimizer.sharded_state_dict({}, metadata=metadata),
        "state dict",
        CheckpointError,
    )


def optimizer_load_state_dict(world: World) -> None:
    world.step()
    model = world.chunk.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    wanted = world.optimizer.sharded_state_dict(model, is_loading=True)
    refuses(lambda: world.optimizer.load_state_dict(model), "sharded_state_dict", CheckpointError)
    before = world.weights()
    for each in nested_values(wanted):
        if isinstance(each, ShardedTensor):
            each.data.fill_(0.25)
    tensors = {key: each.data for key, each in wanted["megatron_lw_tensors"].items()}
    plan = wanted["megatron_lw_plan"].unwrap()
    assert same(before, world.weights())
    world.optimizer.load_state_dict({"megatron_lw_plan": plan, "megatron_lw_tensors": tensors})
    assert all((weight == 0.25).all() for weight in world.weights())
    world.optimizer.check()
    fresh = min(world.optimizer.runtime.model.params)
    anew = dataclasses.replace(plan, fresh=frozenset([fresh]))
    world.optimizer.load_state_dict({"megatron_lw_plan": anew, "megatron_lw_tensors": tensors})
    for held in held_buckets(world.optimizer.runtime):
        for name, slot in held.bucket.row_slots():
            for key, row in held.rows.items():
                part = row[slot.row_start : slot.row_start + slot.numel]
                starts_anew = key != "master" and name == fresh
                assert (part == (0.0 if starts_anew else 0.25)).all(), (key, name)


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
