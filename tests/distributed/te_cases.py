"""The model of `fp8_cases` with weights of Transformer Engine's classes in place of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import megatron_lw
from megatron_lw import dist_checkpointing, fp8
from megatron_lw.fp8.kinds import stored
from megatron_lw.fp8.te import write_planes
from megatron_lw.optimizer.held import held_buckets
from tests import te_stub
from tests.distributed.fp8_cases import build, same, train
from tests.distributed.history_cases import freeze, frozen_weights
from tests.te_weights import (
    FILL,
    RECIPES,
    grouped,
    inner,
    keep_initial,
    nvfp4,
    storage,
    theirs,
    weight,
)

DDP = megatron_lw.DistributedDataParallel
Optimizer = megatron_lw.LayerWiseDistributedOptimizer


class Product(torch.autograd.Function):
    """Values of the row-wise plane forward, of the column-wise one backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, param: Any, bias: torch.Tensor | None, kind: str) -> Any:
        ctx.save_for_backward(x)
        ctx.param, ctx.kind = param, kind
        return functional.linear(x, theirs(param, kind, "row"), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        [grad], [x] = grads, ctx.saved_tensors
        into = grad @ theirs(ctx.param, ctx.kind, "col") if ctx.needs_input_grad[0] else None
        summed = grad.sum(0) if ctx.needs_input_grad[2] else None
        return into, grad.t() @ x, summed, None


class TheirLinear(nn.Module):
    """A linear layer with a weight of Transformer Engine."""

    def __init__(self, param: nn.Parameter, bias: nn.Parameter | None, kind: str) -> None:
        super().__init__()
        self.weight = param
        self.register_parameter("bias", bias)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight, self.bias, self.kind)


def convert(te: Any, kind: str, keep: bool, model: nn.Module) -> None:
    """Put weights of Transformer Engine where ours are, with the same bytes and tags."""
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, fp8.Linear):
            continue
        ours = layer.weight
        param = weight(te, kind, tuple(ours.shape)).requires_grad_(ours.requires_grad)
        write_planes({name: param}, ours.planes)
        tags = {key: value for key, value in vars(ours).items() if key.startswith("_megatron")}
        vars(param).update(tags)
        if keep:
            keep_initial(te, param, ours.initial.clone())
        else:
            ours.free_initial()
        model.set_submodule(name, TheirLinear(param, layer.bias, kind))


def without_initial(model: nn.Module) -> None:
    """Let our weights go of their initial values too."""
    for layer in model.modules():
        if isinstance(layer, fp8.Linear):
            layer.weight.free_initial()


