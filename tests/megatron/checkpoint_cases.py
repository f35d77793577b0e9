"""Checkpoints through Megatron's own code, and what they hold; imported on ranks only.

Without dropout: the random numbers of `cuda_on_cpu` are the CPU's, which loading data uses, too, so
that not even Megatron's own optimizer draws the same ones after a load.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.serialization import load_plain_tensors
from megatron.core.optimizer import DistributedOptimizer
from megatron.training import checkpointing, get_args, training
from megatron.training.models import dist_utils

from tests.megatron.runs import Run, differ
from tests.megatron.training import BASE, train

Tensors = dict[str, torch.Tensor]
_STATE = "optimizer.state."


def resume(directory: str, flags: list[str], beside: list[str]) -> dict[str, Any]:
    """Six steps; the same saved after three; the same from there; what two ways of saving wrote."""
    plain = train(flags)
    whole = train([*flags, *_save(directory)])
    rest = train([*flags, *_load(directory)], prepare=_garbage)
    train([*flags, *beside, *_save(f"{directory}-beside")])
    return {
        "plain": plain,
        "whole": whole,
        "rest": rest,
        "differ": differ(_saved(directory), _saved(f"{directory}-beside")),
        "saved": len(_of_state(_saved(directory))),
    }


def weights_alone(directory: str, flags: list[str], how: str) -> tuple[Run, list[Any]]:
    """Without the optimizer: steps from the saved weights, and what the first step started from."""
    found: list[Any] = []

    def around(model: Any, optimizer: Any, step: Any) -> Any:
        if not found:
            optimizer.check()
            rows = [row.numel() for row in _rows(optimizer)]
            found.extend((rows, [float(row.abs().sum()) for row in _rows(optimizer)]))
            found.extend(_masters_are_weights(optimizer))
        return step()

    return train([*flags, *_load(directory), how], prepare=_garbage, around=around), found


def other_schedule(directory: str, flags: list[str]) -> tuple[Run, set[tuple[float, float]]]:
    """With the present learning rate in place of the saved one: the rates of the first step."""
    found: set[tuple[float, float]] = set()

    def around(model: Any, optimizer: Any, step: Any) -> Any:
        found.update((group["lr"], group["max_lr"]) for group in optimizer.param_groups)
        return step()

    present = ["--lr", "2e-3", "--override-opt_param-scheduler"]
    run = train([*flags, *_load(directory), *present], prepare=_garbage, around=around)
    return run, found


def other_layouts(
    directory: str, flags: list[str], before: list[str], after: list[str], ddp: bool
) -> tuple[Run, Run, list[str], int]:
    """Saved in one layout, taken up in another: losses of both, and what differs in the state."""
    whole = train([*flags, *before, *_save(directory)])
    rest, again = _go_on(directory, [*flags, *after], ddp=ddp)
    one = _of_state(_saved(directory))
    return whole, rest, differ(one, _of_state(again)), len(one)


def go_on(directory: str, flags: list[str]) -> tuple[Run, list[str]]:
    """Take up what other ranks saved."""
    rest, again = _go_on(directory, flags)
    return rest, differ(_of_state(_saved(directory)), _of_state(again))


def exchange(
    directory: str,
    flags: list[str],
    without: list[str],
    ours_first: bool,
    laid_out: bool,
) -> tuple[Run, Run, list[str], int]:
    """One optimizer saves and goes on, the other loads and goes on; what differs."""
    base = [flag for flag in BASE if flag not in without]
    with _without_transformer_engine(), _layout(laid_out) as wrap:
        whole = train(
            [*flags, *_save(directory)], base=base, ours=ours_first, prepare=wrap, probe=_scale
        )
    with _without_transformer_engine(), _layout(laid_out) as wrap, warnings.catch_warnings():
        warnings.filterwarnings("error", message="parameter groups that were not saved")
        rest, again = _go_on(directory, flags, base=base, ours=not ours_first, wrap=wrap)
    is_fp32 = "--bf16" not in flags and "--fp16" not in flags
    one, two = (_of_state(each, is_fp32=is_fp32) for each in (_saved(directory), again))
    return whole, rest, differ(one, two), len(one)


def other_child(directory: str, flags: list[str]) -> tuple[Run, list[str]]:
    """Adam's state, loaded for Muon: the masters, and moments where Adam goes on."""
    adam = ["--optimizer", "adam", "--dist-ckpt-optim-fully-reshardable"]
    train([*flags, *adam, *_save(directory)], ours=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train([*flags, *_load(directory)], prepare=_garbage)
    return run, [str(w.message) for w in caught if w.category.__name__ == "CheckpointWarning"]


def in_buckets(directory: str, flags: list[str]) -> str:
    """A DistributedOptimizer's own format, which is refused."""
    train([*flags, "--optimizer", "adam", *_save(directory)], ours=False)
    try:
        train([*flags, "--optimizer", "adam", *_load(directory)])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _save(directory: str) -> list[str]:
    return ["--save", directory, "--save-interval", "3"]


def _load(directory: str) -> list[str]:
    return ["--load", directory, "--ckpt-step", "3"]


def _garbage(chunk: Any) -> None:
    """Weights that a load must not leave anywhere."""
    for param in chunk.parameters():
        param.data.fill_(7.0)


def _saved(directory: str) -> Tensors:
    """Every tensor of a checkpoint, whole, by key."""
    found = load_plain_tensors(f"{directory}/iter_0000003")
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def _of_state(tensors: Tensors, *, is_fp32: bool = False) -> Tensors:
    """Masters and states, by keys without a chain's prefix and with one name for masters.

    Megatron has no masters in FP32: weights in their place.
    """
    found = {}
    for key, value in tensors.items():
        if _STATE in key:
            state, _, name = key.partition(_STATE)[2].partition(".")
            found[f"{'fp32_param' if state == 'param' else state}.{name}"] = value
    if is_fp32:
        found = {key: value for key, value in found.items() if not key.startswith("fp32_param")}
        found |= {key: value for key, value in tensors.items() if "optimizer" not in key}
    return found


def _go_on(
    directory: str,
    flags: Sequence[str],
    *,
    base: Sequence[str] = BASE,
    ours: bool = True,
    ddp: bool = True,
    wrap: Callable[[Any], None] | None = None,
) -> tuple[Run, Tensors]:
    """Load what was saved after three steps; the steps from there, and the same saved again.

    `extra` of the run is the loss scale that was loaded.
    """
    again = f"{directory}-again"

    scales: list[float] = []

    def around(model: Any, optimizer: Any, step: Any) -> Any:
        args = get_args()
        if args.save is None:
            scales.append(_scale(model, optimizer))
            args.save = again
            checkpointing.save_checkpoint(3, model, optimizer, None, 0)
        return step()

    def prepare(chunk: Any) -> None:
        _garbage(chunk)
        if wrap is not None:
            wrap(chunk)

    loading = [*flags, *_load(directory)]
    rest = train(loading, base=base, prepare=prepare, ours=ours, ddp=ddp, around=around)
    rest.extra = scales
    return rest, _saved(again)


def _scale(model: Any, optimizer: Any) -> float:
    return float(optimizer.get_loss_scale())


def _rows(optimizer: Any) -> list[torch.Tensor]:
    """State rows of this rank, masters aside."""
    children = optimizer.runtime.children
    return [row for c in children for b in range(c.num_buckets) for row in c.state_rows(b).values()]


def _masters_are_weights(optimizer: Any) -> Iterator[bool]:
    for publisher in optimizer.runtime.publishers:
        master = publisher.master
        for name, slot in master.bucket.row_slots():
            weight = master.bucket.params[name].detach().view(-1)
            part = weight[slot.param_start : slot.param_start + slot.numel].float()
            row = master.row[slot.row_start : slot.row_start + slot.numel]
            yield bool(torch.equal(part, row)) and not bool((row == 7.0).any())


@contextmanager
def _layout(laid_out: bool) -> Iterator[Callable[[Any], None]]:
    """Megatron's layout for layer-wise optimizers, which its newer way to build a model leaves out.

    Models come through `wrap_model_chunks_with_ddp` then, as in its `get_model`. Yields what is to
    be called with each chunk before it is wrapped.
    """
    theirs = dist_utils._ddp_wrap

    def wrap(model: Any, random_init: bool, ddp_config: Any, *unused: Any, **groups: Any) -> Any:
        return training.wrap_model_chunks_with_ddp(
            model,
            dist_utils.get_model_config(model[0]),
            ddp_config,
            use_layer_wise_distributed_optimizer=True,
            pg_collection=groups["pg_collection"],
        )

    def prepare(chunk: Any) -> None:
        if laid_out:
            dist_utils._ddp_wrap = wrap

    try:
        yield prepare
    finally:
        dist_utils._ddp_wrap = theirs


@contextmanager
def _without_transformer_engine() -> Iterator[None]:
    """Let Megatron's DistributedOptimizer load before its first step.

    With torch's AdamW it has no state by then and fails, it looks for a step count in what it has
    loaded, which is saved elsewhere, and it gives all parameters one tensor to count steps in.
    """
    theirs: Any = DistributedOptimizer
    names = ("sharded_state_dict", "_set_main_param_and_optimizer_states", "load_state_dict")
    describe, put, load = (getattr(theirs, name) for name in names)

    def described(self: Any, model: Any, is_loading: bool = False, **options: Any) -> Any:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return describe(self, model, is_loading, **options)

    def filled(self: Any, param: Any, tensors: Any) -> Any:
        return put(self, param, {"step": None, **tensors})

    def loaded(self: Any, state: Any) -> None:
        load(self, state)
        for of_param in self.optimizer.state.values():
            of_param["step"] = of_param["step"].clone()

    for name, ours in zip(names, (described, filled, loaded), strict=True):
        setattr(theirs, name, ours)
    try:
        yield
    finally:
        for name, before in zip(names, (describe, put, load), strict=True):
            setattr(theirs, name, before)
