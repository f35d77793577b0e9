"""megatron_lw inside Megatron's pretraining loop; needs megatron-core.

from megatron_lw.integrations import megatron as megatron_lw
megatron_lw.install()  # before pretrain(...)
"""

from __future__ import annotations

from megatron_lw.integrations.megatron.adopt import adopt_megatron_ddp
from megatron_lw.integrations.megatron.api import get_megatron_optimizer, wrap_model_chunks
from megatron_lw.integrations.megatron.ddp import DistributedDataParallel
from megatron_lw.integrations.megatron.groups import parallel_groups
from megatron_lw.integrations.megatron.install import install, uninstall
from megatron_lw.integrations.megatron.optimizer import MegatronOptimizer

__all__ = [
    "DistributedDataParallel",
    "MegatronOptimizer",
    "adopt_megatron_ddp",
    "get_megatron_optimizer",
    "install",
    "parallel_groups",
    "uninstall",
    "wrap_model_chunks",
]
