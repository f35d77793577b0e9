"""Checkpoints at awkward moments and after failures, on one rank."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import megatron_lw
from megatron_lw.dist_checkpointing import CheckpointWarning, FileStorage, load, save, wait
from megatron_lw.errors import LayerWiseError
from tests.distributed.cases import integer_grads
from tests.distributed.resume_cases import Training
from tests.late_gather import LateGather
from tests.regressions.given import MUON, Built, backward, build, everything, same

SHAPES = {"a_weight": (24, 40), "b_weight": (40, 24), "c_bias": (37,), "d_weight": (6, 5)}


def text_of(call: Any) -> str:
    try:
        call()
    except LayerWiseError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make(value: float = 0.5, **options: Any) -> Built:
    options = {"config": MUON, "ddp_config": {"bucket_size": 500}} | options
    return build({n: torch.full(s, value) for n, s in SHAPES.items()}, **options)


def train(built: Built, first: int, stop: int) -> None:
    for step in range(first, stop):
        backward(built, integer_grads(SHAPES, built[0].groups.dp.rank, step))
        built[1].step()


def flip(path: Path) -> None:
    """Flip the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def damaged(root: Path) -> dict[str, Any]:
    """The file of rank 1, which only rank 1 reads, is damaged; then it is mended."""
    built = make()
    train(built, 0, 2)
    directory = save(root, *built, step=2)
    saved = everything(built)
    train(built, 2, 3)
    [path] = directory.glob("rank00001-*")
    rank = built[0].groups.world.rank
    megatron_lw.distributed.collectives.all_gather_objects(None, built[0].groups.control)
    if rank == 0:
        flip(path)
    found = {"load": text_of(lambda: load(root, *built))}
    found["step"] = text_of(built[1].step)
    found["save"] = text_of(lambda: save(root, *built, step=3))
    found["publish"] = text_of(built[0].start_param_sync)
    if rank == 0:
        flip(path)
    load(root, *built)
    found["same"] = same(saved, everything(built))
    built[1].check(collectives=True)
    return found


def broken_by_a_step(root: Path) -> dict[str, Any]:
    """A child fails on rank 1; a load repairs the optimizer, which goes on as if never broken."""
    built, straight = make(), make()
    train(built, 0, 2)
    train(straight, 0, 3)
    save(root, *built, step=2)
    child = built[1].runtime.children[0]
    if built[0].groups.world.rank == 1:
        child.step = lambda groups: 1 / 0
    found = {"step": text_of(lambda: train(built, 2, 3))}
    found["save"] = text_of(lambda: save(root, *built, step=3))
    found["no such"] = text_of(lambda: load(root / "x", *built))
    found["again"] = text_of(built[1].step)
    vars(child).pop("step", None)
    load(root, *built)
    train(built, 2, 3)
    found["same"] = same(everything(straight), everything(built))
    return found


def moments(root: Path) -> dict[str, bool]:
    """Saves and loads while gathers and gradients are under way."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 500}
    plain, built = make(), make(ddp_config=overlap)
    train(plain, 0, 2)
    found = {}
    train(built, 0, 2)
    found["under way"] = bool(LateGather.delay(built[0].publishers))
    save(root, *built, step=2)
    expected = everything(plain)
    found["saved while gathering"] = same(expected, everything(built))

    other = make(value=float("nan"), ddp_config=overlap)
    load(root, *other)
    found["loaded"] = same(expected, everything(other))
    train(other, 2, 3)
    found["under way again"] = bool(LateGather.delay(other[0].publishers))
    load(root, *other)
    found["loaded while gathering"] = same(expected, everything(other))

    train(plain, 2, 3)
    grads = integer_grads(SHAPES, built[0].groups.dp.rank, 2)
    backward(built, grads)
    save(root, *built, step=3)
    built[1].step()
    found["saved before the step"] = same(everything(plain), everything(built))

    backward(other, grads)  # dropped by the load
    load(root / "step-0000000002", *other)
    other[1].zero_grad()
    with other[0].no_sync():
        other[0]({n: g / 2 for n, g in grads.items()}).backward()
        save(root, *other, step=4)
    other[0]({n: g / 2 for n, g in grads.items()}).backward()
    other[1].step()
    found["saved within no_sync"] = same(everything(plain), everything(other))

    other[1].zero_grad()
    with other[0].no_sync():
        other[0](grads).backward()
        load(root / "step-0000000004", *other)
    found["loaded within no_sync"] = same(expected, everything(other))
    train(other, 2, 3)
    found["and on"] = same(everything(plain), everything(other))
    other[1].check(collectives=True)
    return found


def loss_scale(root: Path) -> dict[str, Any]:
    """The scale, its counts and the skips in a row of an FP16 run."""
    config = {**MUON, "fp16": True, "initial_loss_scale": 2.0**10, "loss_scale_window": 3}
    built, other = make(config=config), make(config=config)
    for step in range(4):
        grads = integer_grads(SHAPES, built[0].groups.dp.rank, step)
        if step in (2, 3) and built[0].groups.dp.rank == 1:
            grads["c_bias"][3] = float("inf")
        built[1].zero_grad()
        built[1].scale_loss(built[0](grads)).backward()
        built[1].step()
    save(root, *built, step=4)
    load(root, *other)
    states = [optimizer.loss_scaler.state() for _, optimizer in (built, other)]
    plain = make()
    kept = make(config=config)
    load(root, *kept, leave_out=["loss_scaler"])
    return {
        "states": states,
        "skips": other[1].loss_scaler.consecutive_skips,
        "other kind": text_of(lambda: load(root, *plain)),
        "left out": kept[1].loss_scaler.scale,
    }


def disks(root: Path) -> dict[str, str]:
    """Ranks that do not see the same directory."""
    built = make()
    own = root / f"disk{built[0].groups.world.rank}"
    own.mkdir()
    found = {"save": text_of(lambda: save(own / "run", *built, step=1))}
    shared = [root / "shared0", root / "shared1"]
    for number, path in enumerate(shared):
        save(path, *built, step=number + 1)
    found["steps"] = text_of(lambda: load(shared[built[0].groups.world.rank], *built))
    train(built, 0, 1)
    first = [shared[0] / "step-0000000001", save(root / "trained", *built, step=1)]
    found["contents"] = text_of(lambda: load(first[built[0].groups.world.rank], *built))
    built[1].settle()  # not broken
    return found


def on_one_rank(root: Path) -> dict[str, str]:
    """Arguments that are wrong on rank 1 alone."""
    built = make()
    save(root, *built, step=1)
    bad = built[0].groups.world.rank == 1
    scheduler = torch.optim.lr_scheduler.ExponentialLR(built[1], 0.9)
    return {
        "keep_last": text_of(lambda: save(root, *built, step=2, keep_last=0 if bad else 1)),
        "step": text_of(lambda: save(root, *built, step=-1 if bad else 2)),
        "other step": text_of(lambda: save(root, *built, step=3 if bad else 2)),
        "value": text_of(lambda: save(root, *built, extra={"x": len if bad else 1}, step=2)),
        "leave_out": text_of(lambda: load(root, *built, leave_out="a" if bad else ())),
        "keep": text_of(lambda: load(root, *built, keep_settings=["x"] if bad else ())),
        "scheduler": text_of(lambda: load(root, *built, scheduler if bad else None)),
        "fine": text_of(lambda: save(root, *built, step=2)),
    }


def save_own_extra(root: Path) -> None:
    built = make()
    train(built, 0, 1)
    save(root, *built, extra={"own": built[0].groups.world.rank, "same": 1}, step=1)


def warnings_as_errors(root: Path) -> tuple[str, bool, list[str], dict[str, Any]]:
    """On the first rank a warning is an error, as in the tests here; the others hear of it."""
    built = make()
    before = everything(built)
    text = text_of(lambda: load(root, *built))
    kept = same(before, everything(built))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        loaded = load(root, *built)
    own = [loaded.extra_of_rank(rank)["own"] for rank in range(loaded.num_saved_ranks)]
    return text, kept, [str(w.message) for w in caught], {"extra": loaded.extra, "own": own}


class Gate(FileStorage):
    """Lets no file be made before it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def create(self, path: Path) -> Any:
        self.opened.wait()
        return super().create(path)


