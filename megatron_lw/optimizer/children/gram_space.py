"""Newton-Schulz on the small side of long matrices: the same polynomials, fewer products.

Every step multiplies X from the left by a polynomial of X X^T. So the iteration can run on
R = X X^T and on the product Q of those polynomials, both [short, short], and multiply X once:
`X <- Q X` (Dao et al. 2026, "Gram Newton-Schulz"). Five steps on a 1:4 matrix take 60 units of
arithmetic in place of 90 (8 m^2 n + 28 m^3 against 20 m^2 n + 10 m^3).

R drifts from the X X^T that it stands for, and rounding is magnified from step to step: in bfloat16
singular values of 3.5 were measured with a restart and of 1e6 and more without. Hence float16 and
wider only, and a restart, which is `X <- Q X` and a new R, before step 2 and every three steps
from there.

R, Q and the polynomials are symmetric and commute, so every product but `Q X` is symmetric: of
single large matrices a part of it is mirrored, see `symmetric`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lw.optimizer.children.coefficients import Triple
from megatron_lw.optimizer.children.ns_workspace import Scratch
from megatron_lw.optimizer.children.symmetric import gram_of, multiply_add, strips_of
from megatron_lw.optimizer.workspace import BATCH_BELOW

LONG_ENOUGH = 2
"""Long side over short side from which the Gram space is used; its arithmetic pays from 1.5 on."""
_FIRST_RESTART = 2
_RESTART_EVERY = 3


def is_long(rows: int, columns: int) -> bool:
    """Whether a matrix of this shape is iterated in Gram space."""
    short, long = sorted((rows, columns))
    return long >= LONG_ENOUGH * short


def restarts_before(step: int) -> bool:
    """Whether X and R are made anew before this step, counted from 0."""
    return step >= _FIRST_RESTART and (step - _FIRST_RESTART) % _RESTART_EVERY == 0


def iterate_in_gram_space(
    x: Tensor, gram: Tensor, triples: Sequence[Triple], scratch: Scratch, target: Tensor | None
) -> Tensor:
    """Apply the polynomials to x.

    Args:
        x: [..., short, long], normalised, in the first wide place of `scratch`; long is at least
            `LONG_ENOUGH` times short, so that two small matrices fit into the other wide place.
        gram: x x^T, in `scratch.gram`.
        triples: (a, b, c) of each step.
        scratch: the workspace of the call.
        target: takes the result, if given: like x, sharing no memory with `scratch`.

    Returns:
        `target`, or the wide place where the result is.
    """
    place = 0
    update = scratch.update
    product, spare = _two_small(scratch.wide[1], gram)
    started = False
    for step, (a, b, c) in enumerate(triples):
        _product(gram, gram, gram, b, c, update)
        if not started:
            product.copy_(update)
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            _product(product, product, update, a, 1.0, spare)
            product, spare = spare, product
        started = True
        last = step + 1 == len(triples)
        if not last and not restarts_before(step + 1):
            _product(gram, gram, update, a, 1.0, spare)
            _product(spare, spare, update, a, 1.0, gram)
            continue
        # The product leaves the wide place into which x goes next.
        update.copy_(product)
        wide = scratch.wide[1 - place]
        multiply = torch.mm if x.ndim == 2 else torch.bmm
        x = multiply(update, x, out=target if last and target is not None else wide)
        place = 1 - place
        if not last:
            gram_of(x, gram, strips_of(gram, BATCH_BELOW))
            product, spare = _two_small(scratch.wide[1 - place], gram)
            started = False
    return x


def _product(
    addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float, out: Tensor
) -> None:
    strips = strips_of(out, BATCH_BELOW)
    multiply_add(addend, left, right, out, strips, beta=beta, alpha=alpha)


def _two_small(wide: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Two places like `gram` in one that holds a wide matrix, or a batch of them."""
    flat = wide.view(-1)
    size = gram.numel()
    return flat[:size].view(gram.shape), flat[size : 2 * size].view(gram.shape)
