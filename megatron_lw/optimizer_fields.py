"""The table of `OptimizerConfig`: what becomes of each field, with the reason and the remedy.

Field names are those of megatron-core 0.19.2; those from `on_nonfinite` on are this library's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from megatron_lw.child_names import CHILDREN, ELEMENTWISE_CHILDREN
from megatron_lw.field_status import (
    Allowed,
    FieldStatus,
    flag,
    honoured,
    integer,
    no_effect,
    number,
    one_of,
    refused,
)

_STATE_DTYPE = "masters, gradients of the masters and optimizer states are fp32"
_KEEP_FP32 = "leave it at torch.float32"
_OFFLOAD = "read only with optimizer_cpu_offload, which is refused"


def _are_triples(value: object) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, tuple)
        and len(value) > 0
        and all(isinstance(triple, tuple) and len(triple) == 3 for triple in value)
        and all(number(-math.inf).test(entry) for triple in value for entry in triple)
    )


def _is_path(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(value))


def _are_pairs(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


OPTIMIZER_FIELDS: Mapping[str, FieldStatus] = MappingProxyType(
    {
        "lr": honoured(number(0, optional=True), "learning rate of every group that names none"),
        "min_lr": honoured(number(0, optional=True), "lower end of the schedule (the scheduler's)"),
        "decoupled_lr": honoured(
            number(0, optional=True), "learning rate of embedding and output parameters"
        ),
        "decoupled_min_lr": honoured(
            number(0, optional=True), "lower end of that schedule; min_lr if None"
        ),
        "weight_decay": honoured(number(0), "weight decay, times the group's wd_mult"),
        "apply_wd_to_qk_layernorm": honoured(
            flag(), "standard_overrides then leaves decay on the layer norms of queries and keys"
        ),
        "fp8_recipe": no_effect("each quantised weight has its own recipe"),
        "fp16": honoured(flag(), "half-precision weights are FP16, trained with a scaled loss"),
        "bf16": honoured(flag(), "half-precision weights are BF16; each has an fp32 master"),
        "reuse_grad_buf_for_mxfp8_param_ag": no_effect(
            "quantised weights are always gathered in the gradient storage"
        ),
        "params_dtype": honoured(
            one_of(torch.float32, torch.bfloat16, torch.float16),
            "must not contradict bf16 and fp16; each weight is published in its own dtype",
        ),
        "use_precision_aware_optimizer": refused(_STATE_DTYPE, "drop it"),
        "store_param_remainders": no_effect("read only with use_precision_aware_optimizer"),
        "main_grads_dtype": refused(_STATE_DTYPE, _KEEP_FP32),
        "main_params_dtype": refused(_STATE_DTYPE, _KEEP_FP32),
        "exp_avg_dtype": refused(_STATE_DTYPE, _KEEP_FP32),
        "exp_avg_sq_dtype": refused(_STATE_DTYPE, _KEEP_FP32),
        "optimizer": honoured(
            one_of(*CHILDREN, "dist_muon"),
            "the child that steps the matrices; 'dist_muon' is an older name of 'muon'",
        ),
        "loss_scale": honoured(
            number(0, open_low=True, optional=True), "a constant loss scale; None: a dynamic one"
        ),
        "initial_loss_scale": honoured(number(0, open_low=True), "where the loss scale starts"),
        "min_loss_scale": honoured(number(0, open_low=True), "what the loss scale never is below"),
        "loss_scale_window": honoured(
            number(0, open_low=True), "steps without overflow until the loss scale doubles"
        ),
        "hysteresis": honoured(integer(1), "overflows until the loss scale is halved"),
        "adam_beta1": honoured(number(0, 1), "decay rate of Adam's first moment"),
        "adam_beta2": honoured(number(0, 1), "decay rate of Adam's second moment"),
        "adam_eps": honoured(number(0, open_low=True), "added to the root of the second moment"),
        "decoupled_weight_decay": honoured(flag(), "False: weight decay inside the gradient (l2)"),
        "sgd_momentum": honoured(number(0, 1), "decay rate of the sum of gradients of 'sgd'"),
        "muon_momentum": honoured(number(0, 1), "decay rate of Muon's momentum average"),
        "muon_split_qkv": honoured(
            flag(), "query, key and value of a fused weight are matrices of their own"
        ),
        "muon_nesterov": honoured(flag(), "orthogonalise the momentum one step ahead"),
        "muon_scale_mode": honoured(
            one_of("spectral", "unit_rms_norm", "shape_scaling"),
            "how the scale of an update follows from the shape of the global matrix",
        ),
        "muon_fp32_matmul_prec": honoured(
            one_of("medium", "high", "highest"),
            "'medium': Newton-Schulz in bf16; 'high' and 'highest': in fp32",
            refuses={"low": "torch has no such precision; pass 'medium' for bf16"},
        ),
        "muon_coefficient_type": honoured(
            one_of("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "custom"),
            "coefficients of the Newton-Schulz polynomial; 'custom': those of muon_coefficients",
            refuses={"cubic5": "'cubic5' is not supported yet; choose 'quintic'"},
        ),
        "muon_num_ns_steps": honoured(integer(1, 15), "Newton-Schulz steps"),
        "muon_tp_mode": honoured(
            one_of("owner", "duplicated", "distributed", "blockwise"),
            "who orthogonalises a matrix that tensor parallelism divides",
            differs="'blockwise' orthogonalises shards apart, so a result depends on the layout",
        ),
        "muon_extra_scale_factor": honoured(
            number(0, open_low=True), "multiplies the scale of every Muon update"
        ),
        "muon_scalar_optimizer": honoured(
            one_of(*ELEMENTWISE_CHILDREN), "the child that steps what Muon does not take"
        ),
        "lion_beta1": honoured(number(0, 1), "share of the average in the direction of a step"),
        "lion_beta2": honoured(number(0, 1), "decay rate of Lion's average"),
        "soap_shampoo_beta": honoured(number(0, 1), "decay rate of SOAP's averages"),
        "soap_precondition_frequency": no_effect(
            "SOAP of emerging-optimizers 0.3.0 has a basis at every step", warn=True
        ),
        "soap_use_kl_shampoo": honoured(flag(), "whether SOAP's averages are KL-Shampoo's"),
        "adaptive_muon_moment2_method": honoured(
            one_of("adamuon", "normuon"),
            "second moment of 'adaptive_muon'",
            refuses={"namo": "'namo' is not supported yet; choose 'adamuon' or 'normuon'"},
        ),
        "adaptive_muon_beta2": honoured(number(0, 1), "its decay rate, also of other variants"),
        "adaptive_muon_eps": honoured(number(0, open_low=True), "keeps its root away from zero"),
        "use_distributed_optimizer": no_effect("state is always spread over data-parallel ranks"),
        "use_layer_wise_distributed_optimizer": no_effect("the optimizer is always layer-wise"),
        "overlap_param_gather": honoured(
            flag(), "checked against DDPConfig.overlap_param_gather, which decides"
        ),
        "overlap_param_gather_with_optimizer_step": refused(
            "a bucket is published after every child has stepped what it holds", "drop it"
        ),
        "optimizer_cpu_offload": refused("states stay on the device of the weights", "drop it"),
        "optimizer_offload_fraction": no_effect(_OFFLOAD),
        "use_torch_optimizer_for_cpu_offload": no_effect(_OFFLOAD),
        "overlap_cpu_optimizer_d2h_h2d": no_effect(_OFFLOAD),
        "pin_cpu_grads": no_effect(_OFFLOAD),
        "pin_cpu_params": no_effect(_OFFLOAD),
        "clip_grad": honoured(number(0), "largest global L2 norm of the gradient; 0: no clipping"),
        "grad_norm_skip_threshold": honoured(
            number(0, open_low=True, infinite=True), "a step with a larger norm is skipped"
        ),
        "log_num_zeros_in_grad": honoured(flag(), "count gradient elements that are exactly zero"),
        "barrier_with_L1_time": no_effect("the step has no timers inside"),
        "timers": no_effect("the step has no timers inside; use torch.profiler"),
        "config_logger_dir": no_effect("no file is written; print the configuration", warn=True),
        "optimizer_cuda_graph": refused("a step waits for collectives on the host", "drop it"),
        "on_nonfinite": honoured(
            one_of("raise", "skip"), "what happens when a gradient is not finite on any rank"
        ),
        "muon_clip_grad": honoured(flag(), "whether Muon's gradients are clipped"),
        "clip_grad_by": honoured(
            one_of("total", "own"), "norm of all gradients, or of those that are clipped"
        ),
        "adam_backend": honoured(
            one_of("auto", "transformer_engine", "apex", "torch"),
            "the kernel that steps Adam; 'auto' takes the first of these that is installed",
        ),
        "whole_optimizer": honoured(
            Allowed(text="a path 'module:Class' or a name, or None", test=_is_path),
            "the class that steps whole matrices",
        ),
        "whole_settings": honoured(
            Allowed(text="a tuple of pairs (name, value)", test=_are_pairs), "its arguments"
        ),
        "weight_decay_mode": honoured(
            one_of("decoupled", "independent", "l2", "cautious"), "how weight decay acts"
        ),
        "muon_coefficients": honoured(
            Allowed(text="a tuple of triples of finite numbers, or None", test=_are_triples),
            "Newton-Schulz coefficients of one's own",
        ),
        "muon_iteration": honoured(
            one_of("standard", "gram"), "'gram': long matrices on their Gram matrix, not in bf16"
        ),
        "muon_dtype": honoured(
            one_of(None, torch.bfloat16, torch.float16, torch.float32),
            "dtype of Newton-Schulz and exchange; None: as muon_fp32_matmul_prec says",
        ),
        "muon_pad_batches": honoured(
            flag(), "small matrices of one short side share a batch, padded with zeros"
        ),
    }
)
