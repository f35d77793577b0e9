"""When a bucket's gradients are complete in backward, and when its weights are needed.

Both sides keep one rule: the collectives of a chunk are started in one fixed order on every rank,
whatever order its modules run in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from megatron_lw.distributed.buffers import BucketBuffer
from megatron_lw.distributed.collectives import all_gather_objects
from megatron_lw.distributed.gather import Publisher
from megatron_lw.distributed.group import Group
from megatron_lw.distributed.inert import Hook
from megatron_lw.distributed.reduce import start_reduce


class OverlappedReduce:
    """Starts the reduce of each bucket as soon as backward has finished its gradients.

    Buckets are started in one order, agreed on by all ranks: a bucket waits for those before it,
    and those of a chunk for all of the chunk after it, whose backward comes first. The order, and
    how often autograd delivers a gradient for a parameter in one backward (several times where
    activations are recomputed piece by piece), are learned in the first backward, in which nothing
    overlaps: buckets come in the order in which they were complete, those that were not on every
    rank, since a parameter got no gradient, last. A parameter that got none is awaited all the
    same; `flush` reduces what is left.

    Args:
        buckets: the chunk's buckets, in the order in which backward completes them.
        group: the ranks that share some of them, to agree on the order.
        after: that of the next chunk, whose backward comes before this one's.
    """

    def __init__(
        self,
        buckets: Sequence[BucketBuffer],
        group: Group,
        after: OverlappedReduce | None = None,
    ) -> None:
        self._buckets = tuple(buckets)
        self._group = group
        self._after = after
        self._before: OverlappedReduce | None = None
        if after is not None:
            after._before = self
        self._order: list[int] | None = None
        self._bucket_of = {name: b for b, bucket in enumerate(buckets) for name in bucket.names}
        self._expected = Counter(dict.fromkeys(self._bucket_of, 1))
        self._arrived: Counter[str] = Counter()
        self._completed_at = [0] * len(self._buckets)
        self.reset()

    @property
    def _all_started(self) -> bool:
        """Whether nothing of this chunk, or of one after it, has still to be started."""
        mine = self._order is not None and self._next == len(self._buckets)
        return mine and (self._after is None or self._after._all_started)

    def reset(self) -> None:
        """Forget what has arrived, before the backward of a new step."""
        self._arrived.clear()
        self._missing = [sum(self._expected[n] for n in bucket.names) for bucket in self._buckets]
        self._next = 0

    def arrived(self, name: str) -> None:
        """Note a gradient of the last micro-batch, and start the reduces that are due.

        Collective: reduce-scatters of complete buckets, in the agreed order.
        """
        self._arrived[name] += 1
        self._completed_at[self._bucket_of[name]] = self._arrived.total()
        if self._arrived[name] <= self._expected[name]:
            self._missing[self._bucket_of[name]] -= 1
        self._advance()

    def _advance(self) -> None:
        if self._order is None or (self._after is not None and not self._after._all_started):
            return
        while self._next < len(self._order):
            index = self._order[self._next]
            if self._missing[index] > 0:
                return
            start_reduce(self._buckets[index], async_op=True)
            self._next += 1
        if self._before is not None:
            self._before._advance()

    def flush(self) -> None:
        """Start the reduces that backward has not, in the agreed order, after the next chunk's.

        Collective: one reduce-scatter for each such bucket.
        """
        if self._after is not None:
            self._after.flush()
        order = range(len(self._buckets)) if self._order is None else self._order
        for index in list(order)[self._next :]:
            start_reduce(self._buckets[index], async_op=True)
        self._next = len(self._buckets)

    def finished(self) -> None:
        """Note that all buckets are reduced; learn from the first step that had a backward.

        Collective: an all-gather of small objects over the group, until the order is known.
        """
        if self._order is not None:
            return
        labels = [bucket.label for bucket in self._buckets]
        incomplete = {labels[self._bucket_of[n]] for n in self._bucket_of if not self._arrived[n]}
        times = dict(zip(labels, self._completed_at, strict=True))
        gathered = all_gather_objects((times, incomplete), self._group)
        late = {label for _, found in gathered for label in found}
        # Every rank decides alike, also one that holds nothing, or only what is late: a bucket has
        # the place that the first rank with it gave it.
        completed: dict[str, int] = {}
        for found, _ in reversed(gathered):
            completed |= found
        if late != set(completed):
            keys = {label: (label in late, completed[label], label) for label in labels}
            self._order = sorted(range(len(labels)), key=lambda index: keys[labels[index]])
            self._expected |= self._arrived


class OverlappedGather:
    """Makes every reader of a weight wait for the gather of its bucket, and of no other.

    A forward pre-hook on each module waits for the module's own parameters; parameters of modules
    that have no forward of their own (a `ParameterDict`) belong to the module around them. A weight
    that is used outside its module, say through `functional.linear(x, other.weight)`, is caught by
    `guard`, under which the wrapper runs the model as long as a gather is outstanding. There is no
    guard where a module is called past the wrapper, so that the first one waits for all gathers.

    Args:
        module: the model chunk.
        publishers: what gathers its buckets.

    Attributes:
        handles: module with a forward -> its forward pre-hook.
    """

    def __init__(self, module: nn.Module, publishers: Sequence[Publisher]) -> None:
        self._publishers = tuple(publishers)
        self._by_param: dict[int, Publisher] = {
            id(param): publisher
            for publisher in publishers
            for param in publisher.bucket.params.values()
        }
        self._guarded = False
        self.handles: dict[nn.Module, RemovableHandle] = {}
        for owner, params in _readers(module).items():
            needed = tuple(
                dict.fromkeys(self._by_param[id(p)] for p in params if id(p) in self._by_param)
            )
            self.handles[owner] = owner.register_forward_pre_hook(Hook(self._waiting(needed)))
        self._saving = module.register_state_dict_pre_hook(Hook(lambda *_: self.finish()))

    @property
    def outstanding(self) -> bool:
        """Whether any gather has not landed."""
        return any(publisher.outstanding for publisher in self._publishers)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """While any operation on a weight waits for its bucket first, as long as one has to.

        Without gradients all are waited for at once: torch has faster kernels for that case, which
        it takes only where no mode may look at their arguments.
        """
        if not torch.is_grad_enabled():
            self.finish()
        before, self._guarded = self._guarded, True
        try:
            with _WaitOnUse(self._by_param) if self.outstanding else nullcontext():
                yield
        finally:
            self._guarded = before

    def finish(self) -> None:
        """Wait for all gathers and land them."""
        for publisher in self._publishers:
            publisher.wait_and_land()

    def remove(self) -> None:
        """Take the hooks off the module."""
        for hook in (self._saving, *self.handles.values()):
            hook.remove()
        self.handles = {}

    def _waiting(self, needed: Sequence[Publisher]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for publisher in needed if self._guarded else self._publishers:
                if publisher.outstanding:
                    publisher.wait_and_land()

        return hook


class _WaitOnUse(TorchFunctionMode):
    """Waits for the bucket of every parameter that an operation is about to read."""

    def __init__(self, by_param: Mapping[int, Publisher]) -> None:
        super().__init__()
        self._by_param = by_param

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for value in _flat((*args, *kwargs.values())):
            if isinstance(value, torch.Tensor):
                publisher = self._by_param.get(id(value))
                if publisher is not None and publisher.outstanding:
                    publisher.wait_and_land()
        return func(*args, **kwargs)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _readers(module: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """Module with a forward -> its own parameters and those of modules below that have none."""
    readers: dict[nn.Module, list[nn.Parameter]] = {}

    def visit(current: nn.Module, reader: nn.Module) -> None:
        if type(current).forward is not nn.Module.forward:
            reader = current
        readers.setdefault(reader, []).extend(current.parameters(recurse=False))
        for child in current.children():
            visit(child, reader)

    visit(module, module)
    return readers
