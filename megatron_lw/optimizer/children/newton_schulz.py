"""Newton-Schulz orthogonalisation of matrices, one at a time or batches of equal shape.

`NewtonSchulz` replaces X = U S V^T by a matrix close to U V^T, with products of matrices only
(Jordan et al. 2024, "Muon"). A call has three stages: `_load` normalises into scratch memory,
`_iterate` multiplies, and the result lands in the caller's tensor; where possible the last product
is written there at once.

The arithmetic for one matrix is that of `torch.optim.Muon`, product for product and in the same
memory layout, so that the bits agree. The layout matters, since a kernel may sum in another order
over a transposed operand: a tall matrix is read as it lies in the first step, and from then on it
is held transposed, as [short, long] and row-major. Of symmetric products of large matrices a part
is mirrored instead of multiplied, which in bf16 changes no bit either (`symmetric`). With
`iteration="gram"` long matrices take fewer products, see `gram_space`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_lw.errors import ConfigError
from megatron_lw.optimizer.children.coefficients import CoefficientSet
from megatron_lw.optimizer.children.gram_space import is_long, iterate_in_gram_space
from megatron_lw.optimizer.children.ns_checks import (
    check_equal,
    check_input,
    check_out,
    check_pairs,
)
from megatron_lw.optimizer.children.ns_workspace import Scratch, carve, max_batch
from megatron_lw.optimizer.children.symmetric import gram_of, multiply_add, strips_of
from megatron_lw.optimizer.workspace import BATCH_BELOW

Iteration = Literal["standard", "gram"]

STRIPS_FROM = 512
"""Short side from which symmetric products are mirrored: at 256 bf16 loses 2 %, fp32 gains 6 %."""
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF_DTYPES, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """The iteration with its settings; it holds no memory, so one instance serves every shape.

    Each matrix is divided by its own Frobenius norm first, in a way that neither overflows nor
    underflows: the result does not depend on the scale of the input, so there is no epsilon. A zero
    matrix gives exactly zero, one that holds an infinity or a NaN gives NaN.

    Attributes:
        coefficients: the polynomial of each step, from `resolve_coefficients`.
        dtype: of every product and of the result.
        iteration: "standard", or "gram": matrices at least twice as long as wide are iterated in
            Gram space, all others as usual.

    Raises:
        ConfigError: `dtype` is not bfloat16, float16, float32 or float64, or has too few digits for
            the coefficients or for the iteration.
    """

    coefficients: CoefficientSet
    dtype: torch.dtype = field(default=torch.bfloat16, kw_only=True)
    iteration: Iteration = field(default="standard", kw_only=True)

    def __post_init__(self) -> None:
        """Check the dtype."""
        if self.dtype not in _DTYPES:
            known = ", ".join(str(dtype) for dtype in _DTYPES)
            raise ConfigError(f"dtype = {self.dtype} is not supported; use one of {known}")
        if self.coefficients.needs_float32 and self.dtype in _HALF_DTYPES:
            raise ConfigError(
                f"dtype = {self.dtype} makes these coefficients (cans) diverge; use float32, or "
                "polar_express, which is as fast and has a margin for rounding"
            )
        if self.iteration not in get_args(Iteration):
            raise ConfigError(f"iteration = {self.iteration!r} is unknown; use standard or gram")
        if self.iteration == "gram" and self.dtype is torch.bfloat16:
            raise ConfigError(
                "iteration = 'gram' is not safe in torch.bfloat16: rounding is magnified from step "
                "to step, and singular values of 3.5 were measured; use float16 or float32, or "
                "iteration='standard'"
            )

    @property
    def input_dtype(self) -> torch.dtype:
        """What inputs and results are kept in outside: float16 has too small a range for both."""
        return torch.float32 if self.dtype is torch.float16 else self.dtype

    @torch.no_grad()
    def __call__(
        self, x: Tensor, out: Tensor | None = None, workspace: Tensor | None = None
    ) -> Tensor:
        """Orthogonalise one matrix, or each matrix of a batch.

        With `out` and `workspace` given, nothing of the size of x is allocated, except one copy
        where the compute dtype has a smaller range than x (float16, or x in float64).

        Args:
            x: [rows, columns] or [batch, rows, columns], any floating dtype and strides, elements
                within the range of the compute dtype (of float32 for float16); not written.
            out: takes the result: the shape of x, any floating dtype and strides; may be x itself.
                Best in the compute dtype and contiguous.
            workspace: 1-D, contiguous, in the compute dtype, `workspace_numel` elements or more.

        Returns:
            `out`, or else a new tensor in the compute dtype, which is a transposed view where
            rows > columns.

        Raises:
            ConfigError: an argument of another shape, dtype, device or size.
        """
        check_input("x", x, 2, 3)
        if out is None:
            short, long = sorted(x.shape[-2:])
            out = torch.empty((*x.shape[:-2], short, long), dtype=self.dtype, device=x.device)
            out = out.mT if x.size(-2) > x.size(-1) else out
        check_out("out", out, x)
        if x.numel() == 0:
            return out
        scratch = carve(workspace, x.shape, self.dtype, x.device)
        result = self._iterate(self._load(x, scratch.start(x)), scratch, out)
        if result is not out:
            _copy_each(out, result)
        return out

    @torch.no_grad()
    def orthogonalise(
        self, matrices: Sequence[Tensor], outs: Sequence[Tensor], workspace: Tensor | None = None
    ) -> None:
        """Orthogonalise matrices of equal shape.

        Those with a short side below `BATCH_BELOW` are gathered into batches as large as the
        workspace allows; larger ones keep a CPU busy one by one and are not copied.

        How many are grouped changes no bit on the CPU builds measured (oneDNN, MKL) for short sides
        above 16, in bfloat16 for all and otherwise for matrices of a multiple of 64 bytes.

        Args:
            matrices: each [rows, columns], all of one shape and dtype; not written.
            outs: take the results: one for each matrix, of its shape, any floating dtype and
                strides; may be the matrix itself, and share no memory with another one.
            workspace: see `__call__`. Enough for one matrix at least; by default it is allocated
                for all.

        Raises:
            ConfigError: as for `__call__`; also unequal shapes, dtypes or numbers of tensors.
        """
        check_pairs(matrices, outs)
        check_equal([(x, x.shape) for x in matrices], "shape")
        if not matrices or matrices[0].numel() == 0:
            return
        if min(matrices[0].shape) < BATCH_BELOW:
            self._in_batches(matrices, outs, workspace)
            return
        for x, out in zip(matrices, outs, strict=True):
            self(x, out=out, workspace=workspace)

    @torch.no_grad()
    def orthogonalise_padded(
        self, matrices: Sequence[Tensor], outs: Sequence[Tensor], workspace: Tensor | None = None
    ) -> None:
        """Orthogonalise matrices of one short side in batches, each padded with zeros.

        Tall ones are turned first. Columns of zeros stay zero and change nothing else, so in exact
        arithmetic the results are those of `orthogonalise`; the bits differ.

        Args:
            matrices: each [rows, columns], all of one dtype and min(rows, columns); not written.
            outs: see `orthogonalise`.
            workspace: see `__call__`. Enough for one matrix of the longest at least.

        Raises:
            ConfigError: as for `orthogonalise`; also unequal short sides.
        """
        check_pairs(matrices, outs)
        check_equal([(x, min(x.shape)) for x in matrices], "short side")
        if not matrices or min(matrices[0].shape) == 0:
            return
        short, longest = min(matrices[0].shape), max(max(x.shape) for x in matrices)
        size = len(matrices)
        if workspace is not None:
            size = min(size, max_batch(short, longest, workspace.numel()))
        for first in range(0, len(matrices), size):
            self._padded_batch(
                [_lying(x) for x in matrices[first : first + size]],
                [_lying(out) for out in outs[first : first + size]],
                workspace,
            )

    def _padded_batch(
        self, lying: Sequence[Tensor], outs: Sequence[Tensor], workspace: Tensor | None
    ) -> None:
        shape = (len(lying), lying[0].size(0), max(x.size(1) for x in lying))
        scratch = carve(workspace, shape, self.dtype, lying[0].device)
        start = scratch.wide[0]
        dtype = _normalising_dtype(lying[0].dtype, self.dtype)
        padded = start if dtype is self.dtype else torch.empty_like(start, dtype=dtype)
        padded.zero_()
        parts = [part[:, : x.size(1)] for part, x in zip(padded, lying, strict=True)]
        torch._foreach_copy_(parts, list(lying))
        result = self._iterate(self._load(padded, start), scratch, None)
        parts = [part[:, : out.size(1)] for part, out in zip(result, outs, strict=True)]
        torch._foreach_copy_(list(outs), parts)

    def _in_batches(
        self, matrices: Sequence[Tensor], outs: Sequence[Tensor], workspace: Tensor | None
    ) -> None:
        """Gather, iterate and scatter; also a single matrix, so that the kernels are the same."""
        rows, columns = matrices[0].shape
        size = len(matrices)
        if workspace is not None:
            size = min(size, max_batch(rows, columns, workspace.numel()))
        for first in range(0, len(matrices), size):
            part = list(matrices[first : first + size])
            scratch = carve(workspace, (len(part), rows, columns), self.dtype, part[0].device)
            start = scratch.start(part[0])
            if _normalising_dtype(part[0].dtype, self.dtype) is self.dtype:
                torch._foreach_copy_(start.unbind(0), part)
                self._load(start, start)
            else:
                self._load(torch.stack(part), start)
            result = self._iterate(start, scratch, None)
            torch._foreach_copy_(list(outs[first : first + size]), result.unbind(0))

    def _load(self, x: Tensor, start: Tensor) -> Tensor:
        """Write x, normalised, into `start`, which may be x, and return `start`."""
        dtype = _normalising_dtype(x.dtype, self.dtype)
        if dtype is not self.dtype:
            copied = x.to(dtype, copy=True)
            _normalise(copied, copied)
            return start.copy_(copied)
        _normalise(x if x.dtype is dtype else start.copy_(x), start)
        return start

    def _iterate(self, start: Tensor, scratch: Scratch, out: Tensor | None) -> Tensor:
        """Apply the polynomials; return `out` if the last product went there, else scratch."""
        tall = start.size(-2) > start.size(-1)
        x, gram, update = start.mT if tall else start, scratch.gram, scratch.update
        last = len(self.coefficients.triples) - 1
        direct = None if out is None else _as_target(out, tall, self.dtype)
        in_gram_space = self.iteration == "gram" and is_long(*x.shape[-2:])
        least = BATCH_BELOW if in_gram_space else STRIPS_FROM
        gram_strips, update_strips = strips_of(gram, least), strips_of(update, least)
        gram_of(x, gram, gram_strips)
        if self.coefficients.row_prescale:
            _prescale_rows(x, gram, update)
        if in_gram_space:
            x = iterate_in_gram_space(x, gram, self.coefficients.triples, scratch, direct)
            if out is not None and direct is not None:
                return out
            return x.mT if tall else x
        # For single matrices the kernels that torch.optim.Muon calls: batched ones sum tiny
        # matrices in another order.
        multiply_wide = torch.addmm if x.ndim == 2 else torch.baddbmm
        for step, (a, b, c) in enumerate(self.coefficients.triples):
            if step > 0:
                gram_of(x, gram, gram_strips)
            multiply_add(gram, gram, gram, update, update_strips, beta=b, alpha=c)
            target = direct if step == last and direct is not None else scratch.wide[(step + 1) % 2]
            x = multiply_wide(x, update, x, beta=a, out=target)
        if out is not None and direct is not None:
            return out
        return x.mT if tall else x


def _normalise(source: Tensor, target: Tensor) -> None:
    """Write each matrix of `source`, over its Frobenius norm, into `target`, which may be `source`.

    A sum of squares leaves the range of its dtype long before the matrix does. Hence a matrix whose
    norm is very small or very large is multiplied by a power of two first; for any other the factor
    is one and no bit changes. On a CPU the usual case is seen and done in one pass; elsewhere the
    choice is made on the device, so that the host does not wait for it.
    """
    norm = torch.linalg.vector_norm(source, dim=(-2, -1), keepdim=True)
    # In float32 (e = 1), 2^100 lifts the smallest subnormal to 2^-49 and leaves a norm of 2^-40 at
    # 2^60; 2^-80 takes the largest norm, 2^128 times the root of the size, below 2^68 for any size
    # and 2^40 to 2^-40. The squares of all these are in range. Float64 has 8 times the exponents.
    e = 8 if norm.dtype is torch.float64 else 1
    low, high = 2.0 ** (-40 * e), 2.0 ** (40 * e)
    if norm.device.type == "cpu" and bool(((norm >= low) & (norm <= high)).all()):
        torch.div(source, norm, out=target)
        return
    scale = torch.ones_like(norm)
    scale.masked_fill_(norm < low, 2.0 ** (100 * e))
    scale.masked_fill_(norm > high, 2.0 ** (-80 * e))
    torch.mul(source, scale, out=target)
    torch.linalg.vector_norm(target, dim=(-2, -1), keepdim=True, out=norm)
    target.div_(norm.clamp_(min=torch.finfo(norm.dtype).tiny))


def _prescale_rows(x: Tensor, gram: Tensor, spare: Tensor) -> None:
    """Divide row i of x by sqrt(sum_j |gram_ij|), in place, and let `gram` follow.

    No singular value exceeds one then (Prach and Lampert 2022, arXiv:2208.03160; Turbo-Muon).
    """
    sums = torch.abs(gram, out=spare).sum(dim=-1, keepdim=True)
    scale = sums.clamp_(min=torch.finfo(sums.dtype).tiny).rsqrt_()
    x.mul_(scale)
    gram.mul_(scale).mul_(scale.mT)


def _normalising_dtype(source: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The compute dtype, unless values or norms of `source` may be out of its range."""
    if source is torch.float64:
        return torch.float64
    return torch.float32 if compute is torch.float16 else compute


def _as_target(out: Tensor, tall: bool, dtype: torch.dtype) -> Tensor | None:
    """`out` as [short, long], if a product can be written there as fast as into scratch memory."""
    short_out = out.mT if tall else out
    return short_out if out.dtype is dtype and short_out.is_contiguous() else None


def _lying(x: Tensor) -> Tensor:
    """The matrix, turned if it is tall."""
    return x.mT if x.size(0) > x.size(1) else x


def _copy_each(out: Tensor, result: Tensor) -> None:
    """Copy matrix by matrix: that transposes several times faster than one 3-D copy."""
    if out.ndim == 2:
        out.copy_(result)
    else:
        torch._foreach_copy_(out.unbind(0), result.unbind(0))
