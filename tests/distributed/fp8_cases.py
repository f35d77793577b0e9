"""Models with quantised weights, trained on the ranks; everything that a rank holds afterwards."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import megatron_lw
from megatron_lw import dist_checkpointing, fp8
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.optimizer.held import held_buckets

BF16 = torch.bfloat16
RECIPES = {
    "tensor": Recipe(format="tensor"),
    "delayed": Recipe(format="delayed", history=3),
    "block": Recipe(format="block"),
    "block-fp32": Recipe(format="block", fp32_scales=True),
    "mxfp8": Recipe(format="mxfp8"),
    "mxfp8-derived": Recipe(format="mxfp8", derive_columns=True),
    "mxfp8-2d": Recipe(format="mxfp8-2d"),
}
Optimizer = megatron_lw.LayerWiseDistributedOptimizer


class Net(nn.Module):
    """Linear layers of several shapes; BF16 and FP32 vectors, with Adam in the buckets of some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 160, dtype=BF16)
        self.mid = nn.Linear(160, 160, bias=False, dtype=BF16)
        self.down = nn.Linear(160, 64, dtype=BF16)
        self.plain = nn.Linear(64, 64, dtype=BF16)
        self.out = nn.Linear(64, 96, bias=False, dtype=BF16)
        self.scale = nn.Parameter(torch.ones(64))
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plain(functional.gelu(self.down(functional.gelu(self.mid(self.up(x))))))
        for expert in self.experts:
            y = y + expert(x)
        return self.out((y.float() * self.scale).to(BF16)).float()


def quantised(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name != "plain"


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 64, generator=generator).to(BF16)


def expert_name(name: str, ep_rank: int) -> str:
    """Experts are numbered over the expert-parallel ranks, two on each."""
    first, *rest = name.split(".")
    if first != "experts":
        return name
    return ".".join([first, str(int(rest[0]) + 2 * ep_rank), *rest[1:]])


def build(
    recipe: str | Recipe,
    *,
    gather: bool = True,
    overlap: bool = False,
    optimizer: str = "muon",
    bucket_size: int = 20000,
    ep: int = 1,
    grad_fp32: bool = True,
    tweak: Callable[[Net], None] | None = None,
    convert: Callable[[nn.Module], None] | None = None,
) -> tuple[megatron_lw.DistributedDataParallel, Optimizer]:
    groups = megatron_lw.ParallelGroups.create(expert=ep)
    model = Net()
    for expert in model.experts:
        megatron_lw.annotate(expert.weight, expert=True)
    megatron_lw.annotate(model.out.weight, output=True)
    if tweak is not None:
        tweak(model)
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    fp8.quantize_model(model, chosen, quantised)
    if convert is not None:
        convert(model)
    ddp = megatron_lw.DistributedDataParallel(
        model,
        groups,
        names=megatron_lw.NameMap(lambda _, name: expert_name(name, groups.ep.rank)),
        config=megatron_lw.DDPConfig(
            bucket_size=bucket_size,
            fp8_param_gather=gather,
            overlap_param_gather=overlap,
            overlap_grad_reduce=overlap,
            grad_reduce_in_fp32=grad_fp32,
        ),
    )
    config = megatron_lw.OptimizerConfig(
        optimizer=optimizer, lr=0.01, bf16=True, muon_nesterov=True
    )
    return ddp, megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=groups)


