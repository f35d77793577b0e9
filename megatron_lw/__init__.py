"""A Megatron-style layer-wise distributed optimizer: sharded Muon and Adam for any torch module.

Where to read on, in the order of the flow:

    groups            every process group by name
    optimizer.describe, .routing, .plan, .layout     from a model to a frozen plan
    distributed.ddp, .buffers, .reduce, .gather      gradients in, weights out
    optimizer.step    the step itself, stage by stage
    optimizer.children  Adam, Muon, the Newton-Schulz iteration and the exchange
    optimizer.api     `get_megatron_optimizer`, where it all is put together
"""

from __future__ import annotations

from megatron_lw.config import OptimizerConfig
from megatron_lw.ddp_config import DDPConfig
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.distributed.finalize import finalize_model_grads
from megatron_lw.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    InvariantError,
    LayerWiseError,
    NonFiniteError,
    PlanMismatchError,
    StateError,
)
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.api import get_megatron_optimizer
from megatron_lw.optimizer.describe import annotate
from megatron_lw.optimizer.names import NameMap
from megatron_lw.optimizer.qk_clip import HeadRows, QKClip
from megatron_lw.optimizer.step import LayerWiseDistributedOptimizer
from megatron_lw.overrides import (
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    standard_overrides,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "DDPConfig",
    "DistributedDataParallel",
    "HeadRows",
    "InvariantError",
    "LayerWiseDistributedOptimizer",
    "LayerWiseError",
    "NameMap",
    "NonFiniteError",
    "OptimizerConfig",
    "ParallelGroups",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "PlanMismatchError",
    "QKClip",
    "StateError",
    "annotate",
    "finalize_model_grads",
    "get_megatron_optimizer",
    "standard_overrides",
]
