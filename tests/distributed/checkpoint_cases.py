"""Models in many layouts of ranks whose every value is its global index, saved and loaded.

What a rank must hold after a load is computed here from the logical tensors alone, without the
library's boxes.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatron_lw
from megatron_lw.dist_checkpointing import CheckpointWarning, load, save
from megatron_lw.optimizer.held import held_buckets
from tests.distributed.cases import Bag


@dataclass(frozen=True)
class Logical:
    """A logical parameter.

    Attributes:
        shape: logical shape.
        tp_dim: dimension divided over (expert) tensor parallelism.
        blocks: fused matrices along dimension 0.
        vocabulary: whether its rows are padded to a multiple of 4 for each tensor-parallel rank.
        expert: its number, if it belongs to one expert.
        stack: a stack of experts, divided over expert parallelism.
        stage: pipeline stage out of two that has it; None: both (tied).
        keep_fp32: a replica over all ranks of its stage.
        frozen: takes no gradient.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = None
    blocks: tuple[int, ...] | None = None
    vocabulary: bool = False
    expert: int | None = None
    stack: bool = False
    stage: int | None = 0
    keep_fp32: bool = False
    frozen: bool = False


LOGICAL = {
    "embedding": Logical((37, 6), tp_dim=0, vocabulary=True, stage=None),
    "layers.0.qkv": Logical((24, 10), tp_dim=0),
    "layers.0.gate_up": Logical((16, 5), tp_dim=0, blocks=(8, 8)),
    "layers.0.proj": Logical((7, 12), tp_dim=1),
    "layers.0.norm": Logical((9,)),
    "layers.0.router": Logical((6, 3)),
    "layers.0.frozen": Logical((8, 3), tp_dim=0, frozen=True),
    "layers.1.stack": Logical((4, 8, 5), tp_dim=1, stack=True, stage=1),
    "layers.1.gain": Logical((), stage=1),
    "layers.1.fp32": Logical((5,), keep_fp32=True, stage=1),
    "layers.1.conv": Logical((5, 3, 2, 2), stage=1),
    **{f"layers.1.experts.{e}.w": Logical((8, 3), tp_dim=0, expert=e, stage=1) for e in range(4)},
    **{f"layers.1.experts.{e}.b": Logical((7,), expert=e, stage=1) for e in range(4)},
}
Table = dict[str, Logical]
STATES = {
    "master": 0.0,
    "momentum": 0.25,
    "exp_avg": 0.5,
    "exp_avg_sq": 0.75,
    "momentum_buffer": 0.125,
}


def truth(name: str, table: Table = LOGICAL) -> torch.Tensor:
    """The whole logical tensor: the global index of every element, apart for each parameter."""
    spec = table[name]
    base = 1000 * list(table).index(name)
    return (torch.arange(math.prod(spec.shape)) + base).float().view(spec.shape)


def local_part(
    name: str, groups: megatron_lw.ParallelGroups, table: Table = LOGICAL
) -> torch.Tensor | None:
    """This rank's part of the logical tensor, with zeros in padding rows; None if it has none."""
    spec, whole = table[name], truth(name, table)
    if spec.stage is not None and groups.pp.size > 1 and spec.stage != groups.pp.rank:
        return None
    is_expert = spec.expert is not None or spec.stack
    tensor = groups.expert_tp if is_expert else groups.tp
    if spec.expert is not None and spec.expert // (4 // groups.ep.size) != groups.ep.rank:
        return None
    if spec.stack:
        whole = whole.chunk(groups.ep.size)[groups.ep.rank]
    if spec.vocabulary:
        rows = -whole.shape[0] % (4 * tensor.size)
        whole = torch.cat([whole, torch.zeros(rows, *whole.shape[1:])])
    if spec.tp_dim is not None:
        blocks = spec.blocks or (whole.shape[spec.tp_dim],)
        parts = [
            block.chunk(tensor.size, spec.tp_dim)[tensor.rank]
            for block in whole.split(list(blocks), spec.tp_dim)
        ]
        whole = torch.cat(parts, spec.tp_dim)
    return whole.contiguous()


