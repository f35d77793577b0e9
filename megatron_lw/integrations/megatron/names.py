"""Global parameter names, from what the model itself says for its checkpoints.

A Megatron module's `sharded_state_dict` knows which layer of the whole model a local layer is, and
which expert of all experts a local one. With singleton shards the key of each tensor holds these
numbers: `decoder.layers.7.mlp.experts.experts.3.linear_fc1.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import Float16Module
from torch import nn

from megatron_lw.errors import ConfigError
from megatron_lw.integrations.megatron.sharding import Entry
from megatron_lw.optimizer.names import NameMap

_NUMBERED = {"singleton_local_shards": True, "non_homogeneous_layers": True}


def name_map(module: nn.Module, chunk: int, pipeline_rank: int, dp_cp_group: Any) -> NameMap:
    """The map from the names of one model chunk to names of the whole model.

    Buffers that no checkpoint holds keep their local name, with the place of the chunk before it.

    Args:
        module: the chunk as it is wrapped, half-precision wrapper included.
        chunk: its index among this rank's chunks.
        pipeline_rank: this rank's pipeline stage.
        dp_cp_group: Megatron's data-parallel group, which its sharded state dict asks for.

    Raises:
        ConfigError: the module has no sharded state dict, or it leaves out a parameter.
    """
    keys = {name: entry.key for name, entry in sharded_entries(module, dp_cp_group).items()}
    prefix = prefix_of(module)
    globals_: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, _ in module.named_parameters():
        local = name.removeprefix(prefix)
        if local not in keys:
            raise ConfigError(
                f"parameter {local!r} is not in the model's sharded_state_dict, so that it has no "
                "name that holds for the whole model; return it from sharded_state_dict of its "
                "module"
            )
        if taken.setdefault(keys[local], local) != local:
            raise ConfigError(
                f"parameters {taken[keys[local]]!r} and {local!r} both have the key "
                f"{keys[local]!r} in the model's sharded_state_dict; give each its own"
            )
        globals_[name] = keys[local]
    place = f"stage{pipeline_rank}.chunk{chunk}."
    for name, _ in module.named_buffers():
        local = name.removeprefix(prefix)
        globals_[name] = keys.get(local, f"{place}{local}")
    return NameMap(globals_)


def prefix_of(module: nn.Module) -> str:
    """What the names of parameters have before those of the state dict."""
    return "module." if isinstance(module, Float16Module) else ""


def sharded_entries(module: nn.Module, dp_cp_group: Any) -> Mapping[str, Entry]:
    """What the module itself says of its tensors for a checkpoint, by name in the state dict.

    Args:
        module: the chunk as it is wrapped.
        dp_cp_group: Megatron's data-parallel group, which its sharded state dict asks for.

    Raises:
        ConfigError: it has no sharded state dict, or that fails.
    """
    describe = getattr(module, "sharded_state_dict", None)
    if describe is None:
        raise ConfigError(
            f"{type(module).__name__} has no sharded_state_dict; derive it from MegatronModule, or "
            "wrap it in megatron_lw.DistributedDataParallel with a NameMap of your own"
        )
    try:
        found = describe(metadata={**_NUMBERED, "dp_cp_group": dp_cp_group})
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__}.sharded_state_dict failed, so that Megatron cannot save this "
            "model, nor say its parameters' names; with --mtp-num-layers over pipeline stages pass "
            f"--untie-embeddings-and-output-weights ({type(error).__name__}: {str(error)[:100]})"
        ) from error
    return {
        name: entry
        for name, entry in found.items()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    }
