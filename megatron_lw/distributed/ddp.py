"""The model wrapper: gradients land in bucket storage; buckets are reduced and gathered from here.

Wrapping describes nothing yet and moves nothing: `get_megatron_optimizer` decides which parameter
lies where and then calls `attach`. Until then the module behaves as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_lw.ddp_config import DDPConfig
from megatron_lw.distributed import reduce
from megatron_lw.distributed.agreement import Kept
from megatron_lw.distributed.buffers import BucketBuffer, GradState
from megatron_lw.distributed.gather import Publisher, return_storage
from megatron_lw.distributed.hooks import OverlappedGather, OverlappedReduce
from megatron_lw.distributed.inert import Hook, weakly
from megatron_lw.distributed.replicate import replicate
from megatron_lw.errors import ConfigError, StateError
from megatron_lw.fp8.quantise import History
from megatron_lw.groups import ParallelGroups
from megatron_lw.optimizer.describe import Holder, take_gradient, take_hold
from megatron_lw.optimizer.names import NameMap


class DistributedDataParallel(nn.Module):
    """A module whose gradients are reduced into rows and whose weights are gathered from rows.

    Args:
        module: the model, or one pipeline chunk of it.
        groups: every process group by name.
        config: buckets and dtypes.
        names: local to global parameter names; needed where chunks or stages repeat names.

    Attributes:
        finalized: whether `finalize_model_grads` has finished the gradients of this step.
        masters_newer: whether the masters have changed since the weights were published.
        broken: why the masters must not be published; None unless a step failed half-way.
        kept: what failed while the gradients of this step were finished.

    Gradients live in one place: `param.main_grad`, a view of the bucket's storage, valid on every
    rank until the reduce and only in this rank's row after it. `param.grad` is None after backward.

    Raises:
        ConfigError: `module` is already wrapped.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ParallelGroups,
        config: DDPConfig | None = None,
        *,
        names: NameMap | None = None,
    ) -> None:
        # By name: a subclass may have further bases, whose constructors take other arguments.
        nn.Module.__init__(self)
        if isinstance(module, DistributedDataParallel):
            raise ConfigError("the module is already wrapped in DistributedDataParallel")
        self.module = module
        self.groups = groups
        self.ddp_config = config or DDPConfig()
        self.names = names or NameMap()
        self._buckets: tuple[BucketBuffer, ...] = ()
        self._publishers: tuple[Publisher, ...] = ()
        self._hooks: list[RemovableHandle] = []
        self._overlapped_reduce: OverlappedReduce | None = None
        self._overlapped_gather: OverlappedGather | None = None
        self._sync = True
        self._started = self._reduced = self.finalized = False
        self.kept = Kept()
        self._attached = self._stale = False
        self._holder = Holder()
        self.masters_newer = False
        self._history: History = "advance"
        self.broken: str | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; weights still being gathered are waited for as they are read."""
        with self._overlapped_gather.guard() if self._overlapped_gather else nullcontext():
            return self.module(*args, **kwargs)

    @property
    def buckets(self) -> tuple[BucketBuffer, ...]:
        """The bucket storage, in the order in which backward completes the buckets."""
        return self._buckets

    @property
    def publishers(self) -> tuple[Publisher, ...]:
        """What gathers each bucket, in the same order."""
        return self._publishers

    def named_global_parameters(self, chunk: int = 0) -> Iterator[tuple[str, nn.Parameter]]:
        """Global name and parameter, frozen ones included."""
        for name, param in self.module.named_parameters():
            yield self.names.to_global(chunk, name), param

    def attach(
        self, buckets: Sequence[BucketBuffer], after: DistributedDataParallel | None = None
    ) -> None:
        """Take the buckets that hold this module's parameters, in place of earlier ones.

        Parameters that another wrapper or an earlier optimizer held are taken over; that one can
        step no more. Gradients in `param.grad` are dropped.

        Args:
            buckets: storage in backward order.
            after: the next chunk, attached already, whose backward comes before this one's.
        """
        self._release()
        self._buckets = tuple(buckets)
        self._holder = Holder(weakly(self._release))
        if self.ddp_config.overlap_grad_reduce:
            self._overlapped_reduce = OverlappedReduce(
                self._buckets,
                self.groups.replicas,
                None if after is None else after._overlapped_reduce,
            )
        for bucket in self._buckets:
            take_hold(bucket.params.values(), self._holder)
            for name, param in bucket.params.items():
                hook = Hook(self._land_gradient(bucket, name))
                self._hooks.append(param.register_post_accumulate_grad_hook(hook))
        managed = self._managed()
        for module in self.module.modules():
            if module is self.module or any(id(p) in managed for p in module.parameters(False)):
                ahead, behind = Hook(weakly(self._before_load)), Hook(weakly(self._after_load))
                self._hooks.append(module.register_load_state_dict_pre_hook(ahead))
                self._hooks.append(module.register_load_state_dict_post_hook(behind))

    def _release(self) -> None:
        """Let go of the module: no hook of ours stays on it."""
        self._holder.release = None
        for hook in self._hooks:
            hook.remove()
        if self._overlapped_gather is not None:
            self._overlapped_gather.remove()
        self._hooks, self._buckets, self._publishers = [], (), ()
        self._overlapped_reduce = self._overlapped_gather = None
        self._forget_reduces()
        self._attached = self._stale = False

    def _managed(self) -> set[int]:
        return {id(param) for bucket in self._buckets for param in bucket.params.values()}

    def attach_publishers(self, publishers: Sequence[Publisher]) -> None:
        """Take what gathers the weights of this module's buckets, in the same order."""
        self._publishers = tuple(publishers)
        self._attached = True
        if self.ddp_config.overlap_param_gather:
            self._overlapped_gather = OverlappedGather(self.module, self._publishers)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward only accumulates inside; for all micro-batches of a step but the last."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def zero_grad_buffer(self) -> None:
        """Zero all gradient storage; needed before the backward of each step."""
        for bucket in self._buckets:
            bucket.clear()
        self._forget_reduces()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradient storage, as `zero_grad_buffer`."""
        self.zero_grad_buffer()
        self.module.zero_grad(set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's, of `parameters` too; gathers are waited for, as the caller may read."""
        self.finish_param_sync()
        return super().named_parameters(*args, **kwargs)

    def check_bindings(self) -> None:
        """Check, before anything is communicated, that training acts on what the model holds.

        Raises:
            StateError: a trainable parameter is not in a bucket, left it, was frozen, or has its
                own gradient.
        """
        self._require_optimizer()
        managed = self._managed()
        for name, param in self.module.named_parameters():
            if param.requires_grad and id(param) not in managed:
                raise StateError(
                    f"parameter {name!r} is trainable but not in the optimizer (it was replaced or "
                    "unfrozen after it was built); use add_param_group before the first step, or "
                    "build the optimizer anew"
                )
        for bucket in self._buckets:
            bucket.check_bindings()

    def require_unspent(self) -> None:
        """Raise StateError if the gradients were used by a step already."""
        for bucket in self._buckets:
            if bucket.grad_state is GradState.SPENT:
                raise StateError(
                    f"{bucket.label} holds {bucket.grad_state.value}; call zero_grad() and "
                    "backward() before each step()"
                )

    def start_grad_sync(self) -> None:
        """Start the reduces that backward has not; a second call in one step does nothing.

        Collective: one reduce-scatter a bucket over its reduce group, on every rank.
        """
        self.require_sync()
        if self._started:
            return
        return_storage(self._publishers)
        if self._overlapped_reduce is None:
            for bucket in self._buckets:
                reduce.start_reduce(bucket, async_op=True)
        else:
            self._overlapped_reduce.flush()
        self._started = True

    def finish_grad_sync(self, divisor: float | None = None, *, keep: bool = False) -> None:
        """Reduce the gradients, if they are not; a second call in one step does nothing.

        Args:
            divisor: what gradients summed over data parallelism are divided by, instead of by
                its size; a bucket that is averaged over more ranks is divided by those as well.
            keep: leave a failure of this rank in `kept` instead of raising it.

        Collective: see `start_grad_sync`.

        Raises:
            StateError: called within `no_sync`, or the module has no optimizer yet.
            LayerWiseError: a bucket failed; again at every call of the step.
        """
        self.start_grad_sync()
        if not self._reduced:
            for bucket in self._buckets:
                further = bucket.divisor / self.groups.dp.size
                with self.kept.keeping(bucket.label):
                    reduce.finish_reduce(bucket, None if divisor is None else divisor * further)
            if self._overlapped_reduce is not None:
                self._overlapped_reduce.finished()
            self._reduced = True
        if not keep:
            self.kept.raise_kept()

    def require_sync(self) -> None:
        """Raise StateError within `no_sync`, or if the module has no optimizer yet."""
        self._require_optimizer()
        if not self._sync:
            raise StateError("the gradients cannot be reduced within no_sync(): leave it first")

    def spend_gradients(self, *, discard: bool = False) -> None:
        """Mark the gradients as used: a further step needs new ones, and new reduces.

        Args:
            discard: also if they are not reduced; for a step that failed before it wrote anything.
        """
        for bucket in self._buckets:
            bucket.spend(discard=discard)
        self._forget_reduces()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply what the gradient storage holds: whole buckets before the reduce, rows after."""
        return_storage(self._publishers)
        for bucket in self._buckets:
            bucket.handle.wait()
            reduced = bucket.grad_state in (GradState.REDUCED, GradState.SPENT)
            (bucket.grad_row if reduced else bucket.grads).mul_(factor)

    def publish(self) -> None:
        """Gather the weights from the masters, the bucket that forward needs first at the head.

        With `overlap_param_gather` it returns at once, and whoever reads a weight waits for it.

        Collective: one all-gather a bucket over its reduce group, on every rank.

        Raises:
            StateError: a step failed half-way, so that the masters are not one state.
        """
        if self.broken is not None:
            raise StateError(f"the masters cannot be published: {self.broken}")
        history: History = self._history if self.masters_newer else "keep"
        self.masters_newer, self._history = False, "advance"
        kept = Kept()
        for publisher in reversed(self._publishers):
            with kept.keeping(publisher.bucket.label):
                publisher.start(history)
        if self._overlapped_gather is None:
            self.finish_param_sync()
        kept.raise_kept()

    def start_param_sync(self) -> None:
        """Publish the masters if they are newer than the weights; otherwise nothing is to be done.

        A step publishes by itself, so that this may be called at any moment and changes nothing.

        Raises:
            StateError: the module has no optimizer yet, or a step failed half-way.
        """
        self._require_optimizer()
        if self.masters_newer or self.broken is not None:
            self.publish()

    def finish_param_sync(self) -> None:
        """Wait for all gathers; needed before weights are read outside of forward."""
        for publisher in reversed(self._publishers):
            publisher.wait_and_land()

    def refresh_masters(self) -> None:
        """Let the masters follow weights that were loaded since they were last used."""
        if self._stale:
            self.reload_masters()

    def reload_masters(self) -> None:
        """Set the masters from the weights, after weights were loaded into the module."""
        self.finish_param_sync()
        for publisher in self._publishers:
            publisher.master.seed()
        self._stale = False

    def adopt_masters(self) -> None:
        """Take masters and histories, which were loaded, as newest; to be published next."""
        self.broken = None
        self._stale = False
        self.masters_newer, self._history = True, "replace"
        self.zero_grad_buffer()

    def broadcast_params(self) -> None:
        """Make replicas equal: every parameter and buffer as the first rank of its group has it.

        Between steps: after an overlapped backward a rank may have started reduces that others
        have not, and would meet them.

        Collective: see `replicate`.
        """
        self.finish_param_sync()
        replicate(self.module, self._buckets, self.groups)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state dict, without a prefix of ours."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights into the wrapped module; the masters follow them."""
        self.finish_param_sync()
        return self.module.load_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> DistributedDataParallel:
        """Refused: a copy would share no storage with the optimizer."""
        raise StateError("copy.deepcopy of the wrapper: copy its .module, and wrap the copy")

    def __reduce__(self) -> tuple[Any, ...]:
        """Refused: process groups cannot be pickled."""
        raise StateError("pickling the wrapper: save its state_dict() or its .module")

    def _forget_reduces(self) -> None:
        self._started = self._reduced = self.finalized = False
        self.kept = Kept()
        if self._overlapped_reduce is not None:
            self._overlapped_reduce.reset()

    def _before_load(self, *_: Any) -> None:
        self.finish_param_sync()

    def _after_load(self, *_: Any) -> None:
        self._stale = True

    def _require_optimizer(self) -> None:
        if not self._attached:
            raise StateError(
                "the wrapped module has no optimizer yet: call get_megatron_optimizer first"
            )

    def _land_gradient(self, bucket: BucketBuffer, name: str) -> Callable[[torch.Tensor], None]:
        """The hook that moves a gradient into its bucket when autograd has finished it.

        It holds us weakly: autograd keeps the hook where Python's garbage collector cannot see it,
        so that a strong reference would keep model, buckets and process groups alive for ever.
        """
        wrapper, storage = weakref.ref(self), weakref.ref(bucket)

        def hook(param: torch.Tensor) -> None:
            ddp, place = wrapper(), storage()
            if ddp is None or place is None or not isinstance(param, nn.Parameter):
                return
            place.add_gradient(name, take_gradient(param))
            if ddp._sync and ddp._overlapped_reduce is not None:
                ddp._overlapped_reduce.arrived(name)

        return hook