class Layout:
    """A model on this rank, in one layout.

    Args:
        sizes: of `ParallelGroups.create`.
        optimizer: "muon" or "adam".
        bucket_size: of the buckets.
        reverse: register the parameters in reverse order.
        dtype: of the weights; frozen parameters are FP32.
        table: the model.
    """

    def __init__(
        self,
        sizes: dict[str, int],
        *,
        optimizer: str = "muon",
        bucket_size: int = 300,
        reverse: bool = False,
        dtype: torch.dtype = torch.float32,
        table: Table = LOGICAL,
        **config: Any,
    ) -> None:
        self.groups = megatron_lw.ParallelGroups.create(**sizes)
        self.table = table
        self.model = Bag({}, torch.float32)
        names = [name for name in table if self.part(name) is not None]
        for name in reversed(names) if reverse else names:
            self._register(name, dtype)
        self.model.register_buffer("calls", torch.full((3,), -1, dtype=torch.int64))
        self.ddp = megatron_lw.DistributedDataParallel(
            self.model,
            self.groups,
            megatron_lw.DDPConfig(bucket_size=bucket_size),
            names=megatron_lw.NameMap(lambda chunk, name: name.replace("/", ".")),
        )
        self.config = megatron_lw.OptimizerConfig(
            optimizer=optimizer, lr=0.1, weight_decay=0.01, bf16=dtype == torch.bfloat16, **config
        )
        self.optimizer = megatron_lw.get_megatron_optimizer(self.config, [self.ddp])

    def part(self, name: str) -> Any:
        """What this rank holds of a parameter."""
        return local_part(name, self.groups, self.table)

    def _register(self, name: str, dtype: torch.dtype) -> None:
        spec, part = self.table[name], self.part(name)
        garbage = torch.full(part.shape, float("nan") if spec.frozen else -7.0)
        param = nn.Parameter(
            garbage.to(torch.float32 if spec.keep_fp32 or spec.frozen else dtype),
            requires_grad=not spec.frozen,
        )
        megatron_lw.annotate(
            param,
            tp_dim=spec.tp_dim,
            blocks=spec.blocks,
            expert=spec.expert is not None or spec.stack,
            matrices=part.shape[0] if spec.stack else None,
            tied="words" if spec.stage is None else None,
            logical_rows=spec.shape[0] if spec.vocabulary else None,
            embedding=spec.vocabulary,
            keep_fp32=spec.keep_fp32,
        )
        self.model.register_parameter(name.replace(".", "/"), param)

    def fill(self, num_steps: int) -> None:
        """Set every logical value to its index, padding to junk, and the step counts."""
        for held in held_buckets(self.optimizer.runtime):
            for state, row in held.rows.items():
                for name, slot in held.bucket.row_slots():
                    part = self.part(name).view(-1)
                    row[slot.row_start : slot.row_start + slot.numel] = (
                        part[slot.param_start : slot.param_start + slot.numel] + STATES[state]
                    )
            held.child.num_steps = num_steps
        for name, param in self.model.named_parameters():
            if not param.requires_grad:
                param.data.copy_(self.part(name.replace("/", ".")))
        self.model.calls.copy_(torch.tensor([1, 2, 1 << 60]))

    def problems(self, *, states: bool = True) -> list[str]:
        """What is not as it must be after a load, on this rank."""
        found = []
        count = 0
        for held in held_buckets(self.optimizer.runtime):
            for state, row in held.rows.items():
                if state != "master" and not states:
                    continue
                for name, slot in held.bucket.row_slots():
                    part = self.part(name)
                    logical = torch.ones_like(part)
                    if self.table[name].vocabulary:
                        rows = part.shape[0] * self.groups.tp.rank
                        logical[max(0, self.table[name].shape[0] - rows) :] = 0
                    expected = (part + STATES[state]) * logical
                    run = slice(slot.param_start, slot.param_start + slot.numel)
                    got = row[slot.row_start : slot.row_start + slot.numel]
                    count += got.numel()
                    if not torch.equal(got, expected.view(-1)[run]):
                        found.append(f"{state} of {name}: {got} instead of {expected}")
        for name, param in self.model.named_parameters():
            expected = self.part(name.replace("/", "."))
            if not torch.equal(param.data, expected.to(param.dtype)):
                found.append(f"weight of {name}: {param.data} instead of {expected}")
        if self.model.calls.tolist() != [1, 2, 1 << 60]:
            found.append(f"buffer calls: {self.model.calls}")
        return found if count or not self.optimizer.runtime.buckets else ["nothing was compared"]