def mutated_meanwhile(root: Path) -> dict[str, Any]:
    """Everything that was saved is overwritten while nothing of it has been written yet."""
    built = make()
    built[0].module.register_buffer("calls", torch.arange(4))
    train(built, 0, 1)
    extra = {"numbers": torch.arange(5.0), "list": [1, {"a": 2}]}
    given = copy.deepcopy(extra)
    before, gate = everything(built), Gate()
    save(root, *built, extra=extra, step=1, background=True, storage=gate)
    unchanged = repr(extra) == repr(given)
    train(built, 1, 2)
    built[0].module.calls.zero_()
    extra["numbers"].zero_()
    extra["list"][1]["a"] = 3
    built[1].param_groups[0]["lr"] = 9.0
    gate.opened.set()
    directory = wait(built[1])
    other = make()
    other[0].module.register_buffer("calls", torch.zeros(4, dtype=torch.int64))
    loaded = load(directory, *other)
    return {
        "unchanged": unchanged,
        "same": same(before, everything(other)),
        "extra": repr(dict(loaded.extra)) == repr(dict(sorted(given.items()))),
        "buffer": other[0].module.calls.tolist(),
        "lr": other[1].param_groups[0]["lr"],
    }


def load_waits_for_the_save(root: Path) -> int:
    """The newest checkpoint is the one that is being saved when `load` is called."""
    built = make()
    save(root, *built, step=1)
    gate = Gate()
    save(root, *built, step=2, background=True, storage=gate, keep_last=1)
    join = built[1].saver.join

    def joined() -> None:
        gate.opened.set()
        join()

    built[1].saver.join = joined
    return load(root, *built).step


def different_buffers(root: Path) -> tuple[str, str, list[int]]:
    built = make()
    rank = built[0].groups.world.rank
    built[0].module.register_buffer("running_mean", torch.full((3,), rank))
    text = text_of(lambda: save(root, *built, step=1))
    save(root, *built, step=1, leave_out=["running_*"])
    missing = text_of(lambda: load(root, *built))
    load(root, *built, leave_out=["running_*"])
    return text, missing, built[0].module.get_buffer("running_mean").tolist()


def disturbed_scheduler(root: Path) -> dict[str, Any]:
    """A scheduler that refuses its state on rank 1: broken everywhere, until the next load."""
    training = Training()
    training.train(1)
    training.save(root)
    load_state_dict = training.scheduler.load_state_dict

    def refuse(state: dict[str, Any]) -> None:
        if training.groups.world.rank == 1:
            raise ValueError("not mine")
        load_state_dict(state)

    training.scheduler.load_state_dict = refuse
    found = {"load": text_of(lambda: training.load(root))}
    found["step"] = text_of(training.optimizer.step)
    training.scheduler.load_state_dict = load_state_dict
    training.load(root)
    found["goes on"] = training.train(1)[0][0]
    return found
