"""Gather and scatter of a sequence that is divided over the ranks of a group, for autograd.

What flows backward depends on who holds what:

| function | forward | backward |
|---|---|---|
| `gather_sequence` | parts to the whole, on every rank | summed over the ranks, to the owner |
| `scatter_sequence` | copies of the whole to own parts | parts to the whole, on every rank |

The loss of a run is the sum of the ranks' losses. So after `gather_sequence` each rank's loss is
its own share: a rank that repeats what another computes counts it twice. The backward of
`scatter_sequence` leaves the whole gradient on every rank; it must not be summed over the group
again.

**Collectives in backward.** Whether they happen is decided by what is alike on every rank, never
by one rank's `requires_grad`: in grad mode the result of `gather_sequence` requires a gradient
everywhere, also on a rank whose own part is frozen. What the caller owes in return: every rank
calls `backward` through the result, and through several results in the same order. A rank that
calls none, or whose loss does not depend on the result, leaves the others waiting until the
group's timeout. A rank without a loss of its own adds `whole[:0].sum()`, which is exactly 0
whatever the values are.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from megatron_lw.distributed.collectives import all_gather, all_gather_objects, reduce_scatter
from megatron_lw.distributed.group import Group
from megatron_lw.errors import ConfigError


class _Move(Enum):
    """What is done with a sequence; each one's backward is its conjugate."""

    GATHER = "parts to the whole; each rank uses the whole for a loss of its own"
    SUM = "the whole, different on each rank, to the sum's part"
    SPLIT = "the whole, alike on each rank, to the own part"
    JOIN = "parts to the whole, of which each rank holds a copy"


_CONJUGATE = {
    _Move.GATHER: _Move.SUM,
    _Move.SUM: _Move.GATHER,
    _Move.SPLIT: _Move.JOIN,
    _Move.JOIN: _Move.SPLIT,
}


def gather_sequence(
    x: torch.Tensor, dim: int, group: Group, *, differentiable: bool = True, check: bool = False
) -> torch.Tensor:
    """Put together a sequence whose equal parts lie on the ranks of a group.

    Args:
        x: this rank's part: any real dtype and strides, one shape on every rank, `x.shape[dim]` its
            length. Integers are gathered without a gradient.
        dim: the dimension that is divided; negative counts from the end.
        group: the ranks that hold the parts, in their order along the sequence.
        differentiable: False detaches the result, on every rank alike: no collective in backward.
        check: agree first that shape, dtype, grad mode and arguments are alike on every rank. It
            costs a collective more; without it, a difference is a hang or an error of the backend.

    Returns:
        The whole sequence, contiguous, `group.size` times as long, on every rank. In grad mode it
        requires a gradient on every rank (see the module), and the gradient of `x` is that of the
        sum of all ranks' losses, summed in the dtype of `x`.

    Raises:
        ConfigError: `dim` is not a dimension of `x`; or `check` found a difference, on every rank.

    Collective: all-gather over `group`; in backward one reduce-scatter (sum) for a result, however
    often it was used.
    """
    if check:
        _agree(x, dim, group, differentiable=differentiable)
    at = _dimension(x, dim, "gather_sequence")
    return _move(x, _Move.GATHER, at, group) if differentiable else _join(x.detach(), at, group)