def train(
    ddp: megatron_lw.DistributedDataParallel, optimizer: Optimizer, steps: range
) -> list[Any]:
    """Losses, norms and checksums of the reduced gradients, two micro-batches a step."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        with ddp.no_sync():
            loss = ddp(batch(2 * step, ddp.groups.dp.rank)).square().mean()
            loss.backward()
        more = ddp(batch(2 * step + 1, ddp.groups.dp.rank)).square().mean()
        more.backward()
        ddp.finish_grad_sync()
        grads = [zlib.crc32(b.grad_row.view(torch.uint8).numpy()) for b in ddp.buckets]
        _, norm, _ = optimizer.step()
        seen.append((loss.item(), more.item(), norm, grads))
    return seen


def everything(
    ddp: megatron_lw.DistributedDataParallel, optimizer: Optimizer
) -> dict[str, torch.Tensor]:
    """Weights, planes, masters and states of this rank."""
    ddp.finish_param_sync()
    found = {label: t.clone() for b in ddp.buckets for label, t in b.stored().items()}
    for held in held_buckets(optimizer.runtime):
        for key, row in held.rows.items():
            found[f"{key} of {held.bucket.label}"] = row.clone()
    return found


def facts(ddp: megatron_lw.DistributedDataParallel) -> dict[str, int]:
    """What the plan made of the quantised weights, to show that a case is no empty one."""
    held = [
        (bucket, slot, bucket.params[name])
        for bucket in ddp.buckets
        for name, slot in bucket.row_slots()
    ]
    inside = [
        (len(bucket.params), sum(len(group.params) for group in bucket.quantised))
        for bucket in ddp.buckets
    ]
    return {
        "cut": sum(s.numel < p.numel() for _, s, p in held if isinstance(p, fp8.QuantisedTensor)),
        "mixed": sum(0 < count < total for total, count in inside),
        "buckets": len(inside),
        "empty": sum(not bucket.layout.slots[bucket.group.rank] for bucket in ddp.buckets),
    }


def on_and_off(
    recipe: str, steps: int, options: dict[str, Any]
) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Train with FP8 on the wire, overlapped and not, and with BF16; raise if they differ.

    Returns:
        Facts of the plan, and everything that this rank holds.
    """
    runs = []
    for on, overlap in ((True, True), (True, False), (False, False)):
        ddp, optimizer = build(recipe, gather=on, overlap=overlap, **options)
        start = everything(ddp, optimizer)
        seen: list[Any] = [train(ddp, optimizer, range(steps))]
        with torch.no_grad():
            seen.append(ddp(batch(9999, 0)).tolist())
        optimizer.check()
        runs.append((seen, start, everything(ddp, optimizer)))
    (seen, start, found), *others = runs
    for other_seen, other_start, other_found in others:
        assert seen == other_seen and len(seen[0]) == steps
        same(start, other_start)
        same(found, other_found)
    assert len({str(grads) for *_, grads in seen[0]}) == steps
    planes = [name for name in found if name.startswith(("row_", "col_"))]
    assert len(planes) >= 4 * 5
    for name in planes:
        assert found[name].any(), name
        assert "data" not in name or not torch.equal(found[name], start[name]), name
    return facts(ddp), found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Raise where two ranks, or two runs, differ."""
    assert one.keys() == other.keys() and one, one.keys() ^ other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def disturbed(recipe: str, overlap: bool, ways: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Four steps with explicit gathers, evaluation and saves in every possible place."""
    ddp, optimizer = build(recipe, overlap=overlap)

    def gather(when: str) -> None:
        if when in ways:
            gather_twice(ddp, wait=when != "in flight")

    gather("first")
    for step in range(4):
        optimizer.zero_grad()
        gather("zeroed")
        gather("in flight")
        if "in flight" in ways:
            ddp.zero_grad_buffer()
        with ddp.no_sync():
            ddp(batch(2 * step, ddp.groups.dp.rank)).square().mean().backward()
        if not overlap:
            gather("accumulating")
        ddp(batch(2 * step + 1, ddp.groups.dp.rank)).square().mean().backward()
        if not overlap:
            gather("backward")
        ddp.finish_grad_sync()
        gather("reduced")
        optimizer.step()
        if "evaluate" in ways:
            with torch.no_grad():
                ddp(batch(5, 0))
            ddp.state_dict()
        gather("stepped")
    optimizer.check()
    return everything(ddp, optimizer)


def gather_twice(ddp: megatron_lw.DistributedDataParallel, *, wait: bool) -> None:
    """Publish twice; weights must stay as they are."""
    before = {label: t.clone() for b in ddp.buckets for label, t in b.stored().items()}
    for _ in range(2):
        ddp.publish()
    if wait:
        ddp.finish_param_sync()
        same(before, {label: t for b in ddp.buckets for label, t in b.stored().items()})


def bytes_per_weight(recipe: str, shape: tuple[int, int], gather: bool) -> tuple[float, int]:
    """Bytes that a rank sends for a weight, over the share of others, and how many are cut."""
    groups = megatron_lw.ParallelGroups.create()
    torch.manual_seed(0)
    layers = [nn.Linear(shape[1], shape[0], bias=False, dtype=BF16) for _ in range(2)]
    model = fp8.quantize_model(nn.Sequential(*layers), RECIPES[recipe])
    ddp = megatron_lw.DistributedDataParallel(
        model, groups, megatron_lw.DDPConfig(fp8_param_gather=gather)
    )
    config = megatron_lw.OptimizerConfig(optimizer="adam", lr=0.01, bf16=True)
    megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=groups)
    before = groups.dp.traffic.nbytes.copy()
    ddp.masters_newer = True
    ddp.publish()
    sent = sum((groups.dp.traffic.nbytes - before).values())
    share = (groups.dp.size - 1) / groups.dp.size
    return sent / (share * 2 * shape[0] * shape[1]), facts(ddp)["cut"]


