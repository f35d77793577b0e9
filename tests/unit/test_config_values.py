"""Values of the configurations: ranges, contradictions, aliases, and what scripts pass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lw.config import OptimizerConfig
from megatron_lw.ddp_config import DDPConfig
from megatron_lw.errors import ConfigError
from megatron_lw.field_status import IgnoredSettingWarning

GOOD = [
    {"lr": 0.0},
    {"lr": None},
    {"lr": 1},
    {"lr": 0.1, "min_lr": 0.1},
    {"weight_decay": 0.0},
    {"bf16": True},
    {"bf16": True, "params_dtype": torch.bfloat16},
    {"adam_beta1": 0.0},
    {"clip_grad": 0.0},
    {"grad_norm_skip_threshold": 3.0},
    {"optimizer": "muon"},
    {"optimizer": "lion", "lion_beta1": 0.9},
    {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
    {"optimizer": "normuon"},
    {"optimizer": "soap", "soap_use_kl_shampoo": False},
    {"optimizer": "whole", "whole_optimizer": "torch.optim:Adagrad"},
    {"optimizer": "sgd", "sgd_momentum": 0.0, "decoupled_weight_decay": False},
    {"optimizer": "muon", "muon_scalar_optimizer": "lion", "weight_decay_mode": "cautious"},
    {"muon_scale_mode": "unit_rms_norm"},
    {"muon_scale_mode": "shape_scaling"},
    {"muon_coefficient_type": "deepseekv4"},
    {"muon_fp32_matmul_prec": "highest"},
    {"muon_fp32_matmul_prec": "high"},
    {"muon_num_ns_steps": 1},
    {"muon_coefficient_type": "custom", "muon_coefficients": ((2, -1.5, 0.5), (1.5, -0.5, 0.0))},
    {"muon_iteration": "gram", "muon_dtype": torch.float16},
    {"muon_num_ns_steps": 15},
    {"loss_scale": 1.0},
    {"on_nonfinite": "skip"},
    {"adam_backend": "torch"},
    {"use_distributed_optimizer": True},
    {"use_layer_wise_distributed_optimizer": True, "optimizer": "muon"},
    {"decoupled_lr": 0.1, "decoupled_min_lr": 0.01},
]
# Settings, then words that the message must hold: the field, its value, the remedy.
BAD = [
    ({"lr": -1.0}, ("lr=-1.0", "finite number >= 0, or None")),
    ({"lr": math.nan}, ("lr=nan", "finite number >= 0")),
    ({"lr": math.inf}, ("lr=inf", "finite number >= 0")),
    ({"lr": True}, ("lr=True", "finite number >= 0")),
    ({"adam_beta1": 1.0}, ("adam_beta1=1.0", ">= 0 and < 1")),
    ({"adam_beta2": -0.1}, ("adam_beta2=-0.1", ">= 0 and < 1")),
    ({"adam_eps": 0.0}, ("adam_eps=0.0", "> 0")),
    ({"weight_decay": None}, ("weight_decay=None", "finite number >= 0;")),
    ({"clip_grad": -1.0}, ("clip_grad=-1.0", "finite number >= 0")),
    ({"grad_norm_skip_threshold": math.nan}, ("grad_norm_skip_threshold=nan", "a number > 0")),
    ({"grad_norm_skip_threshold": 0.0}, ("grad_norm_skip_threshold=0.0", "a number > 0")),
    ({"muon_momentum": 1.0}, ("muon_momentum=1.0", "< 1")),
    ({"muon_num_ns_steps": 0}, ("muon_num_ns_steps=0", "from 1 to 15")),
    ({"muon_num_ns_steps": 16}, ("muon_num_ns_steps=16", "from 1 to 15")),
    ({"muon_num_ns_steps": 5.0}, ("muon_num_ns_steps=5.0", "an integer")),
    ({"muon_extra_scale_factor": 0}, ("muon_extra_scale_factor=0", "> 0")),
    ({"muon_scale_mode": "rms"}, ("muon_scale_mode='rms'", "'spectral'", "'unit_rms_norm'")),
    ({"muon_coefficient_type": "cubic5"}, ("muon_coefficient_type='cubic5'", "'quintic'")),
    ({"muon_coefficient_type": "custom"}, ("muon_coefficient_type='custom'", "give triples")),
    ({"muon_coefficients": ((2.0, -1.5, 0.5),)}, ("not read", "'quintic'", "pass 'custom'")),
    ({"muon_coefficients": ()}, ("muon_coefficients=()", "tuple of triples")),
    ({"muon_coefficients": ((1.0, 2.0),)}, ("muon_coefficients=((1.0, 2.0),)", "of triples")),
    ({"muon_coefficients": ((1.0, 2.0, math.nan),)}, ("nan", "finite numbers")),
    ({"muon_iteration": "fast"}, ("muon_iteration='fast'", "'standard', 'gram'")),
    ({"muon_dtype": torch.float64}, ("muon_dtype=torch.float64", "torch.float16")),
    ({"muon_pad_batches": 1}, ("muon_pad_batches=1", "True or False")),
    ({"muon_fp32_matmul_prec": "low"}, ("muon_fp32_matmul_prec='low'", "'medium'")),
    ({"muon_scalar_optimizer": "muon"}, ("muon_scalar_optimizer='muon'", "'adam', 'lion', 'sgd'")),
    ({"lion_beta1": 1.0}, ("lion_beta1=1.0", ">= 0 and < 1")),
    ({"sgd_momentum": -0.5}, ("sgd_momentum=-0.5", ">= 0 and < 1")),
    ({"weight_decay_mode": "palm"}, ("weight_decay_mode='palm'", "'decoupled', 'independent'")),
    ({"optimizer": "whole"}, ("optimizer='whole' needs whole_optimizer", "torch.optim:Adagrad")),
    ({"whole_optimizer": 3}, ("whole_optimizer=3", "'module:Class'")),
    ({"whole_settings": (("a",),)}, ("whole_settings=(('a',),)", "pairs (name, value)")),
    ({"adaptive_muon_moment2_method": "namo"}, ("method='namo'", "'adamuon' or 'normuon'")),
    ({"adaptive_muon_beta2": 1.0}, ("adaptive_muon_beta2=1.0", "< 1")),
    ({"adaptive_muon_eps": 0.0}, ("adaptive_muon_eps=0.0", "> 0")),
    (
        {"optimizer": "Adam"},
        ("optimizer='Adam'", "one of 'adam', 'lion', 'sgd', "),
    ),
    ({"bf16": 1}, ("bf16=1", "True or False")),
    ({"bf16": "false"}, ("bf16='false'", "True or False")),
    ({"params_dtype": torch.bfloat16}, ("params_dtype=torch.bfloat16", "set bf16=True")),
    ({"loss_scale": -1.0, "fp16": True}, ("loss_scale=-1.0", "> 0")),
    ({"fp16": True, "bf16": True}, ("bf16=True and fp16=True", "drop fp16")),
    ({"loss_scale": 1024.0}, ("loss_scale=1024.0", "FP16", "drop it")),
    ({"params_dtype": torch.float16}, ("params_dtype=torch.float16", "fp16=True")),
    (
        {"decoupled_weight_decay": False, "weight_decay_mode": "cautious"},
        ("decoupled_weight_decay=False means 'l2'", "weight_decay_mode='cautious'", "drop it"),
    ),
    ({"lr": 0.1, "min_lr": 0.2}, ("min_lr=0.2", "lr=0.1")),
    ({"decoupled_lr": 0.1, "min_lr": 0.2}, ("min_lr=0.2", "decoupled_lr=0.1")),
    ({"decoupled_lr": 0.1, "decoupled_min_lr": 0.2}, ("decoupled_min_lr", "0.2", "0.1")),
    ({"decoupled_min_lr": 0.1}, ("decoupled_min_lr=0.1", "set decoupled_lr")),
    ({"on_nonfinite": "ignore"}, ("on_nonfinite='ignore'", "'raise', 'skip'")),
    ({"adam_backend": "te"}, ("adam_backend='te'", "'transformer_engine'")),
]


@pytest.mark.parametrize("settings", GOOD, ids=str)
def test_a_value_in_range_is_accepted_and_survives_replace(settings: dict[str, Any]) -> None:
    config = OptimizerConfig(**settings)
    assert {name: dataclasses.asdict(config)[name] for name in settings} == settings
    assert dataclasses.replace(config, adam_eps=1e-6) != config
    assert dataclasses.replace(config) == config


@pytest.mark.parametrize(("settings", "words"), BAD, ids=str)
def test_a_value_out_of_range_is_refused_with_field_value_and_remedy(
    settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        OptimizerConfig(**settings)
    assert [word for word in words if word not in str(error.value)] == []


def test_every_problem_is_listed_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        OptimizerConfig(lr=-1.0, optimizer="adamw", optimizer_cpu_offload=True)
    assert len(str(error.value).splitlines()) == 3


def test_both_distributed_flags_contradict_and_the_message_names_them_and_which_to_drop() -> None:
    with pytest.raises(ConfigError) as error:
        OptimizerConfig(
            optimizer="muon",
            use_distributed_optimizer=True,
            use_layer_wise_distributed_optimizer=True,
        )
    message = str(error.value)
    assert "use_distributed_optimizer=True contradicts" in message
    assert "use_layer_wise_distributed_optimizer=True" in message
    assert message.endswith("drop use_distributed_optimizer")


def test_dist_muon_is_warned_about_once_and_reads_back_as_muon() -> None:
    with pytest.warns(IgnoredSettingWarning, match="older name; pass 'muon'") as warned:
        config = OptimizerConfig(optimizer="dist_muon")
    assert [warning.filename for warning in warned] == [__file__]
    assert config == OptimizerConfig(optimizer="muon")
    assert dataclasses.replace(config, lr=0.1).optimizer == "muon"


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerConfig().lr = 0.1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="lr=-1"):
        dataclasses.replace(OptimizerConfig(), lr=-1)


@pytest.mark.parametrize(
    ("cls", "wrong", "right"),
    [(OptimizerConfig, "adam_betas1", "adam_beta1"), (DDPConfig, "bucketsize", "bucket_size")],
)
def test_an_unknown_name_is_refused_and_the_nearest_one_suggested(
    cls: Any, wrong: str, right: str
) -> None:
    with pytest.raises(ConfigError, match=f"no field '{wrong}'; did you mean '{right}'"):
        cls.from_mapping({wrong: 1})
    with pytest.raises(ConfigError, match="no field 'zzz'; drop it"):
        cls.from_mapping({"zzz": 1})
    with pytest.raises(TypeError, match=wrong):
        cls(**{wrong: 1})
    assert cls.from_mapping({}) == cls()


def test_ddp_values_are_checked_and_lists_of_problems_name_the_class() -> None:
    assert DDPConfig(grad_reduce_in_fp32=False, bucket_size=1).bucket_size == 1
    for bucket_size in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match=r"DDPConfig.bucket_size=.*an integer >= 1, or None"):
            DDPConfig(bucket_size=bucket_size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        DDPConfig(num_distributed_optimizer_instances=2, use_megatron_fsdp=True)
    assert len(str(error.value).splitlines()) == 2


def test_what_megatrons_training_script_passes_by_default_is_accepted() -> None:
    """Its command line has defaults of its own; of these only muon_tp_mode has to be given."""
    OptimizerConfig(
        lr=3e-4,
        min_lr=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        fp8_recipe="delayed",
        initial_loss_scale=2**32,
        muon_momentum=0.9,
        optimizer_offload_fraction=1.0,
        barrier_with_L1_time=True,
        timers=print,
        use_layer_wise_distributed_optimizer=True,
        optimizer="muon",
    )
    DDPConfig(
        grad_reduce_in_fp32=True,
        align_param_gather=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )


@given(
    lr=st.floats(0, 10),
    beta=st.floats(0, 1, exclude_max=True),
    eps=st.floats(0, 1, exclude_min=True),
    clip=st.floats(0, allow_infinity=False, allow_nan=False),
    steps=st.integers(1, 15),
)
def test_any_value_in_range_is_kept_as_given(
    lr: float, beta: float, eps: float, clip: float, steps: int
) -> None:
    config = OptimizerConfig(
        lr=lr, adam_beta1=beta, adam_eps=eps, clip_grad=clip, muon_num_ns_steps=steps
    )
    assert (config.lr, config.adam_beta1, config.adam_eps) == (lr, beta, eps)
    assert (config.clip_grad, config.muon_num_ns_steps) == (clip, steps)
