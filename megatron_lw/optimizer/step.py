"""`LayerWiseDistributedOptimizer`: one step over all ranks. `step` is the table of contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_lw.config import OptimizerConfig
from megatron_lw.distributed.agreement import Kept, attempt
from megatron_lw.distributed.buffers import GradState
from megatron_lw.distributed.ddp import DistributedDataParallel
from megatron_lw.distributed.finalize import finalize_model_grads
from megatron_lw.errors import ConfigError, StateError
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer import stats
from megatron_lw.optimizer.check import check_optimizer
from megatron_lw.optimizer.guard import StepGuard
from megatron_lw.optimizer.loss_scaler import scaler_of
from megatron_lw.optimizer.param_groups import (
    check_settings,
    common_settings,
    exempt_from_clipping,
    explicit_group,
    fingerprint,
    make_param_groups,
    names_by_id,
)
from megatron_lw.optimizer.routing import ExplicitGroup
from megatron_lw.optimizer.routing_report import routing_report
from megatron_lw.optimizer.runtime import Runtime
from megatron_lw.optimizer.timings import Stopwatch
from megatron_lw.optimizer.weight_rules import WeightRule

Rebuild = Callable[[Sequence[ExplicitGroup]], Runtime]
StepResult = tuple[bool, float | None, int | None]


class LayerWiseDistributedOptimizer(torch.optim.Optimizer):
    """Steps fp32 masters that are spread over the data-parallel ranks, and publishes the weights.

    Built by `get_megatron_optimizer`. `param_groups` is a list of dictionaries as torch has it, the
    same on every rank and in the same order; schedulers write `lr` and `weight_decay` there.

    Args:
        config: settings.
        chunks: the wrapped model chunks.
        groups: every process group by name.
        rebuild: builds the runtime, with groups added by hand.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[DistributedDataParallel],
        groups: ParallelGroups,
        rebuild: Rebuild,
    ) -> None:
        self.config = config
        self.model_chunks = tuple(chunks)
        self.groups = groups
        self._rebuild = rebuild
        self._explicit: list[ExplicitGroup] = []
        self._runtime = rebuild(())
        self._watch = Stopwatch(self._runtime.device)
        self._guard = StepGuard(self.model_chunks, groups.control, self._watch)
        self.loss_scaler = scaler_of(config)
        self.saver: Any = None  # what saves beside training, see dist_checkpointing
        self.weight_rules: list[WeightRule] = []  # applied after the children in every step
        self._stepped = False
        self._built = False
        param_groups = make_param_groups(config, self._runtime)
        super().__init__(param_groups, common_settings(param_groups))
        self._built = True
        self._runtime.record_scales(self.param_groups, self.state)

    @property
    def runtime(self) -> Runtime:
        """Plans, buckets, masters and children on this rank, for inspection."""
        return self._runtime

    @torch.no_grad()
    def step(self, closure: None = None) -> StepResult:  # type: ignore[override]
        """Reduce the gradients, measure, agree, clip, step the children and publish the weights.

        Returns:
            Whether the weights were updated, the norm of the unscaled gradient before clipping
            (None if it is not finite), and the number of zero gradient elements (None unless
            `config.log_num_zeros_in_grad`).

        Collective: per bucket one reduce-scatter and one all-gather over its reduce group, where
        matrices are cut two all-to-alls over it, and with tensor parallelism two over the
        tensor-parallel group; one all-reduce over `groups.grad_stats` and two of an integer over
        `groups.control`. Every rank calls it.

        Raises:
            NonFiniteError: a gradient element is not finite and `on_nonfinite` is "raise"; on every
                rank, before anything is written.
            StateError: on every rank: the gradients were used already, or a stage failed on any
                rank; where something was written before, no further step is possible.
        """
        if closure is not None:
            raise ConfigError("step(closure) is not supported: compute gradients before step()")
        self._require_working()
        for chunk in self.model_chunks:
            chunk.require_sync()
        self._watch.reset()
        kept = Kept()
        with self._guard.stage("reduce"):
            self._reduce(kept)
        with self._guard.stage("stats"):
            measured = self._measure(kept)
        if measured.failed:
            self._guard.give_up(kept)
        inverse_scale = self.loss_scaler.inverse_scale  # of these gradients; it may grow below
        norm = measured.norm * inverse_scale
        if not self._accept(measured, norm):
            return False, norm if measured.finite else None, measured.zeros
        self._stepped = True
        with self._guard.stage("clip"), kept.keeping("stage 'clip'"):
            self._scale_gradients(measured, inverse_scale)
        self._step_children(kept)
        with self._guard.stage("agree"):
            self._guard.agree(kept.error, "the step failed half-way")
        with self._guard.stage("publish"):
            self._publish(kept)
        return True, norm, measured.zeros

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for `backward`; the step divides it out again."""
        return loss * self.loss_scaler.scale

    def get_loss_scale(self) -> torch.Tensor:
        """The loss scale: fp32 `[1]` on the model's device; 1 unless training is FP16."""
        return torch.full((1,), self.loss_scaler.scale, device=self._runtime.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradient storage of all chunks.

        `set_to_none` has no effect: there is no `param.grad`, gradients live in `main_grad`.
        """
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def settle(self) -> None:
        """Wait for gathers, and let the masters follow weights that were loaded, before a save.

        Raises:
            StateError: a step failed half-way, or the model has another optimizer by now.
        """
        self._require_working()
        for chunk in self.model_chunks:
            chunk.finish_param_sync()
            chunk.check_bindings()
            chunk.refresh_masters()

    @contextmanager
    def restoring(self, what: str, *, stepped: bool) -> Iterator[None]:
        """While a load overwrites masters and states; then the weights are published from them.

        Gradients are dropped. If it fails, the optimizer is broken until a load succeeds.

        Args:
            what: the checkpoint, for messages.
            stepped: whether steps go on from there, so that the plan is frozen.

        Collective: on leaving one all-gather a bucket over its reduce group, and an all-reduce of
        an integer over `groups.control`.
        """
        self._require_held()
        self._guard.break_down(f"loading {what} has not ended")
        try:
            yield
            self._guard.broken = None
            self._stepped = self._stepped or stepped
            for chunk in self.model_chunks:
                chunk.adopt_masters()
            self._publish(Kept())
            for chunk in self.model_chunks:
                chunk.finish_param_sync()
        except BaseException as error:
            self._guard.break_down(f"loading {what} failed: {type(error).__name__}: {error}")
            raise

    def reload_model_params(self) -> None:
        """Set the masters from the model's weights, after the weights were changed by hand."""
        for chunk in self.model_chunks:
            chunk.reload_masters()

    def timings(self) -> dict[str, float]:
        """Seconds of each stage of the last step: reduce, stats, clip, children, agree, publish."""
        return self._watch.timings()

    def check(self, *, collectives: bool = False) -> None:
        """Check over all ranks what must hold between two steps; see `check_optimizer`.

        Args:
            collectives: whether to compare how often each rank has made each collective, too.

        Collective: every rank calls it, between steps.

        Raises:
            InvariantError: on every rank, naming invariant, parameter, ranks and values.
        """
        check_optimizer(self, collectives=collectives)

    def routing_report(self) -> str:
        """A table of this rank's parameters: child, matrices, scale, owner, group, and why."""
        return routing_report(self._runtime, self.param_groups, self.groups)

    def plan_report(self) -> str:
        """Tables of who holds and owns what, one a domain."""
        return "\n\n".join(plan.describe() for plan in self._runtime.plans.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give parameters a group of their own, in a new plan; only before the first step.

        Args:
            param_group: `params` (parameters of the wrapped model, trainable by now) and settings
                among those of `ParamGroupOverride`; `lr` is another word for `max_lr`.

        Collective: as construction; every rank adds the same groups in the same order.

        Raises:
            StateError: a step has been taken.
            ConfigError: a parameter is not of the wrapped model, is frozen, or is in two groups;
                a setting is unknown.
        """
        if not self._built:
            super().add_param_group(param_group)
            return
        self._require_working()
        added = attempt(lambda: self._explicit_group(param_group), self.groups.control)
        self._runtime = self._rebuild([*self._explicit, added])
        self._explicit.append(added)
        self.param_groups[:] = make_param_groups(self.config, self._runtime, self.param_groups)
        self._runtime.record_scales(self.param_groups, self.state)

    def state_dict(self) -> dict[str, Any]:
        """Refused: the state lies in rows on all ranks, not in one dictionary."""
        raise StateError("state_dict() of one rank holds no usable state; save sharded checkpoints")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, see `state_dict`."""
        raise StateError("load_state_dict() cannot restore sharded state; load sharded checkpoints")

    def _reduce(self, kept: Kept) -> None:
        """Check what may differ between ranks, reduce, and mark the gradients as used."""
        with kept.keeping("before the step"):
            self._require_ready()
        with kept.keeping("stage 'reduce'"):
            finalize_model_grads(self.model_chunks, pg_collection=self.groups)
            for chunk in self.model_chunks:
                chunk.spend_gradients()

    def _measure(self, kept: Kept) -> stats.GradStats:
        return stats.measure(
            self._runtime.counted,
            self.groups.grad_stats,
            self._runtime.device,
            count_zeros=self.config.log_num_zeros_in_grad,
            fingerprint=fingerprint(self.param_groups),
            exempt=exempt_from_clipping(self.param_groups),
            kept=kept,
        )

    def _accept(self, measured: stats.GradStats, norm: float) -> bool:
        """Whether to update; the same answer on every rank, as the statistics are the same.

        In FP16 a gradient that is not finite skips the step, and the loss scale is adjusted.
        """
        skips = self.config.fp16 or self.config.on_nonfinite == "skip"
        stats.require_usable(measured, skips=skips)
        self.loss_scaler.update(not measured.finite)
        return measured.finite and norm <= self.config.grad_norm_skip_threshold

    def _scale_gradients(self, measured: stats.GradStats, inverse_scale: float) -> None:
        """Undo the loss scale, and clip."""
        stats.scale_gradients(
            self._runtime.buckets,
            self._runtime.counted,
            measured,
            max_norm=self.config.clip_grad,
            by_total=self.config.clip_grad_by == "total",
            exempt=exempt_from_clipping(self.param_groups),
            inverse_scale=inverse_scale,
        )

    def _step_children(self, kept: Kept) -> None:
        """Step all children; a failure is kept, as other ranks wait for the children after it."""
        with kept.keeping("recording scales"):
            self._runtime.record_scales(self.param_groups, self.state)
        groups = {group["name"]: group for group in self.param_groups}
        for child in self._runtime.children:
            with self._guard.stage(child.name), kept.keeping(f"stage {child.name!r}"):
                child.step(groups)
        for rule in self.weight_rules:
            with self._guard.stage(rule.name):
                rule.apply(kept)
        self._runtime.require_finite(kept)

    def _publish(self, kept: Kept) -> None:
        """Publish all chunks, also after one that fails, as other ranks wait; then agree."""
        for number, chunk in enumerate(self.model_chunks):
            chunk.masters_newer = True
            with kept.keeping(f"chunk {number}"):
                chunk.publish()
        self._guard.agree(kept.error, "the weights are not published")

    def _explicit_group(self, param_group: Mapping[str, Any]) -> ExplicitGroup:
        if self._stepped:
            raise StateError(
                "add_param_group after the first step: the plan is frozen by then; add groups "
                "before it, or build the optimizer anew"
            )
        if any(b.grad_state is not GradState.EMPTY for b in self._runtime.buckets):
            raise StateError("add_param_group would lose gradients; call zero_grad() before it")
        return explicit_group(param_group, names_by_id(self.model_chunks), self._explicit)

    def _require_working(self) -> None:
        """Check, before any collective, that this optimizer holds the model and can step.

        Raises:
            StateError: a step failed half-way, another optimizer or wrapper has taken the model, or
                the model was changed under it.
        """
        self._guard.require_whole()
        self._require_held()

    def _require_held(self) -> None:
        held = [bucket for chunk in self.model_chunks for bucket in chunk.buckets]
        if set(held) != set(self._runtime.buckets):
            raise StateError(
                "the model was wrapped again, or another optimizer was built for it: only the "
                "newest can step"
            )

    def _require_ready(self) -> None:
        """Check what may differ between ranks.

        Raises:
            StateError: the model was changed under the optimizer, or gradients were used already.
            ConfigError: a setting of a parameter group has a value that is not allowed.
        """
        for chunk in self.model_chunks:
            chunk.check_bindings()
            chunk.require_unspent()
            chunk.refresh_masters()
        check_settings(self.param_groups)

    def __deepcopy__(self, memo: object) -> LayerWiseDistributedOptimizer:
        """Refused: a copy would step the same storage."""
        raise StateError("copy.deepcopy of the optimizer: build another for a copy of the model")

    def __reduce__(self) -> tuple[Any, ...]:
        """Refused: state lies in rows on all ranks."""
        raise StateError("pickling the optimizer: save sharded checkpoints")
