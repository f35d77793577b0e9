"""Options of Megatron's loop with our optimizer; imported on ranks only."""

from __future__ import annotations

import types
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel as MegatronDDP
from megatron.core.tensor_parallel import layers

from megatron_lw.errors import StateError
from tests.megatron.runs import Run, refusal
from tests.megatron.training import BASE, train


def with_and_without(flags: list[str], more: list[str]) -> tuple[Run, Run]:
    """Ours twice: with some flags, and with more."""
    return train(flags), train([*flags, *more])


def frozen(flags: list[str], pattern: str) -> tuple[Run, Run]:
    """Ours with the parameters frozen whose name has `pattern`; before and after training."""
    before = Run()

    def prepare(chunk: Any) -> None:
        for name, param in chunk.named_parameters():
            param.requires_grad_(pattern not in name)
            before.weights[name] = param.detach().float().clone()

    return before, train(flags, prepare=prepare)


def frozen_stage(flags: list[str]) -> tuple[Run, list[int]]:
    """Ours where the last pipeline stage has nothing trainable; trainable parameters a rank."""

    def prepare(chunk: Any) -> None:
        if chunk.post_process:
            chunk.requires_grad_(False)

    def count(model: Any, optimizer: Any) -> int:
        assert optimizer.get_loss_scale().item() == 1.0
        return len(optimizer.get_parameters())

    run = train(flags, prepare=prepare, probe=count)
    return run, run.extra


def fused(flags: list[str]) -> tuple[Run, Run, int]:
    """Ours, with and without layers that accumulate their weight gradients themselves."""
    calls: list[torch.Size] = []

    def accumulate(total: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        calls.append(main_grad.shape)
        main_grad.add_(grad.reshape(-1, grad.shape[-1]).t() @ total.reshape(-1, total.shape[-1]))

    kernels: Any = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    plain = train(flags)
    module: Any = layers
    module.fused_weight_gradient_mlp_cuda = kernels
    module._grad_accum_fusion_available = True
    try:
        return plain, train(flags, without=["--no-gradient-accumulation-fusion"]), len(calls)
    finally:
        module._grad_accum_fusion_available = False


def adopted(flags: list[str]) -> tuple[Run, Run]:
    """Ours with our DDP, then with Megatron's own, which is checked after each step."""
    base = [flag for flag in BASE if flag != "--use-distributed-optimizer"]

    def probe(model: Any, optimizer: Any) -> None:
        optimizer.check()
        for chunk, inside in zip(model, optimizer.model_chunks, strict=True):
            assert type(chunk) is MegatronDDP
            assert chunk.module is inside.module
            buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
            storage = {b.grad_data.untyped_storage().data_ptr() for b in buffers}
            for param in chunk.parameters():
                assert param.main_grad.untyped_storage().data_ptr() in storage
        try:
            optimizer.step()
        except StateError as error:
            assert "a row that a step has used" in str(error)
        else:
            raise AssertionError("gradients were used twice")

    return train(flags, base=base), train(flags, base=base, ddp=False, probe=probe)


def adopting_refuses(flags: list[str]) -> str:
    """What is said of flags that Megatron's own DDP does not go with."""
    return refusal(lambda: train(flags, ddp=False))


def reduces(flags: list[str]) -> tuple[int, list[int]]:
    """Number of buckets, and reduce-scatters after each step of the loop."""

    def count(model: Any, optimizer: Any) -> tuple[int, int]:
        [chunk] = model
        return len(chunk.buckets), chunk.groups.dp.traffic.calls["reduce_scatter"]

    found = train(flags, probe=count).extra
    return found[0][0], [calls for _, calls in found]


def fp16(flags: list[str]) -> tuple[Run, Run]:
    """Megatron's Adam and ours in FP16, from a loss scale that overflows."""
    return train(flags, ours=False), train(flags)
