"""The fused kernels that can step Adam, behind one signature; one is chosen once.

The choice enters the plan hash: two ranks with different kernels would publish different bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch.optim.adamw import adamw

from megatron_lw.errors import ConfigError

BackendName = Literal["auto", "transformer_engine", "apex", "torch"]
FusedAdamClass = Callable[..., torch.optim.Optimizer]
Loader = Callable[[], FusedAdamClass]


class AdamBackend(Protocol):
    """Decoupled-weight-decay Adam on lists of flat tensors, in place."""

    name: str

    def __call__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Step all tensors; fp32, one length for the four lists; `step` counts from 1."""


class TorchAdam:
    """`torch.optim.AdamW`'s fused kernel (CPU and CUDA)."""

    name = "torch"

    def __call__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """See `AdamBackend`."""
        steps = [torch.full((), float(step - 1), device=p.device) for p in params]
        adamw(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )


class FusedAdamBackend:
    """A `FusedAdam` optimizer class (Transformer Engine's or apex's) used as a function.

    Both classes keep `exp_avg` and `exp_avg_sq` in `state[param]` and the step count in the group;
    handing them our rows as parameters, with state and count set before the call, makes them step
    in place on our storage.
    """

    def __init__(self, name: str, fused_adam: FusedAdamClass) -> None:
        self.name = name
        self._fused_adam = fused_adam
        self._optimizers: dict[tuple[int, ...], torch.optim.Optimizer] = {}

    def __call__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """See `AdamBackend`."""
        key = tuple(p.data_ptr() for p in params)
        optimizer = self._optimizers.get(key)
        if optimizer is None:
            optimizer = self._fused_adam(
                list(params), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
            )
            for param, exp_avg, exp_avg_sq in zip(params, exp_avgs, exp_avg_sqs, strict=True):
                optimizer.state[param] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
            self._optimizers[key] = optimizer
        group = optimizer.param_groups[0]
        group.update(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step - 1)
        owned: list[torch.Tensor] = group["params"]
        for param, grad in zip(owned, grads, strict=True):
            param.grad = grad
        optimizer.step()
        for param in owned:
            param.grad = None


def load_apex() -> FusedAdamClass:
    """Apex's `FusedAdam` class.

    Raises:
        ImportError: apex is not installed or was built without its kernels.
    """
    module: Any = importlib.import_module("apex.optimizers")
    loaded: FusedAdamClass = module.FusedAdam
    return loaded


def resolve_adam_backend(
    preference: BackendName, device: torch.device, load_transformer_engine: Loader
) -> AdamBackend:
    """Choose the kernel: on CUDA Transformer Engine's, else apex's, else torch's; on CPU torch's.

    Args:
        preference: `OptimizerConfig.adam_backend`.
        device: where the masters are.
        load_transformer_engine: returns Transformer Engine's `FusedAdam` or raises ImportError.

    Raises:
        ConfigError: the named backend is not installed, or cannot work on this device.
    """
    loaders: dict[str, Loader] = {
        "transformer_engine": load_transformer_engine,
        "apex": load_apex,
    }
    if preference == "torch" or (preference == "auto" and device.type != "cuda"):
        return TorchAdam()
    if preference == "auto":
        for name, loader in loaders.items():
            try:
                return FusedAdamBackend(name, loader())
            except ImportError:
                continue
        return TorchAdam()
    if device.type != "cuda":
        raise ConfigError(
            f"adam_backend = {preference!r} needs CUDA, but the parameters are on {device.type}; "
            "use adam_backend='auto' or 'torch'"
        )
    try:
        return FusedAdamBackend(preference, loaders[preference]())
    except ImportError as error:
        raise ConfigError(
            f"adam_backend = {preference!r} is not installed ({error}); "
            "install it, or use adam_backend='auto' or 'torch'"
        ) from error
