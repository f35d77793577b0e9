"""`DDPConfig`: the settings of gradient reduction and weight gathering, under Megatron's names.

Every field of megatron-core 0.19.2's `DistributedDataParallelConfig` is here, with the same default
unless the field's docstring says otherwise. As in `config`, what cannot be honoured must keep its
default; `DDPConfig.FIELD_STATUS` is the table that decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from megatron_lw.field_status import (
    FieldStatus,
    field_problems,
    flag,
    honoured,
    integer,
    no_effect,
    raise_problems,
    refused,
    require_known,
    warn_ignored,
)

_FSDP = "read only with use_megatron_fsdp, which is refused"
_NCCL_UB = "read only with nccl_ub, which is refused"
_USE_FSDP = "states are spread by rows of buckets, not by FSDP units"
_FP32_SUM = "sums in fp32 come with fp32 gradient storage"
_USE_FP32 = "drop it and leave grad_reduce_in_fp32 at True"
# Frames between warn_ignored and the line that built the configuration: warn_ignored itself,
# __post_init__, and the __init__ that dataclass generates.
_CALLER = 4

DDP_FIELDS: Mapping[str, FieldStatus] = MappingProxyType(
    {
        "grad_reduce_in_fp32": honoured(
            flag(),
            "gradients are accumulated and reduced in fp32; False: in the dtype of the weight",
            differs="a BF16 sum over many ranks and micro-batches loses the small gradients",
        ),
        "overlap_grad_reduce": honoured(
            flag(), "a bucket is reduced while backward goes on, from the second step on"
        ),
        "overlap_param_gather": honoured(
            flag(), "weights are gathered while the next forward goes on"
        ),
        "align_param_gather": no_effect("every gather is started by the step itself"),
        "use_distributed_optimizer": no_effect("gradients are always reduced into rows"),
        "num_distributed_optimizer_instances": refused(
            "rows are spread over the whole data-parallel group", "leave it at 1"
        ),
        "check_for_nan_in_grad": no_effect("gradients are always checked, once reduced"),
        "check_for_large_grads": refused(
            "only NaN and infinity are looked for in a gradient",
            "bound the norm with OptimizerConfig.grad_norm_skip_threshold",
        ),
        "bucket_size": honoured(
            integer(1, optional=True), "elements after which a bucket is closed; None: planned"
        ),
        "num_buckets": refused("buckets are sized by their elements", "give bucket_size"),
        "pad_buckets_for_high_nccl_busbw": no_effect(
            "rows are padded to 64 elements only; give a larger bucket_size", warn=True
        ),
        "reduce_scatter_with_fp32_accumulation": honoured(
            flag(), "half-precision gradients travel as they are and are summed in fp32"
        ),
        "param_name_patterns_for_fp32_local_accumulation": refused(_FP32_SUM, _USE_FP32),
        "average_in_collective": honoured(
            flag(), "the collective averages, instead of a division of the summed row"
        ),
        "fp8_param_gather": honoured(
            flag(), "quantised weights travel as FP8 where that is fewer bytes; False: as BF16"
        ),
        "fp4_param_gather": refused("FP4 weights are not supported", "drop it"),
        "reuse_grad_buf_for_mxfp8_param_ag": no_effect(
            "quantised weights are always gathered in the gradient storage"
        ),
        "use_megatron_fsdp": refused(_USE_FSDP, "drop it"),
        "use_custom_fsdp": refused(_USE_FSDP, "drop it"),
        "data_parallel_sharding_strategy": no_effect(_FSDP),
        "gradient_reduce_div_fusion": no_effect(_FSDP),
        "suggested_communication_unit_size": no_effect(_FSDP),
        "keep_fp8_transpose_cache": no_effect(_FSDP),
        "nccl_ub": refused("buffers are not registered with NCCL", "drop it"),
        "fsdp_double_buffer": no_effect(_FSDP),
        "fsdp_db_use_persist_buf_on_alloc_fail": no_effect(_FSDP),
        "fsdp_all_gather_in_start_param_sync": no_effect(_FSDP),
        "outer_dp_sharding_strategy": no_effect(_FSDP),
        "disable_symmetric_registration": no_effect(_NCCL_UB),
        "fsdp_manual_registration": no_effect(_FSDP),
        "delay_wgrad_compute": refused(
            "a gradient that comes after its bucket is reduced would be lost",
            "drop it",
        ),
        "megatron_fsdp_main_params_dtype": no_effect(_FSDP),
        "megatron_fsdp_main_grads_dtype": no_effect(_FSDP),
        "megatron_fsdp_grad_comm_dtype": no_effect(_FSDP),
        "megatron_fsdp_use_decoupled_grad": no_effect(_FSDP),
        "megatron_fsdp_cuda_graph_mode": no_effect(_FSDP),
        "megatron_fsdp_enable_fine_grained_param_gather": no_effect(_FSDP),
        "megatron_fsdp_max_pool_double_buffer": no_effect(_FSDP),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPConfig:
    """Settings of `DistributedDataParallel`; frozen, so change one with `dataclasses.replace`.

    Fields are those of Megatron's class, in Megatron's order.

    Raises:
        ConfigError: a value is not allowed or asks for what is refused; the message lists every
            such field with its value and the remedy.
        TypeError: an unknown keyword; `from_mapping` names the nearest field instead.
    """

    FIELD_STATUS: ClassVar[Mapping[str, FieldStatus]] = DDP_FIELDS
    """Field name -> what becomes of it, with the reason and the remedy."""

    grad_reduce_in_fp32: bool = True
    """Whether gradients are accumulated and reduced in fp32, else in the dtype of the weight.

    Megatron's default is False.
    """
    overlap_grad_reduce: bool = False
    """Reduce a bucket while backward goes on, from the second step on."""
    overlap_param_gather: bool = False
    """Gather the weights while the next forward goes on; its readers wait."""
    align_param_gather: bool = False
    """No effect: every gather is started by the step itself."""
    use_distributed_optimizer: bool = False
    """No effect: gradients are always reduced into rows."""
    num_distributed_optimizer_instances: int = 1
    """1 only: rows are spread over the whole data-parallel group."""
    check_for_nan_in_grad: bool = False
    """No effect: gradients are always checked, see `OptimizerConfig.on_nonfinite`."""
    check_for_large_grads: bool = False
    """Refused: look for gradients that are finite but large."""
    bucket_size: int | None = None
    """Elements after which a bucket is closed, a soft minimum; None leaves it to the plan."""
    num_buckets: int | None = None
    """Refused: the number of buckets, in place of their size."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """No effect, and warned about: a bucket is padded to 64 elements a row."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Send half-precision gradients, sum them in fp32; needs `grad_reduce_in_fp32=False`."""
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    """Refused: accumulate only some parameters' gradients in fp32."""
    average_in_collective: bool = False
    """Whether the collective averages; sums of integers may then differ in the last bit."""
    fp8_param_gather: bool = False
    """Whether quantised weights travel as FP8 where that is fewer bytes, else as BF16.

    The weights are the same, bit by bit. Which weights are quantised the model says, see
    `fp8.quantize_model`.
    """
    fp4_param_gather: bool = False
    """Refused: FP4 weights."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """No effect: quantised weights are always gathered in the gradient storage."""
    use_megatron_fsdp: bool = False
    """Refused: Megatron's FSDP."""
    use_custom_fsdp: bool = False
    """Refused: an older name of `use_megatron_fsdp`."""
    data_parallel_sharding_strategy: str = "no_shard"
    """No effect: read only with `use_megatron_fsdp`."""
    gradient_reduce_div_fusion: bool = True
    """No effect: read only with `use_megatron_fsdp`."""
    suggested_communication_unit_size: int | None = None
    """No effect: read only with `use_megatron_fsdp`."""
    keep_fp8_transpose_cache: bool = False
    """No effect: read only with `use_megatron_fsdp`."""
    nccl_ub: bool = False
    """Refused: buffers registered with NCCL."""
    fsdp_double_buffer: bool = False
    """No effect: read only with `use_megatron_fsdp`."""
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    """No effect: read only with `use_megatron_fsdp`."""
    fsdp_all_gather_in_start_param_sync: bool = True
    """No effect: read only with `use_megatron_fsdp`."""
    outer_dp_sharding_strategy: str = "no_shard"
    """No effect: read only with `use_megatron_fsdp`."""
    disable_symmetric_registration: bool = False
    """No effect: read only with `nccl_ub`."""
    fsdp_manual_registration: bool = False
    """No effect: read only with `use_megatron_fsdp`."""
    delay_wgrad_compute: bool = False
    """Refused: weight gradients computed after backward."""
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    """No effect: read only with `use_megatron_fsdp`."""
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    """No effect: read only with `use_megatron_fsdp`."""
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    """No effect: read only with `use_megatron_fsdp`."""
    megatron_fsdp_use_decoupled_grad: bool = False
    """No effect: read only with `use_megatron_fsdp`."""
    megatron_fsdp_cuda_graph_mode: bool = False
    """No effect: read only with `use_megatron_fsdp`."""
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    """No effect: read only with `use_megatron_fsdp`."""
    megatron_fsdp_max_pool_double_buffer: bool = False
    """No effect: read only with `use_megatron_fsdp`."""

    def __post_init__(self) -> None:
        """Check every field, and warn about what is ignored."""
        problems = field_problems(self, self.FIELD_STATUS)
        if self.reduce_scatter_with_fp32_accumulation and (
            self.grad_reduce_in_fp32 or self.average_in_collective
        ):
            problems.append(
                "DDPConfig.reduce_scatter_with_fp32_accumulation=True contradicts "
                f"grad_reduce_in_fp32={self.grad_reduce_in_fp32!r} or average_in_collective="
                f"{self.average_in_collective!r}; set both to False"
            )
        raise_problems(problems)
        warn_ignored(self, self.FIELD_STATUS, stacklevel=_CALLER)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DDPConfig:
        """Build from field names and values, say a parsed command line or file.

        Raises:
            ConfigError: a name is no field (the nearest is suggested) or a value is not allowed.
        """
        require_known(cls.__name__, cls.FIELD_STATUS, values)
        return cls(**values)
