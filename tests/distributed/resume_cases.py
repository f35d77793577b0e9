"""Stop and resume, settings at resume, refusals, saves in the background; on one rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import megatron_lw
from megatron_lw.dist_checkpointing import FileStorage, load, save, wait
from megatron_lw.errors import CheckpointError, StateError
from tests.distributed.cases import GRADS, build

SHAPES = {
    "a_weight": (24, 40),
    "b_weight": (40, 16),
    "c_norm": (40,),
    "d_table": (17, 8),
    "e_weight": (24, 24),
}
CONFIG: dict[str, Any] = {
    "optimizer": "muon",
    "lr": 0.02,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "bf16": True,
}
TAGS = {"d_table": {"embedding": True}}


class Training:
    """A small model, its optimizer and a scheduler on this rank."""

    def __init__(
        self,
        sizes: dict[str, int] | None = None,
        *,
        garbage: bool = False,
        ddp_config: dict[str, Any] | None = None,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        tags: dict[str, dict[str, Any]] | None = None,
        **config: Any,
    ) -> None:
        self.groups = megatron_lw.ParallelGroups.create(**(sizes or {}))
        self.shapes = shapes
        self.ddp, self.optimizer = build(
            shapes,
            CONFIG | config,
            dtype=torch.bfloat16,
            bucket_size=500,
            tags=TAGS if tags is None else tags,
            groups=self.groups,
            seed=99 if garbage else 0,
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.done = 0
        if garbage:
            for param in self.ddp.module.parameters():
                param.data.fill_(float("nan"))

    def train(self, steps: int) -> list[tuple[bool, float | None, int | None]]:
        """Steps on gradients that depend on the global step; every rank a share of 12 samples."""
        results = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for _ in range(steps):
                self.optimizer.zero_grad()
                ranks, rank = self.groups.dp.size, self.groups.dp.rank
                mine = range(rank, 12, ranks)
                for sample in mine:
                    grads = GRADS["power_law"](self.shapes, sample, self.done)
                    scaled = {name: grad / len(mine) for name, grad in grads.items()}
                    with self.ddp.no_sync():
                        self.ddp(scaled).backward()
                results.append(self.optimizer.step())
                self.scheduler.step()
                self.done += 1
        return results

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.ddp.module.named_parameters()}

    def masters(self) -> dict[str, torch.Tensor]:
        """fp32 masters of this rank's rows, by bucket."""
        return {
            publisher.bucket.label: publisher.master.row.clone()
            for publisher in self.optimizer.runtime.publishers
        }

    def save(self, path: Path, **options: Any) -> Path:
        return save(
            path,
            self.ddp,
            self.optimizer,
            self.scheduler,
            {"done": self.done},
            step=self.done,
            **options,
        )

    def load(self, path: Path, **options: Any) -> Any:
        loaded = load(path, self.ddp, self.optimizer, self.scheduler, **options)
        self.done = loaded.extra["done"]
        return loaded


def uninterrupted(root: Path) -> tuple[Any, ...]:
    """Two steps, a save, two steps."""
    training = Training()
    first = training.train(2)
    training.save(root)
    return first, training.train(2), training.weights(), training.masters()


def resumed(root: Path, sizes: dict[str, int]) -> tuple[Any, ...]:
    """A load into garbage, and two steps; weights right after the load come first."""
    training = Training(sizes, garbage=True)
    training.load(root)
    training.optimizer.check()
    loaded = training.weights()
    results = training.train(2)
    return loaded, results, training.weights(), training.masters()


def settings_at_resume(root: Path) -> dict[str, Any]:
    """What wins at the first step after a load."""
    training = Training()
    training.train(1)
    training.save(root)
    found = {}
    for name, options in {
        "saved": {},
        "current": {"keep_settings": True},
        "lr kept": {"keep_settings": ("lr",)},
    }.items():
        other = Training(garbage=True, lr=0.5, weight_decay=0.0, muon_momentum=0.5)
        load(root, other.ddp, other.optimizer, **options)
        group = next(g for g in other.optimizer.param_groups if g["optimizer"] == "muon")
        found[name] = (group["lr"], group["weight_decay"], group["momentum"])
    weights = Training(garbage=True)
    load(root, weights.ddp, weights.optimizer, weights_only=True)
    found["weights only"] = (
        [child.num_steps for child in weights.optimizer.runtime.children],
        all(
            torch.equal(a, b)
            for a, b in zip(weights.weights().values(), training.weights().values(), strict=True)
        ),
    )
    weights.optimizer.check()
    return found