def held(ddp: DDP, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Bytes, scales and values of both planes of every quantised weight; masters and states."""
    ddp.finish_param_sync()
    kinds = {m.weight: m.kind for m in ddp.module.modules() if isinstance(m, TheirLinear)}
    found: dict[str, torch.Tensor] = {}
    for group in (group for bucket in ddp.buckets for group in bucket.quantised):
        for index, (name, param) in enumerate(group.params.items()):
            planes = group.held(index)
            found |= {f"{key} of {name}": t.clone() for key, t in planes.tensors().items()}
            for plane in ("row", "col"):
                if isinstance(param, fp8.QuantisedTensor):
                    values = param.dequantize(plane=plane).detach()
                else:
                    values = theirs(param, kinds[param], plane)
                found[f"{plane} values of {name}"] = values
    for each in held_buckets(optimizer.runtime):
        for key, row in each.rows.items():
            found[f"{key} of {each.bucket.label}"] = row.clone()
    return found


def held_twice(ddp: DDP) -> int:
    """Bytes in which the weights of Transformer Engine lie, without both planes and scales."""
    count = 0
    for group in (group for bucket in ddp.buckets for group in bucket.quantised):
        theirs = [(n, t) for param in group.params.values() for n, t in inner(param).items()]
        ours = group.planes.tensors()
        small = [t for n, t in [*theirs, *ours.items()] if "scale" in n or n == "history"]
        count += storage([*ours.values(), *(t for _, t in theirs)])
        count -= storage(small) + 2 * sum(param.numel() for param in group.params.values())
    return count


def places(ddp: DDP) -> list[int]:
    """Where they lie."""
    params = ddp.module.parameters()
    return [t.data_ptr() for param in params for t in inner(param).values()]


def made(te: Any, kind: str, *, own: bool, keep: bool = True, **options: Any) -> Any:
    change: Callable[[nn.Module], None] | None = partial(convert, te, kind, keep)
    if own:
        change = None if keep else without_initial
    return build(RECIPES[kind], convert=change, **options)


def equal_to_ours(kind: str, steps: int, keep: bool, options: dict[str, Any]) -> dict[str, int]:
    """Train both models; raise if they differ anywhere.

    Returns:
        How many weights are Transformer Engine's, how many planes have changed, and how many bytes
        they hold twice, how many buffers have moved.
    """
    with te_stub.installed() as te:
        runs = []
        for own in (True, False):
            ddp, optimizer = made(te, kind, own=own, keep=keep, **options)
            start, lay = held(ddp, optimizer), places(ddp)
            seen = train(ddp, optimizer, range(steps))
            optimizer.check()
            runs.append((seen, start, held(ddp, optimizer)))
        (seen, start, found), (other_seen, other_start, other_found) = runs
        assert seen == other_seen and len(seen) == steps
        same(start, other_start)
        same(found, other_found)
        weights = [p for p in ddp.module.parameters() if type(p).__module__.startswith("transf")]
        assert all(p.get_high_precision_init_val() is None for p in weights if keep)
        data = [name for name in found if "_data of " in name]
        return {
            "theirs": len(weights),
            "changed": sum(not torch.equal(found[name], start[name]) for name in data),
            "planes": len(data),
            "bytes twice": held_twice(ddp),
            "moved": sum(one != other for one, other in zip(lay, places(ddp), strict=True)),
        }


def resumed(folder: Path, kind: str, saved_by_us: bool) -> None:
    """Save, load into garbage, go on: every byte, and the next losses, are as without a break."""
    with te_stub.installed() as te:
        ddp, optimizer = made(te, kind, own=saved_by_us)
        train(ddp, optimizer, range(3))
        before = held(ddp, optimizer)
        dist_checkpointing.save(folder, ddp, optimizer, step=3)
        ahead = train(ddp, optimizer, range(3, 5))
        other, again = made(te, kind, own=False)
        with torch.no_grad():
            for group in (group for bucket in other.buckets for group in bucket.quantised):
                for tensor in group.tensors():
                    tensor.fill_(FILL)
        dist_checkpointing.load(folder, other, again)
        again.check()
        same(before, held(other, again))
        assert train(other, again, range(3, 5)) == ahead
        same(held(ddp, optimizer), held(other, again))


def frozen_resumed(folder: Path, kind: str) -> int:
    """Save frozen weights, and load them into garbage; how many tensors they consist of."""
    with te_stub.installed() as te:
        ddp, optimizer = made(te, kind, own=False, tweak=freeze)
        before = frozen_weights(ddp)
        dist_checkpointing.save(folder, ddp, optimizer, step=0)
        other, again = made(te, kind, own=False, tweak=freeze)
        assert other.module.mid.weight.get_high_precision_init_val() is None
        for layer in (other.module.mid, other.module.experts[1]):
            for tensor in stored("it", layer.weight).values():
                tensor.fill_(FILL)
        dist_checkpointing.load(folder, other, again)
        same(before, frozen_weights(other))
        return sum(bool(tensor.any()) for tensor in before.values())


def changed_by_hand(kind: str, everywhere: bool) -> tuple[str, str]:
    """What check() says of a byte that was changed; whether masters can follow it."""
    with te_stub.installed() as te:
        ddp, optimizer = made(te, kind, own=False)
        train(ddp, optimizer, range(2))
        param = ddp.module.experts[1].weight
        name = "_data" if kind in ("tensor", "delayed") else "_rowwise_data"
        if everywhere or ddp.groups.dp.rank == ddp.groups.dp.size - 1:
            vars(param)[name][0, 3] ^= 9
        text = ""
        try:
            optimizer.check()
        except megatron_lw.InvariantError as error:
            text = str(error)
        if not everywhere:
            return text, ""
        values = theirs(param, kind, "row").clone()
        optimizer.reload_model_params()
        optimizer.check()
        differ = int((theirs(param, kind, "row") != values).sum())
        return text, "" if differ == 0 else f"{differ} values changed"


def refused() -> dict[str, str]:
    """What construction says of kinds that are not supported, on every rank."""

    def unknown(te: Any) -> torch.Tensor:
        tensor = weight(te, "mxfp8").data
        tensor.__class__ = type("Unknown", (te.MXFP8Tensor,), {"__module__": te.__name__})
        return tensor

    def put(make: Callable[[Any], torch.Tensor], te: Any, model: Any) -> None:
        model.mid = TheirLinear(nn.Parameter(make(te)), None, "mxfp8")

    found: dict[str, str] = {}
    with te_stub.installed() as te:
        for name, make in (("NVFP4", nvfp4), ("grouped", grouped), ("unknown", unknown)):
            try:
                build("mxfp8", convert=partial(put, make, te))
            except megatron_lw.LayerWiseError as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found