def seeded(recipe: str) -> None:
    """Masters are the BF16 values before quantisation; then nobody keeps those."""
    model, before = Net(), {name: p.detach().clone() for name, p in Net().named_parameters()}
    fp8.quantize_model(model, RECIPES[recipe], quantised)
    if megatron_lw.ParallelGroups.create().dp.rank > 0:
        with torch.no_grad():  # replicas start from the first rank's values
            model.mid.weight.copy_(torch.randn(160, 160).to(BF16))
    ddp, optimizer = wrap(model, bucket_size=10**7)
    differ = 0
    for bucket, publisher in zip(ddp.buckets, ddp.publishers, strict=True):
        for name, slot in bucket.row_slots():
            part = slice(slot.param_start, slot.param_start + slot.numel)
            row = publisher.master.row[slot.row_start : slot.row_start + slot.numel]
            assert torch.equal(row, before[name].view(-1)[part].float()), name
            param = bucket.params[name]
            if isinstance(param, fp8.QuantisedTensor):
                assert param.initial is None
                differ += not torch.equal(param.dequantize(), before[name])
    kept = [p for p in model.parameters() if isinstance(p, fp8.QuantisedTensor) and p.initial]
    assert kept == []
    assert differ or not any(len(list(b.row_slots())) for b in ddp.buckets)
    optimizer.check()


def wrap(
    model: nn.Module, **settings: Any
) -> tuple[megatron_lw.DistributedDataParallel, Optimizer]:
    groups = megatron_lw.ParallelGroups.create()
    ddp = megatron_lw.DistributedDataParallel(model, groups, megatron_lw.DDPConfig(**settings))
    config = megatron_lw.OptimizerConfig(optimizer="adam", lr=0.01, bf16=True)
    return ddp, megatron_lw.get_megatron_optimizer(config, [ddp], pg_collection=groups)


def resumed(folder: str, saved: str, loaded: str) -> None:
    """Save, load with another recipe into garbage, go on: weights are those of the masters."""
    ddp, optimizer = build(saved)
    train(ddp, optimizer, range(3))
    before = everything(ddp, optimizer)
    dist_checkpointing.save(folder, ddp, optimizer, step=3)
    ahead = train(ddp, optimizer, range(3, 5))
    other, again = build(loaded)
    with torch.no_grad():
        for param in other.module.parameters():
            param.copy_(torch.full(param.shape, 7.0))
    dist_checkpointing.load(folder, other, again)
    again.check()
    after = everything(other, again)
    rows = {name for name in before if " of bucket" in name}
    assert rows and rows == {name for name in after if " of bucket" in name}
    same({name: before[name] for name in rows}, {name: after[name] for name in rows})
    if saved == loaded:
        same(before, after)
        assert train(other, again, range(3, 5)) == ahead


def flipped(where: str) -> str:
    """What check() says of one byte that was changed on the last rank."""
    ddp, optimizer = build("mxfp8")
    train(ddp, optimizer, range(1))
    weight = ddp.module.experts[1].weight
    if ddp.groups.dp.rank == ddp.groups.dp.size - 1:
        weight.planes.tensors()[where][5] ^= 1
    try:
        optimizer.check()
    except megatron_lw.InvariantError as error:
        return str(error)
    return ""


def loaded_values() -> None:
    """A plain state dict is quantised into the weights; masters and planes follow."""
    ddp, optimizer = build("mxfp8")
    train(ddp, optimizer, range(2))
    torch.manual_seed(5)
    state = {name: torch.randn(p.shape) * 0.1 for name, p in ddp.module.named_parameters()}
    ddp.load_state_dict(state)
    optimizer.check()
    for name, param in ddp.module.named_parameters():
        wanted = state[name].to(param.dtype)
        if isinstance(param, fp8.QuantisedTensor):
            made = fp8.QuantisedTensor.from_values(wanted, param.recipe)
            param, wanted = param.dequantize(), made.dequantize()
        assert torch.equal(param, wanted), name
    train(ddp, optimizer, range(2, 3))
    optimizer.check()


def infinite_master() -> None:
    ddp, optimizer = build("mxfp8")
    train(ddp, optimizer, range(1))
    for bucket, publisher in zip(ddp.buckets, ddp.publishers, strict=True):
        for name, slot in bucket.row_slots():
            if name == "mid.weight":
                publisher.master.row[slot.row_start] = torch.inf
    train(ddp, optimizer, range(1, 2))


def step_bytes(recipe: str | None, gather: bool) -> dict[str, int]:
    """Bytes that a rank sends in one step of two GPT layers of width 256, by collective."""
    torch.manual_seed(0)
    shapes = [(768, 256), (256, 256), (1024, 256), (256, 1024)] * 2
    layers = [nn.Linear(cols, rows, bias=False, dtype=BF16) for rows, cols in shapes]
    model = nn.ModuleList(layers)
    if recipe is not None:
        fp8.quantize_model(model, RECIPES[recipe])
    ddp, optimizer = wrap(model, fp8_param_gather=gather)
    ddp.groups.dp.traffic.clear()
    optimizer.zero_grad()
    for layer in model:
        layer(torch.ones(1, layer.in_features, dtype=BF16)).sum().backward()
    optimizer.step()
    return dict(ddp.groups.dp.traffic.nbytes)
