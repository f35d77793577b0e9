"""Which kernel steps Adam, and how the optimizer classes of others are used as functions."""

from __future__ import annotations

import pytest
import torch

from megatron_lw import ConfigError
from megatron_lw.optimizer.children.adam_backends import (
    FusedAdamBackend,
    TorchAdam,
    resolve_adam_backend,
)


class FakeFusedAdam(torch.optim.Optimizer):
    """The signature and the bookkeeping of apex's and Transformer Engine's FusedAdam."""

    made = 0

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
        adam_w_mode=True, weight_decay=0.0, amsgrad=False,
    ):  # fmt: skip
        assert bias_correction and adam_w_mode and not amsgrad
        type(self).made += 1
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m_hat, v_hat = m / (1 - b1 ** group["step"]), v / (1 - b2 ** group["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p
                p.sub_(update, alpha=group["lr"])


def missing():
    raise ImportError("not here")


def run(backend, steps=4):
    generator = torch.Generator().manual_seed(0)
    storage = [torch.randn(192, generator=generator) for _ in range(3)]
    rows = [storage[0][:64], storage[0][128:], storage[1]]
    averages = [torch.zeros_like(row) for row in rows]
    squares = [torch.zeros_like(row) for row in rows]
    for step in range(1, steps + 1):
        grads = [torch.randn(row.shape, generator=generator) for row in rows]
        backend(
            rows, grads, averages, squares,
            step=step, lr=0.1 / step, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01 * step,
        )  # fmt: skip
    return storage[:2] + averages + squares


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_fused_adam_class_steps_our_rows_in_place_like_torch(name):
    """Class numerical: lr and decay change every step, state is ours from the first step on."""
    FakeFusedAdam.made = 0
    theirs = run(FusedAdamBackend(name, FakeFusedAdam))
    assert FakeFusedAdam.made == 1
    for a, b in zip(theirs, run(TorchAdam()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_cpu_takes_torch():
    backend = resolve_adam_backend("auto", torch.device("cpu"), lambda: FakeFusedAdam)
    assert backend.name == "torch"


@pytest.mark.parametrize(
    ("loader", "expected"), [(lambda: FakeFusedAdam, "transformer_engine"), (missing, "torch")]
)
def test_cuda_takes_the_first_that_is_installed(loader, expected):
    """Apex is not on the package index, so without Transformer Engine it falls through to torch."""
    assert resolve_adam_backend("auto", torch.device("cuda"), loader).name == expected


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_a_named_backend_that_is_missing_is_refused(name):
    with pytest.raises(ConfigError, match=f"adam_backend = '{name}' is not installed"):
        resolve_adam_backend(name, torch.device("cuda"), missing)


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
def test_a_cuda_kernel_on_cpu_is_refused(name):
    with pytest.raises(ConfigError, match="needs CUDA"):
        resolve_adam_backend(name, torch.device("cpu"), lambda: FakeFusedAdam)