def name_of(sizes: dict[str, int]) -> str:
    return "-".join(f"{k}{v}" for k, v in sizes.items()) or "dp"


def save_all(root: Path, layouts: list[dict[str, int]]) -> list[str]:
    """Save in each layout that fits this number of ranks; returns the directories."""
    found = []
    for sizes in layouts:
        made = Layout(sizes)
        made.fill(num_steps=7)
        made.optimizer.param_groups[0]["lr"] = 0.125
        rank = made.groups.world.rank
        extra = {"shared": (1, "a", None), "own": rank, "generator": torch.get_rng_state()}
        path = root / f"{made.groups.world.size}-{name_of(sizes)}"
        found.append(str(save(path, made.ddp, made.optimizer, None, extra, step=7)))
        made.groups.destroy()
    return found


def load_all(sizes: dict[str, int], saved: list[str], **changes: Any) -> dict[str, list[str]]:
    """Load each of the checkpoints into one layout; problems by checkpoint."""
    made = Layout(sizes, **changes)
    found = {}
    for path in saved:
        made.fill(num_steps=1)
        for held in held_buckets(made.optimizer.runtime):
            for row in held.rows.values():
                row.fill_(float("nan"))
        for param in made.model.parameters():
            param.data.fill_(float("nan"))
        made.model.calls.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            loaded = load(path, made.ddp, made.optimizer)
        problems = made.problems()
        if loaded.extra_of_rank(loaded.num_saved_ranks - 1)["own"] != loaded.num_saved_ranks - 1:
            problems.append("extra_of_rank")
        same = loaded.num_saved_ranks == made.groups.world.size
        own = 0 if loaded.num_saved_ranks == 1 else made.groups.world.rank if same else None
        if loaded.extra.get("own") != own:
            problems.append(f"own extra {loaded.extra}")
        steps = {child.num_steps for child in made.optimizer.runtime.children}
        if steps - {7}:
            problems.append(f"step counts {steps}")
        if made.optimizer.param_groups[0]["lr"] != 0.125:
            problems.append(f"lr {made.optimizer.param_groups[0]['lr']}")
        if loaded.extra["shared"] != (1, "a", None) or loaded.step != 7:
            problems.append(f"extra {loaded.extra}")
        made.optimizer.check()
        found[path] = problems
    made.groups.destroy()
    return found


def load_changed(saved: list[str], changes: dict[str, Any]) -> dict[str, list[str]]:
    """Load into a layout with other buckets or another order of registration."""
    return load_all(saved=saved, **changes)


def save_load_save(root: Path, sizes: dict[str, int]) -> tuple[list[str], dict[str, bool]]:
    """Files of a checkpoint and of one that was saved after loading it; equal bytes, by name."""
    made = Layout(sizes)
    made.fill(num_steps=3)
    rank = made.groups.world.rank
    first = save(root / "a", made.ddp, made.optimizer, extra={"rank": rank}, step=3)
    again = Layout(sizes)
    loaded = load(first, again.ddp, again.optimizer)
    second = save(root / "b", again.ddp, again.optimizer, extra=dict(loaded.extra), step=3)
    names = sorted(p.name for p in first.iterdir())
    equal = {n: (first / n).read_bytes() == (second / n).read_bytes() for n in names}
    for layout in (made, again):
        layout.groups.destroy()
    return [sorted(p.name for p in d.iterdir()) for d in (first, second)], equal