def text_of(call: Any) -> str:
    try:
        call()
    except (CheckpointError, StateError, megatron_lw.errors.ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(root: Path) -> dict[str, str]:
    """What is refused, each leaving the optimizer as it was."""
    training = Training()
    training.train(1)
    training.save(root)

    def load_into(shapes: dict[str, tuple[int, ...]], **options: Any) -> str:
        other = Training(shapes=shapes, tags=options.pop("tags", None))
        before = other.masters()
        text = text_of(lambda: load(root, other.ddp, other.optimizer, **options))
        kept = all(torch.equal(row, before[name]) for name, row in other.masters().items())
        other.optimizer.settle()  # not broken
        return text if kept or not text else f"changed: {text}"

    renamed = {("z_norm" if n == "c_norm" else n): s for n, s in SHAPES.items()}
    wider = {n: ((48,) if n == "c_norm" else s) for n, s in SHAPES.items()}
    found = {
        "missing": load_into(renamed),
        "unknown": load_into({n: s for n, s in SHAPES.items() if n != "e_weight"}),
        "shape": load_into(wider),
        "left out": load_into(renamed, leave_out=("z_norm", "c_norm")),
        "nowhere": text_of(lambda: load(root / "x", training.ddp, training.optimizer)),
        "other model": text_of(lambda: save(root, Training().ddp, training.optimizer, step=1)),
        "step": text_of(lambda: training.save(root, keep_last=0)),
        "value": text_of(
            lambda: save(root, training.ddp, training.optimizer, extra={"f": [len]}, step=9)
        ),
    }
    return found


def changed_child(root: Path) -> tuple[list[str], dict[str, bool]]:
    """Save under Muon, load where one matrix is stepped by Adam, and the reverse."""
    training = Training()
    training.train(2)
    training.save(root)
    other = Training(tags=TAGS | {"a_weight": {"use_muon": False}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(root, other.ddp, other.optimizer)
    zero = {}
    for child in other.optimizer.runtime.children:
        for bucket in range(child.num_buckets):
            for key, row in child.state_rows(bucket).items():
                zero[f"{child.name} {bucket} {key}"] = bool((row == 0).all())
    other.train(1)
    return [str(w.message) for w in caught], zero


def changed_to_whole(root: Path) -> tuple[list[float], bool]:
    """Save under Adam, load where Adagrad steps the matrices: its sums start where they do."""
    training = Training(optimizer="adam")
    training.train(1)
    training.save(root)
    settings = (("initial_accumulator_value", 0.5),)
    other = Training(
        optimizer="whole", whole_optimizer="torch.optim:Adagrad", whole_settings=settings
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(root, other.ddp, other.optimizer)
    sums = [
        float(value)
        for child in other.optimizer.runtime.children
        for state in child.owned_states()
        if state.key.endswith("sum")
        for value in state.tensor.unique()
    ]
    before = other.weights()
    other.train(1)
    moved = any(not torch.equal(weight, before[n]) for n, weight in other.weights().items())
    return sums, moved


class FailingStorage(FileStorage):
    """Fails to create data files on one rank."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def create(self, path: Path) -> Any:
        if self._fails:
            raise OSError(28, "No space left on device (injected)")
        return super().create(path)


def failing_save(root: Path, background: bool) -> tuple[str, str, str]:
    """One rank's disk is full: every rank hears of it, and the checkpoint before stays."""
    training = Training()
    training.save(root)
    training.train(1)
    storage = FailingStorage(training.groups.world.rank == 1)
    text = text_of(lambda: training.save(root, storage=storage, background=background))
    later = text_of(lambda: wait(training.optimizer))
    again = text_of(lambda: wait(training.optimizer))
    training.done = 0
    training.load(root)
    return text, later, again


def background(root: Path) -> dict[str, Any]:
    """A save in the background holds what was at its call, whatever training does meanwhile."""
    training = Training()
    training.train(1)
    at_call = training.weights()
    first = training.save(root, background=True)
    training.train(1)
    moved = any(not torch.equal(a, at_call[n]) for n, a in training.weights().items())
    second = training.save(root, background=True)
    done = wait(training.optimizer)
    other = Training(garbage=True)
    other.load(first)
    loaded = other.weights()
    training.save(root / "again", background=True, keep_last=1)
    training.train(1)
    training.save(root / "again", background=True, keep_last=1)
    wait(training.optimizer)
    return {
        "done": done == second,
        "names": sorted(p.name for p in (root / "again").iterdir()),
        "moved": moved,
        "as at the call": all(torch.equal(a, at_call[n]) for n, a in loaded.items()),
    }


def different_copies(root: Path) -> str:
    """A tensor-parallel replica whose copies differ."""
    groups = megatron_lw.ParallelGroups.create(tensor=2)
    model = nn.Module()
    model.register_parameter("norm", nn.Parameter(torch.zeros(6)))
    ddp = megatron_lw.DistributedDataParallel(model, groups)
    optimizer = megatron_lw.get_megatron_optimizer(
        megatron_lw.OptimizerConfig(optimizer="adam", lr=0.1), [ddp]
    )
    optimizer.runtime.publishers[0].master.row[2] = float(groups.tp.rank)
    return text_of(lambda: save(root, ddp, optimizer, step=0))
