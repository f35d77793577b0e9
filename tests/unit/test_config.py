"""The two configuration classes: names, defaults, what is refused and what the refusal says."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lw.config import OptimizerConfig
from megatron_lw.ddp_config import DDPConfig
from megatron_lw.errors import ConfigError
from megatron_lw.field_status import IgnoredSettingWarning

# Field names and defaults of megatron-core 0.19.2, as facts: they must not move with our classes.
MEGATRON_OPTIMIZER = """
lr=None min_lr=None decoupled_lr=None decoupled_min_lr=None weight_decay=0.01
apply_wd_to_qk_layernorm=False fp8_recipe=None fp16=False bf16=False
reuse_grad_buf_for_mxfp8_param_ag=False params_dtype=torch.float32
use_precision_aware_optimizer=False store_param_remainders=True main_grads_dtype=torch.float32
main_params_dtype=torch.float32 exp_avg_dtype=torch.float32 exp_avg_sq_dtype=torch.float32
optimizer='adam' loss_scale=None initial_loss_scale=2**32 min_loss_scale=1.0
loss_scale_window=1000 hysteresis=2 adam_beta1=0.9 adam_beta2=0.999 adam_eps=1e-08
decoupled_weight_decay=True sgd_momentum=0.9 muon_momentum=0.95 muon_split_qkv=True
muon_nesterov=False muon_scale_mode='spectral' muon_fp32_matmul_prec='medium'
muon_coefficient_type='quintic' muon_num_ns_steps=5 muon_tp_mode='blockwise'
muon_extra_scale_factor=1.0 muon_scalar_optimizer='adam' lion_beta1=0.95 lion_beta2=0.98
soap_shampoo_beta=0.95 soap_precondition_frequency=1 soap_use_kl_shampoo=True
adaptive_muon_moment2_method='adamuon' adaptive_muon_beta2=0.95 adaptive_muon_eps=1e-08
use_distributed_optimizer=False use_layer_wise_distributed_optimizer=False
overlap_param_gather=False overlap_param_gather_with_optimizer_step=False
optimizer_cpu_offload=False optimizer_offload_fraction=0.0
use_torch_optimizer_for_cpu_offload=False overlap_cpu_optimizer_d2h_h2d=False pin_cpu_grads=True
pin_cpu_params=True clip_grad=1.0 grad_norm_skip_threshold=float('inf')
log_num_zeros_in_grad=False barrier_with_L1_time=False timers=None config_logger_dir=''
optimizer_cuda_graph=False
"""
MEGATRON_DDP = """
grad_reduce_in_fp32=False overlap_grad_reduce=False overlap_param_gather=False
align_param_gather=False use_distributed_optimizer=False num_distributed_optimizer_instances=1
check_for_nan_in_grad=False check_for_large_grads=False bucket_size=None num_buckets=None
pad_buckets_for_high_nccl_busbw=False reduce_scatter_with_fp32_accumulation=False
param_name_patterns_for_fp32_local_accumulation=() average_in_collective=False
fp8_param_gather=False fp4_param_gather=False reuse_grad_buf_for_mxfp8_param_ag=False
use_megatron_fsdp=False use_custom_fsdp=False data_parallel_sharding_strategy='no_shard'
gradient_reduce_div_fusion=True suggested_communication_unit_size=None
keep_fp8_transpose_cache=False nccl_ub=False fsdp_double_buffer=False
fsdp_db_use_persist_buf_on_alloc_fail=False fsdp_all_gather_in_start_param_sync=True
outer_dp_sharding_strategy='no_shard' disable_symmetric_registration=False
fsdp_manual_registration=False delay_wgrad_compute=False
megatron_fsdp_main_params_dtype=torch.float32 megatron_fsdp_main_grads_dtype=None
megatron_fsdp_grad_comm_dtype=None megatron_fsdp_use_decoupled_grad=False
megatron_fsdp_cuda_graph_mode=False megatron_fsdp_enable_fine_grained_param_gather=False
megatron_fsdp_max_pool_double_buffer=False
"""
MEGATRON_FILES = {
    OptimizerConfig: ("optimizer/optimizer_config.py", "OptimizerConfig"),
    DDPConfig: (
        "distributed/distributed_data_parallel_config.py",
        "DistributedDataParallelConfig",
    ),
}
OWN_FIELDS = {
    OptimizerConfig: {
        "on_nonfinite",
        "adam_backend",
        "weight_decay_mode",
        "whole_optimizer",
        "whole_settings",
        "muon_coefficients",
        "muon_iteration",
        "muon_dtype",
        "muon_pad_batches",
        "muon_clip_grad",
        "clip_grad_by",
    },
    DDPConfig: set(),
}
CLASSES = (OptimizerConfig, DDPConfig)
FLIP = {bool: lambda value: not value, int: lambda value: value + 1, float: lambda value: value + 1}


def evaluate(text: str) -> Any:
    """Value of a default as it is written in source."""
    return eval(text, {"__builtins__": {"float": float}, "torch": torch})


def megatron_defaults(cls: type) -> dict[str, Any]:
    facts = MEGATRON_OPTIMIZER if cls is OptimizerConfig else MEGATRON_DDP
    return {name: evaluate(text) for name, text in (fact.split("=") for fact in facts.split())}


def defaults(cls: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


def other_value(value: Any) -> Any:
    """A value of the same kind that is not the default."""
    if isinstance(value, torch.dtype):
        return torch.bfloat16
    if isinstance(value, str):
        return "other"
    if isinstance(value, tuple):
        return ("*.weight",)
    return 7 if value is None else FLIP[type(value)](value)


def installed_megatron_core() -> Path | None:
    """Folder of megatron.core 0.19.2: MEGATRON_CORE_DIR, or that of the installed package."""
    if "MEGATRON_CORE_DIR" in os.environ:
        return Path(os.environ["MEGATRON_CORE_DIR"])
    for package in importlib.metadata.distributions(name="megatron-core"):
        if package.version == "0.19.2":
            return Path(str(package.locate_file("megatron/core")))
    return None


def rows(status: str) -> list[Any]:
    return [
        pytest.param(cls, name, id=f"{cls.__name__}.{name}")
        for cls in CLASSES
        for name, row in cls.FIELD_STATUS.items()
        if row.status == status
    ]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_row_and_every_row_a_field_in_the_same_order(cls: Any) -> None:
    assert list(cls.FIELD_STATUS) == list(defaults(cls))
    for name, row in cls.FIELD_STATUS.items():
        assert row.reason, name
        assert (row.allowed is not None) == (row.status == "honoured"), name
        assert bool(row.remedy) == (row.status == "refused"), name


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_of_megatron_is_known_in_the_same_order_and_ours_come_last(cls: Any) -> None:
    theirs = list(megatron_defaults(cls))
    ours = list(defaults(cls))
    assert ours[: len(theirs)] == theirs
    assert set(ours[len(theirs) :]) == OWN_FIELDS[cls]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_default_is_megatrons_unless_the_row_says_why_not(cls: Any) -> None:
    ours = defaults(cls)
    differing = {name for name, value in megatron_defaults(cls).items() if ours[name] != value}
    assert differing == {name for name, row in cls.FIELD_STATUS.items() if row.differs}
    assert differing == {"muon_tp_mode" if cls is OptimizerConfig else "grad_reduce_in_fp32"}


@pytest.mark.parametrize("cls", CLASSES)
def test_the_facts_about_megatron_are_those_of_an_installed_megatron_core(cls: Any) -> None:
    core = installed_megatron_core()
    if core is None:
        pytest.skip("megatron-core 0.19.2 is not installed and MEGATRON_CORE_DIR is not set")
    file, name = MEGATRON_FILES[cls]
    module = ast.parse((core / file).read_text())
    (found,) = (n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    theirs = {ast.unparse(n.target): evaluate(ast.unparse(n.value)) for n in fields if n.value}
    assert theirs == megatron_defaults(cls)
    assert list(theirs) == list(megatron_defaults(cls))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_is_followed_by_its_docstring_which_says_what_does_not_act(cls: Any) -> None:
    (found,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(found, ast.ClassDef)
    documented = {}
    for node, following in zip(found.body, found.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr):
            documented[ast.unparse(node.target)] = ast.literal_eval(following.value)
    assert set(documented) == {*defaults(cls), "FIELD_STATUS"}
    for name, row in cls.FIELD_STATUS.items():
        assert documented[name].startswith("No effect") == (row.status == "no_effect"), name


@pytest.mark.parametrize(("cls", "name"), rows("refused"))
def test_a_refused_field_is_refused_by_name_with_value_and_remedy(cls: Any, name: str) -> None:
    value = other_value(defaults(cls)[name])
    with pytest.raises(ConfigError) as error:
        cls(**{name: value})
    row = cls.FIELD_STATUS[name]
    assert f"{cls.__name__}.{name}={value!r}" in str(error.value)
    assert row.remedy in str(error.value)


@pytest.mark.parametrize(("cls", "name"), rows("no_effect"))
def test_a_field_without_effect_takes_any_value_and_warns_where_it_says_so(
    cls: Any, name: str
) -> None:
    value = other_value(defaults(cls)[name])
    if cls.FIELD_STATUS[name].warn:
        with pytest.warns(IgnoredSettingWarning, match=f"{name}=.* has no effect") as warned:
            config = cls(**{name: value})
        assert [warning.filename for warning in warned] == [__file__]
    else:
        config = cls(**{name: value})
    assert dataclasses.asdict(config)[name] == value


@pytest.mark.parametrize(("cls", "name"), rows("honoured"))
def test_an_honoured_field_refuses_a_value_of_another_kind(cls: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.* is not .*; give one of these values"):
        cls(**{name: [1]})
