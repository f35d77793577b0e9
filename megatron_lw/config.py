"""`OptimizerConfig`: the settings of the optimizer, under Megatron's names.

Every field of megatron-core 0.19.2's class of the same name is here, with the same default unless
the field's docstring says otherwise, so that keyword arguments carry over. What is honoured acts;
what cannot be honoured must keep its default and is refused by name otherwise. The tables in
`optimizer_fields` decide which; `OptimizerConfig.FIELD_STATUS` is that table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from megatron_lw.config_contradictions import contradicting_flags, contradicting_values
from megatron_lw.field_status import (
    FieldStatus,
    IgnoredSettingWarning,
    field_problems,
    raise_problems,
    require_known,
    warn_ignored,
)
from megatron_lw.optimizer_fields import OPTIMIZER_FIELDS

# Frames between a warning raised in __post_init__ and the line that built the configuration: the
# method itself and the __init__ that dataclass generates.
_CALLER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Settings of the optimizer; frozen, so change one with `dataclasses.replace`.

    Fields are those of Megatron's class in Megatron's order, then this library's own.

    Raises:
        ConfigError: a value is out of range, contradicts another, or asks for what is refused; the
            message lists every such field with its value and the remedy.
        TypeError: an unknown keyword; `from_mapping` names the nearest field instead.
    """

    FIELD_STATUS: ClassVar[Mapping[str, FieldStatus]] = OPTIMIZER_FIELDS
    """Field name -> what becomes of it, with the reason and the remedy."""

    # General
    lr: float | None = None
    """Learning rate of every group that names none; it must be set, as schedulers start from it."""
    min_lr: float | None = None
    """Lower end of the learning-rate schedule, written into the groups for the scheduler."""
    decoupled_lr: float | None = None
    """Learning rate of embedding and output parameters, see `overrides.standard_overrides`."""
    decoupled_min_lr: float | None = None
    """Lower end of that schedule; `min_lr` if None."""
    weight_decay: float = 0.01
    """Weight decay, times the group's wd_mult; `weight_decay_mode` says how it acts."""
    apply_wd_to_qk_layernorm: bool = False
    """Whether `overrides.standard_overrides` leaves decay on query and key layer norms."""

    # Precision
    fp8_recipe: str | None = None
    """No effect: each quantised weight has its own recipe, see `fp8.quantize_model`."""
    fp16: bool = False
    """Whether half-precision weights are FP16; the loss must then go through `scale_loss`."""
    bf16: bool = False
    """Whether half-precision weights are BF16; each keeps an fp32 master."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """No effect: quantised weights are always gathered in the gradient storage."""
    params_dtype: torch.dtype = torch.float32
    """dtype the weights were made in; must not contradict `bf16`, and decides nothing else."""
    use_precision_aware_optimizer: bool = False
    """Refused: masters, gradients or states in less than fp32."""
    store_param_remainders: bool = True
    """No effect: read only with `use_precision_aware_optimizer`."""
    main_grads_dtype: torch.dtype = torch.float32
    """dtype of the gradients of the masters; fp32 only."""
    main_params_dtype: torch.dtype = torch.float32
    """dtype of the masters; fp32 only."""
    exp_avg_dtype: torch.dtype = torch.float32
    """dtype of Adam's first moment; fp32 only."""
    exp_avg_sq_dtype: torch.dtype = torch.float32
    """dtype of Adam's second moment; fp32 only."""

    optimizer: str = "adam"
    """Child that steps the matrices. 'adam', 'lion' and 'sgd' step everything; 'muon' and its
    variants 'normuon', 'adamuon' and 'adaptive_muon', 'whole' (the class that `whole_optimizer`
    names) and 'soap' leave the rest to `muon_scalar_optimizer`.

    'dist_muon' is an older name of 'muon': it is warned about and reads back as 'muon'.
    """

    # Loss scaling
    loss_scale: float | None = None
    """A constant loss scale, a power of two; None: a dynamic one. With `fp16` only; 1 passes."""
    initial_loss_scale: float = 2.0**32
    """Where the dynamic loss scale starts."""
    min_loss_scale: float = 1.0
    """What the dynamic loss scale never falls below."""
    loss_scale_window: float = 1000
    """Steps without an overflow until the loss scale doubles."""
    hysteresis: int = 2
    """Overflows until the loss scale is halved."""

    # Adam
    adam_beta1: float = 0.9
    """Decay rate of the average of the gradient, in [0, 1)."""
    adam_beta2: float = 0.999
    """Decay rate of the average of the squared gradient, in [0, 1)."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment; > 0."""
    decoupled_weight_decay: bool = True
    """True: decay acts on the weight (AdamW), as `weight_decay_mode` says; False: "l2"."""

    # SGD
    sgd_momentum: float = 0.9
    """Decay rate of the sum of gradients of 'sgd', in [0, 1)."""

    # Muon
    muon_momentum: float = 0.95
    """Decay rate of the momentum average, in [0, 1). Megatron's command line passes 0.9."""
    muon_split_qkv: bool = True
    """Whether query, key and value of a weight whose `qkv` sizes are declared are orthogonalised
    each by itself; False: the fused weight as one matrix.
    """
    muon_nesterov: bool = False
    """Whether to orthogonalise the momentum one step ahead."""
    muon_scale_mode: str = "spectral"
    """Scale of an update from its global shape: 'spectral', 'unit_rms_norm', 'shape_scaling'."""
    muon_fp32_matmul_prec: str = "medium"
    """Precision of Newton-Schulz and of what travels in the exchange.

    'medium': the fp32 momentum is rounded to bf16, divided by its norm, and every product takes and
    gives bf16. 'high' and 'highest' mean the same: everything is fp32. torch's process-wide float32
    matmul setting is neither read nor set, so it alone says whether a GPU may use TF32 inside those
    products; by torch's default it may not.
    """
    muon_coefficient_type: str = "quintic"
    """Newton-Schulz coefficients: 'simple', 'quintic', 'polar_express', 'cans', 'aol',
    'deepseekv4', or 'custom' with `muon_coefficients`. 'cans' diverges in bf16, so it needs
    `muon_fp32_matmul_prec='high'`.
    """
    muon_num_ns_steps: int = 5
    """Newton-Schulz steps, 1 to 15."""
    muon_tp_mode: Literal["owner", "duplicated", "distributed", "blockwise"] = "owner"
    """Who orthogonalises a matrix that is sharded over tensor parallelism.

    'owner' collects the shards and orthogonalises the whole, once. 'duplicated': every rank that
    has a shard does. 'distributed': shards stay, and the ranks sum Gram matrices at every
    iteration. These three are exact: the same for every layout, up to rounding. 'blockwise',
    Megatron's default, orthogonalises each shard by itself, which depends on the layout.
    """
    muon_extra_scale_factor: float = 1.0
    """Multiplies the scale of every Muon update; > 0."""
    muon_scalar_optimizer: str = "adam"
    """Child for what Muon does not take (embeddings, biases, norms): 'adam', 'lion' or 'sgd'."""

    # Lion, SOAP, adaptive Muon
    lion_beta1: float = 0.95
    """Share of the average in the direction of Lion's step, in [0, 1)."""
    lion_beta2: float = 0.98
    """Decay rate of Lion's average of the gradient, in [0, 1)."""
    soap_shampoo_beta: float = 0.95
    """Decay rate of SOAP's averages of Gram matrices, in [0, 1)."""
    soap_precondition_frequency: int = 1
    """No effect, and warned about: SOAP of emerging-optimizers 0.3.0 has a basis at every step."""
    soap_use_kl_shampoo: bool = True
    """Whether SOAP's averages are those of KL-Shampoo."""
    adaptive_muon_moment2_method: str = "adamuon"
    """Second moment of 'adaptive_muon': 'adamuon' (of each element) or 'normuon' (of means over the
    longer side).
    """
    adaptive_muon_beta2: float = 0.95
    """Decay rate of the second moment of Muon's variants, in [0, 1)."""
    adaptive_muon_eps: float = 1e-8
    """Added to the root of that moment ('normuon' of 'adaptive_muon': its smallest value); > 0."""

    # Distribution
    use_distributed_optimizer: bool = False
    """No effect: state is always spread. Contradicts `use_layer_wise_distributed_optimizer`."""
    use_layer_wise_distributed_optimizer: bool = False
    """No effect: the optimizer is always layer-wise, for Adam as for Muon."""
    overlap_param_gather: bool = False
    """Must not contradict `DDPConfig.overlap_param_gather`, which decides."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Refused: gather the first bucket while others are stepped."""

    # Offload
    optimizer_cpu_offload: bool = False
    """Refused: keep and step the states on the CPU."""
    optimizer_offload_fraction: float = 0.0
    """No effect: read only with `optimizer_cpu_offload`."""
    use_torch_optimizer_for_cpu_offload: bool = False
    """No effect: read only with `optimizer_cpu_offload`."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """No effect: read only with `optimizer_cpu_offload`."""
    pin_cpu_grads: bool = True
    """No effect: read only with `optimizer_cpu_offload`."""
    pin_cpu_params: bool = True
    """No effect: read only with `optimizer_cpu_offload`."""

    # Miscellaneous
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient, above which it is scaled down; 0 for no clipping."""
    grad_norm_skip_threshold: float = float("inf")
    """A step whose gradient norm is larger is skipped, also where `clip_grad` is 0."""
    log_num_zeros_in_grad: bool = False
    """Whether a step counts the gradient elements that are exactly zero."""
    barrier_with_L1_time: bool = False
    """No effect: there are no timers inside a step."""
    timers: Callable[..., Any] | None = None
    """No effect: there are no timers inside a step."""
    config_logger_dir: str = ""
    """No effect, and warned about: no file is written."""
    optimizer_cuda_graph: bool = False
    """Refused: capture the step in a CUDA graph."""

    # This library's own
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """What a gradient that is not finite on any rank leads to, on every rank: an error that names
    parameter and rank, or a skipped step that leaves all state bitwise as it was.
    """
    muon_clip_grad: bool = True
    """Whether `clip_grad` acts on Muon's gradients: the default of its groups' `clip_grad` setting.
    A Muon update does not depend on the size of what it is made from.
    """
    clip_grad_by: Literal["total", "own"] = "total"
    """Norm by which the groups that are clipped are clipped: over all gradients, as in Megatron, or
    over those groups' own. The norm that a step returns is over all.
    """
    adam_backend: Literal["auto", "transformer_engine", "apex", "torch"] = "auto"
    """Kernel that steps Adam; 'auto' is the first of the three that is installed."""
    whole_optimizer: str | None = None
    """Class that `optimizer='whole'` steps whole matrices with: 'module:Class', say
    'torch.optim:Adagrad', or a name in the registry of emerging-optimizers, if that is installed.
    """
    whole_settings: tuple[tuple[str, Any], ...] = ()
    """Its arguments by name, besides `lr` and `weight_decay`, which come from the groups."""
    weight_decay_mode: Literal["decoupled", "independent", "l2", "cautious"] = "decoupled"
    """How weight decay d acts: 'decoupled' takes lr * d of a weight, 'independent' d of it whatever
    the learning rate, 'l2' adds d times the weight to the gradient, 'cautious' is decoupled but
    only where the step shrinks the weight anyway.
    """
    muon_coefficients: tuple[tuple[float, float, float], ...] | None = None
    """Triples (a, b, c) of Newton-Schulz steps, cycled, for `muon_coefficient_type='custom'`."""
    muon_iteration: Literal["standard", "gram"] = "standard"
    """'gram': matrices at least twice as long as wide are iterated on their Gram matrix, with a
    restart: a third less arithmetic at 1:4. Not in bf16, where rounding is magnified.
    """
    muon_dtype: torch.dtype | None = None
    """dtype of Newton-Schulz and of the exchange; None: as `muon_fp32_matmul_prec` says.

    With float16, which has too small a range for momenta, the exchange carries float32.
    """
    muon_pad_batches: bool = False
    """Whether small matrices of one short side and different long sides are orthogonalised in one
    batch, padded with zeros: fewer calls. Equal in exact arithmetic, but the bits then depend on
    which matrices a rank owns.
    """

    def __post_init__(self) -> None:
        """Check every field, then fields against each other, and warn about what is ignored."""
        problems = [*contradicting_flags(self), *field_problems(self, self.FIELD_STATUS)]
        # Values are compared with each other only once each of them is a number.
        raise_problems(problems or contradicting_values(self))
        if self.optimizer == "dist_muon":
            message = "OptimizerConfig.optimizer='dist_muon' is an older name; pass 'muon'"
            warnings.warn(message, IgnoredSettingWarning, stacklevel=_CALLER)
            object.__setattr__(self, "optimizer", "muon")
        warn_ignored(self, self.FIELD_STATUS, stacklevel=_CALLER + 1)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> OptimizerConfig:
        """Build from field names and values, say a parsed command line or file.

        Raises:
            ConfigError: a name is no field (the nearest is suggested) or a value is not allowed.
        """
        require_known(cls.__name__, cls.FIELD_STATUS, values)
        return cls(**values)
