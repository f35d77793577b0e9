"""Storage of one bucket, and the state that says what it holds.

Parameters are views into the bucket's weight storage, `main_grad` views into its gradient storage.
Both are allocated once; addresses never change. What a bucket's storage holds at any moment is an
enum; a move that would mix two contents raises instead of corrupting a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

import torch
from torch import nn

from megatron_lw.distributed.collectives import Handle, own_row
from megatron_lw.distributed.group import Group
from megatron_lw.errors import StateError
from megatron_lw.fp8.kinds import address, is_quantised, stored
from megatron_lw.fp8.weights import group_by_recipe
from megatron_lw.optimizer.describe import bind_main_grad
from megatron_lw.optimizer.layout import BucketLayout, Slot


class GradState(Enum):
    """What the gradient storage of a bucket holds."""

    EMPTY = "zeros"
    ACCUMULATING = "gradients of this rank"
    REDUCING = "gradients on their way to their rows"
    REDUCED = "this rank's row of reduced gradients"
    SPENT = "a row that a step has used"
    WEIGHTS = "weights that are being gathered"


class WeightState(Enum):
    """How the weight storage of a bucket relates to the masters."""

    PUBLISHED = "equal to the masters on every rank"
    GATHERING = "rows on their way to every rank"


class BucketBuffer:
    """Weights and gradients of one bucket on this rank.

    Attributes:
        layout: where each parameter lies.
        names: global names, in the order of `layout.params`.
        group: the reduce group; the bucket has one row for each of its ranks.
        divisor: what the summed gradient is divided by (the number of ranks averaged over).
        tied: whether it holds a copy of a weight that another pipeline stage shares.
        average_in_collective: whether the reduce averages over the group instead of summing.
        fp32_sums: where half-precision rows arrive that are summed in fp32; None: summed on the
        way.
        sequence_parallel: names of replicated parameters whose gradients are summed over tensor
            parallelism.
        grads: gradient storage, grad dtype, `[layout.numel]`.
        grad_state: what `grads` holds.
        quantised: the quantised weights, by recipe.
        weight_state: how the weights relate to the masters.
        handle: the reduce under way.
        failure: why that reduce should not have been started.
    """

    def __init__(
        self,
        layout: BucketLayout,
        names: tuple[str, ...],
        params: Mapping[str, nn.Parameter],
        group: Group,
        *,
        divisor: int,
        grad_dtype: torch.dtype,
        tied: bool = False,
        sequence_parallel: frozenset[str] = frozenset(),
        average_in_collective: bool = False,
        sum_in_fp32: bool = False,
    ) -> None:
        self.layout = layout
        self.names = names
        self.group = group
        self.divisor = divisor
        self.tied = tied
        self.sequence_parallel = sequence_parallel
        self.average_in_collective = average_in_collective
        self.grad_state = GradState.EMPTY
        self.weight_state = WeightState.PUBLISHED
        self.handle = Handle()
        self.failure: Exception | None = None
        self._params = {name: params[name] for name in names}
        device = self._params[names[0]].device
        self.grads = torch.zeros(layout.numel, dtype=grad_dtype, device=device)
        half = grad_dtype != torch.float32
        self.fp32_sums = torch.empty_like(self.grads) if sum_in_fp32 and half else None
        self._main_grads = {
            name: self.grads[start : start + param.numel()].view(param.shape)
            for (name, param), start in zip(self._params.items(), layout.offsets, strict=True)
        }
        self._after_gather = GradState.EMPTY
        self.weights = self._adopt_weights()
        self.quantised = group_by_recipe(self._params)
        self._addresses = [(n, p, address(n, p)) for n, p in self._params.items()]
        for name, param in self._params.items():
            bind_main_grad(param, self._main_grads[name])

    @property
    def params(self) -> Mapping[str, nn.Parameter]:
        """Global name -> parameter, in the order in which they lie."""
        return self._params

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"bucket of {self.names[0]!r}"

    @property
    def grad_row(self) -> torch.Tensor:
        """This rank's row of the gradient storage. Aliases `grads`; valid once REDUCED."""
        return own_row(self.grads, self.group)

    def check_bindings(self) -> None:
        """Check that every parameter is still the view that training writes and reads.

        Raises:
            StateError: a parameter left the storage, was frozen, or has a gradient elsewhere.
        """
        for name, param, place in self._addresses:
            if address(name, param) != place:
                raise StateError(
                    f"parameter {name!r} no longer lies in its bucket (it was moved, cast or "
                    "assigned to after the optimizer was built); copy values in place instead"
                )
            if param.grad is not None:
                raise StateError(
                    f"parameter {name!r} has a gradient in .grad, which is never stepped; "
                    "gradients belong in .main_grad"
                )
            if not param.requires_grad:
                raise StateError(
                    f"parameter {name!r} was frozen after the optimizer was built; build it anew"
                )

    def weight_tensors(self) -> list[torch.Tensor]:
        """The weights, in as few tensors as hold them; of quantised ones their bytes and scales."""
        if self.weights is not None:
            return [self.weights]
        plain = [param.detach() for param in self._params.values() if not is_quantised(param)]
        return plain + [tensor for group in self.quantised for tensor in group.tensors()]

    def initial_values(self) -> list[torch.Tensor]:
        """What quantised weights were before, where that is kept."""
        return [values for group in self.quantised for values in group.initial_values()]

    def stored(self) -> dict[str, torch.Tensor]:
        """Label -> each tensor of which a weight consists."""
        return {
            label: tensor
            for name, param in self._params.items()
            for label, tensor in stored(f"parameter {name!r}", param).items()
        }

    def row_slots(self) -> Iterator[tuple[str, Slot]]:
        """Name and slot of each parameter that has elements in this rank's row."""
        names = dict(zip(self.layout.params, self.names, strict=True))
        for slot in self.layout.slots[self.group.rank]:
            yield names[slot.param], slot

    def sequence_parallel_grads(self) -> list[torch.Tensor]:
        """Views of the parts of the gradient row that belong to sequence-parallel parameters."""
        row = self.grad_row
        return [
            row[slot.row_start : slot.row_start + slot.numel]
            for name, slot in self.row_slots()
            if name in self.sequence_parallel
        ]

    def add_gradient(self, name: str, grad: torch.Tensor | None) -> None:
        """Add a gradient that autograd produced; None if the layer has added it itself.

        Raises:
            StateError: the storage holds a reduced row, which a new gradient would spoil.
        """
        if self.grad_state not in (GradState.EMPTY, GradState.ACCUMULATING):
            raise StateError(
                f"a gradient of {name!r} arrived while its bucket holds {self.grad_state.value}; "
                "call zero_grad() before the next backward, and no_sync() around all backwards of "
                "a step but the last; with overlap_grad_reduce a parameter must get its gradient "
                "as often as in the first step (checkpoint with use_reentrant=False delivers one)"
            )
        self.grad_state = GradState.ACCUMULATING
        if grad is not None:
            grad = grad.detach()
            self._main_grads[name].add_(grad.to_dense() if grad.is_sparse else grad)

    def begin_reduce(self) -> None:
        """Move to REDUCING.

        Raises:
            StateError: the gradients are being reduced, are reduced, or are spent.
        """
        if self.grad_state not in (GradState.EMPTY, GradState.ACCUMULATING):
            raise StateError(
                f"{self.label} cannot be reduced: it holds {self.grad_state.value}; "
                "call zero_grad() before the next backward"
            )
        self.grad_state = GradState.REDUCING

    def end_reduce(self) -> None:
        """Wait for the reduce under way and move to REDUCED."""
        self.handle.wait()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        self._expect(GradState.REDUCING, "finish its reduce")
        self.grad_state = GradState.REDUCED

    def spend(self, *, discard: bool = False) -> None:
        """Mark the reduced row as used by a step.

        Args:
            discard: whatever the bucket holds; a reduce under way is waited for.

        Raises:
            StateError: it was used already, or is not reduced.
        """
        if self.grad_state is GradState.WEIGHTS and discard:
            self._after_gather = GradState.SPENT
            return
        if discard:
            self.handle.wait()
            self.failure = None
        else:
            self._expect(GradState.REDUCED, "be stepped")
        self.grad_state = GradState.SPENT

    def clear(self) -> None:
        """Zero the gradients, waiting for a reduce under way first; once they have, if lent."""
        self.handle.wait()
        self.failure = None
        if self.grad_state is GradState.WEIGHTS:
            self._after_gather = GradState.EMPTY
            return
        if self.grad_state is not GradState.EMPTY:
            self.grads.zero_()
            self.grad_state = GradState.EMPTY

    def lend(self) -> torch.Tensor | None:
        """Lend the gradient storage to a gather of weights; None while it holds gradients.

        Returns:
            uint8, all of it. Aliases `grads`; until `take_back`.
        """
        if self.grad_state not in (GradState.EMPTY, GradState.SPENT):
            return None
        self._after_gather, self.grad_state = self.grad_state, GradState.WEIGHTS
        return self.grads.view(torch.uint8)

    def take_back(self) -> None:
        """End the loan: zeros, where zeros were lent or asked for in the meantime."""
        if self.grad_state is GradState.WEIGHTS:
            self.grad_state = self._after_gather
            if self.grad_state is GradState.EMPTY:
                self.grads.zero_()

    def _expect(self, state: GradState, what: str) -> None:
        if self.grad_state is not state:
            raise StateError(
                f"{self.label} cannot {what}: it holds {self.grad_state.value}; "
                "call zero_grad() and backward() before each step()"
            )

    def _adopt_weights(self) -> torch.Tensor | None:
        """Move the parameters into contiguous storage of their own dtype.

        Returns:
            The weight storage with one row a rank, where all parameters have one dtype; None where
            they differ: such a bucket travels in a packed wire (see `gather.py`).
        """
        plain = [param for param in self._params.values() if not is_quantised(param)]
        dtypes = {param.dtype for param in plain}
        if len(dtypes) == 1 and len(plain) == len(self._params):
            like = self._params[self.names[0]]
            weights = torch.zeros(self.layout.numel, dtype=like.dtype, device=like.device)
            for param, start in zip(self._params.values(), self.layout.offsets, strict=True):
                _move(param, weights[start : start + param.numel()])
            return weights
        for dtype in dtypes:
            members = [param for param in plain if param.dtype == dtype]
            sizes = [p.numel() for p in members]
            flat = torch.empty(sum(sizes), dtype=dtype, device=members[0].device)
            for param, part in zip(members, flat.split(sizes), strict=True):
                _move(param, part)
        return None


def _move(param: nn.Parameter, flat: torch.Tensor) -> None:
    """Copy a parameter into `flat` and make it a view of it, keeping the object and its hooks."""
    view = flat.view(param.shape)
    view.copy_(param.detach())
    param.data = view