def scatter_sequence(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Take this rank's part of a sequence of which every rank holds the same copy.

    Args:
        x: the whole sequence, any real dtype; alike on every rank, `requires_grad` included.
        dim: the dimension to divide; negative counts from the end.
        group: the ranks that take the parts, in their order along the sequence.

    Returns:
        The part, a contiguous copy, of length `x.shape[dim] / group.size`.

    Raises:
        ConfigError: `dim` is not a dimension of `x`, or the length has no `group.size` equal parts.

    Collective: none; in backward an all-gather over `group`.
    """
    at = _dimension(x, dim, "scatter_sequence")
    if x.shape[at] % group.size:
        raise ConfigError(
            f"scatter_sequence: dim={dim} has length {x.shape[at]}, which has no {group.size} "
            f"equal parts (group {group.name!r}); use pad_sequence_to(x, {dim}, {group.size}) "
            "first and trim_sequence after the gather"
        )
    return _move(x, _Move.SPLIT, at, group)


def pad_sequence_to(x: torch.Tensor, dim: int, multiple: int, value: float = 0.0) -> torch.Tensor:
    """Lengthen a sequence at its end to a multiple, so that it divides into equal parts.

    Padding cannot reach what `trim_sequence` keeps through operations that treat each position by
    itself; attention needs a mask. A function that is not finite at `value` (a division by a row's
    norm, at 0) would make its gradient NaN: choose another value there.

    Args:
        x: any shape and dtype.
        dim: the sequence; negative counts from the end.
        multiple: what the length becomes a multiple of, 1 or more.
        value: what the padding holds; no gradient flows into it.

    Raises:
        ConfigError: `dim` is not a dimension of `x`, or `multiple` is below 1.
    """
    at = _dimension(x, dim, "pad_sequence_to")
    if multiple < 1:
        raise ConfigError(f"pad_sequence_to: multiple={multiple}; give 1 or more")
    missing = -x.shape[at] % multiple
    if not missing:
        return x
    shape = [*x.shape[:at], missing, *x.shape[at + 1 :]]
    return torch.cat((x, x.new_full(shape, value)), at)


def trim_sequence(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Cut a padded sequence back to its first `length` positions; the rest gets gradient 0.

    Raises:
        ConfigError: `dim` is not a dimension of `x`, or `length` is not within it.
    """
    at = _dimension(x, dim, "trim_sequence")
    if not 0 <= length <= x.shape[at]:
        raise ConfigError(f"trim_sequence: length={length}; give 0 to {x.shape[at]}")
    return x.narrow(at, 0, length)


class CachedGather:
    """The gather of one tensor, made at first use and handed out attached to the graph.

    For a tensor that several heads read whole: one all-gather, and, in one backward over the sum of
    the losses, one reduce-scatter. An object serves the one tensor that it was made for; make a new
    one for the next, and drop it when done, as it keeps the whole alive.

    Whether `whole` communicates depends on what the program did, never on values: every rank asks
    for it alike. It gathers anew where the last result does not fit any more: it was made without
    grad mode and is now wanted with; `x` or the result has since been written in place (not seen:
    a write through `.data`); `requires_grad` of `x` was changed.
    """

    __slots__ = ("_attached", "_dim", "_facts", "_group", "_whole", "_x")

    def __init__(self, x: torch.Tensor, dim: int, group: Group) -> None:
        """Remember what to gather; nothing is sent yet.

        Args:
            x: this rank's part, as for `gather_sequence`.
            dim: the dimension that is divided; negative counts from the end.
            group: the ranks that hold the parts.

        Raises:
            ConfigError: `dim` is not a dimension of `x`.
        """
        self._x = x
        self._dim = _dimension(x, dim, "CachedGather")
        self._group = group
        self._whole: torch.Tensor | None = None
        self._facts: tuple[object, ...] = ()
        self._attached = False

    def whole(self) -> torch.Tensor:
        """The whole sequence: in grad mode one and the same attached tensor, else a detached one.

        Collective: all-gather over the group where nothing fitting is at hand, else none.
        """
        grad_mode = torch.is_grad_enabled()
        whole = self._whole
        if whole is None or self._facts != self._facts_of(whole) or grad_mode > self._attached:
            whole = gather_sequence(self._x, self._dim, self._group)
            self._whole, self._facts = whole, self._facts_of(whole)
            self._attached = grad_mode
        return whole if grad_mode else whole.detach()

    def _facts_of(self, whole: torch.Tensor) -> tuple[object, ...]:
        """What must still be as it was when `whole` was gathered."""
        return self._x.requires_grad, _version(self._x), _version(whole)


def _version(x: torch.Tensor) -> int:
    """How often a tensor was written in place; tensors made in inference mode do not count it."""
    return 0 if x.is_inference() else x._version


class _Autograd(torch.autograd.Function):
    """One move in the graph. It saves no tensor, so it may be gone through backward repeatedly."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, move: _Move, dim: int, group: Group
    ) -> torch.Tensor:
        """Do the move; `anchor` only puts the result into the graph."""
        del anchor
        ctx.move, ctx.dim, ctx.group = move, dim, group
        if move is _Move.SPLIT:
            return _own_part(x, dim, group)
        return _sum_part(x, dim, group) if move is _Move.SUM else _join(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Do the conjugate move, itself differentiable."""
        return _move(grads[0], _CONJUGATE[ctx.move], ctx.dim, ctx.group), None, None, None, None


_apply: Callable[..., torch.Tensor] = _Autograd.apply


def _move(x: torch.Tensor, move: _Move, dim: int, group: Group) -> torch.Tensor:
    """Run a move under autograd.

    The parts of one sequence may differ in `requires_grad`: an anchor that requires a gradient puts
    the backward's collective into the graph of every rank. Copies of the whole do not differ.
    """
    anchor = None
    parts_may_differ = move in (_Move.GATHER, _Move.SUM)
    if parts_may_differ and x.is_floating_point() and not x.requires_grad:
        anchor = torch.empty(0, requires_grad=True)
    return _apply(x, anchor, move, dim, group)


def _join(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """All parts, one after another along `dim`; as bytes, since backends refuse some dtypes."""
    shape = (*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])
    whole = torch.empty(shape, dtype=x.dtype, device=x.device)
    parts = _parts(whole, dim, group)
    # Parts that lie one after another arrive in place. The whole is returned and no view of
    # something else, since autograd forbids to write into a view that a Function made.
    arrived = parts if parts.is_contiguous() else parts.new_empty(parts.shape)
    row = x.contiguous().flatten()
    all_gather(arrived.flatten().view(torch.uint8), row.view(torch.uint8), group)
    if arrived is not parts:
        parts.copy_(arrived)
    return whole


def _sum_part(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The own part of the sum over the ranks; `x` is read only."""
    parts = _parts(x, dim, group).contiguous()
    part = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    reduce_scatter(part.flatten(), parts.flatten(), group)
    return part


def _own_part(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """The own part, copied, so that it does not keep the whole alive."""
    part = _parts(x, dim, group).select(0, group.rank)
    return part.clone(memory_format=torch.contiguous_format)


def _parts(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """View a whole sequence as `[group.size, ...]`, one part for each rank."""
    shape = (*x.shape[:dim], group.size, x.shape[dim] // group.size, *x.shape[dim + 1 :])
    return x.view(shape).movedim(dim, 0)


def _dimension(x: torch.Tensor, dim: int, function: str) -> int:
    """`dim` counted from the front."""
    if not -x.ndim <= dim < x.ndim:
        raise ConfigError(
            f"{function}: dim={dim} is not a dimension of a tensor of shape {tuple(x.shape)}"
        )
    return dim % x.ndim


def _agree(x: torch.Tensor, dim: int, group: Group, *, differentiable: bool) -> None:
    """Raise on every rank when the ranks' calls do not fit together.

    Collective: all-gather of pickled objects over `group`.
    """
    facts = {
        "dim": dim,
        "differentiable": differentiable,
        "grad mode": torch.is_grad_enabled(),
        "dtype": str(x.dtype),
        "number of dimensions": x.ndim,
        "shape": tuple(x.shape),
    }
    ranks = all_gather_objects(facts, group)
    where = f"on ranks {group.ranks} of group {group.name!r}"
    differing = [name for name in facts if any(rank[name] != facts[name] for rank in ranks)]
    if differing == ["shape"] and -x.ndim <= dim < x.ndim:
        lengths = [rank["shape"][dim] for rank in ranks]
        if len(set(lengths)) > 1:
            raise ConfigError(
                f"gather_sequence: dim={dim} has lengths {lengths} {where}, which must be equal; "
                "pad the whole with pad_sequence_to before it is divided, or each part to the "
                "longest, and cut the padding out after the gather"
            )
    if differing:
        name = differing[0]
        found = [rank[name] for rank in ranks]
        raise ConfigError(f"gather_sequence: {name} is {found} {where}; make it alike on all")
