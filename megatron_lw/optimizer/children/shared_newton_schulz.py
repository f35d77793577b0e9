"""Newton-Schulz over shards: each rank keeps its part, and the ranks sum their Gram matrices.

X is divided along its long side, X = [X_1 ... X_T], each [short, long_t]. Then X X^T is the sum of
X_t X_t^T, and X <- a X + (b G + c G^2) X acts on each part by itself. One all-reduce of [short,
short] an iteration, summed in fp32 where the products are of half precision (Megatron's mode
`distributed`; Emerging-Optimizers' `newton_schulz_tp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from megatron_lw.distributed.collectives import all_reduce
from megatron_lw.distributed.group import Group
from megatron_lw.optimizer.children.newton_schulz import STRIPS_FROM, NewtonSchulz
from megatron_lw.optimizer.children.symmetric import gram_of, strips_of

Guard = Callable[[], AbstractContextManager[None]]
Batch = Sequence[torch.Tensor]
_BATCH_GRAM = 1 << 24


class SharedNewtonSchulz:
    """Orthogonalises matrices whose parts lie on the ranks of a group, in place.

    Args:
        newton_schulz: coefficients and dtype.
        group: ranks that hold the parts; each has the same matrices, in the same order.
        buckets: for each call to come its matrices, see `__call__`.
        device: where they are.

    Attributes:
        nbytes: workspace, allocated once.
    """

    def __init__(
        self,
        newton_schulz: NewtonSchulz,
        group: Group,
        buckets: Iterable[Sequence[torch.Tensor]],
        device: torch.device,
    ) -> None:
        self._coefficients = newton_schulz.coefficients
        self._group = group
        batches = [batch for bucket in buckets for batch in _batches(bucket)]
        gram = max((len(b) * b[0].size(0) ** 2 for b in batches), default=0)
        wide = max((sum(x.numel() for x in b) for b in batches), default=0)
        dtype = newton_schulz.dtype
        sums = torch.float64 if dtype is torch.float64 else torch.float32
        self._sum = torch.empty(gram, dtype=sums, device=device)
        self._gram, self._update = (torch.empty(gram, dtype=dtype, device=device) for _ in range(2))
        # One place beside the matrices themselves, or two where those are of another dtype.
        number = 1 if newton_schulz.input_dtype is dtype else 2
        self._spares = [torch.empty(wide, dtype=dtype, device=device) for _ in range(number)]
        tensors = (self._sum, self._gram, self._update, *self._spares)
        self.nbytes = sum(t.nbytes for t in tensors)

    @torch.no_grad()
    def __call__(self, matrices: Sequence[torch.Tensor], guard: Guard, label: str) -> None:
        """Orthogonalise matrices in place.

        Collective: for each batch of one short side, one all-reduce of a number a matrix and one of
        the Gram matrices at every iteration, over the group. A rank that fails inside `guard` goes
        on, as the others wait.

        Args:
            matrices: this rank's parts, each [short, long_t] in the input dtype, any strides;
                long_t may be zero.
            guard: a context that keeps exceptions.
            label: what they serve, for messages.
        """
        for batch in _batches(matrices):
            self._normalise(batch, guard, label)
            self._iterate(batch, guard, label)

    def _normalise(self, batch: Batch, guard: Guard, label: str) -> None:
        """Divide each matrix by its norm over all ranks; zero stays zero.

        The exponent of the norm is taken out first, in two halves, so that nothing leaves the range
        of the dtype; powers of two change no bit.
        """
        squares = torch.zeros(len(batch), dtype=torch.float64, device=batch[0].device)
        with guard():
            for place, x in enumerate(batch):
                squares[place] = torch.linalg.vector_norm(x, dtype=torch.float64).square()
        all_reduce(squares, self._group, label=f"norms, {label}")
        with guard():
            mantissas, exponents = torch.frexp(squares.sqrt())
            mantissas.masked_fill_(mantissas == 0, 1.0)
            first = exponents // 2
            halves = torch.exp2(-first.double()), torch.exp2((first - exponents).double())
            for x, mantissa, one, two in zip(batch, mantissas, *halves, strict=True):
                x.mul_(one.to(x.dtype)).mul_(two.to(x.dtype)).div_(mantissa.to(x.dtype))

    def _iterate(self, batch: Batch, guard: Guard, label: str) -> None:
        size, short = len(batch), batch[0].size(0)
        summed, gram, update = (
            buffer[: size * short * short].view(size, short, short)
            for buffer in (self._sum, self._gram, self._update)
        )
        sizes = [x.numel() for x in batch]
        places = [list(batch)] if len(self._spares) == 1 else []
        for spare in self._spares:
            parts = spare[: sum(sizes)].split(sizes)
            places.append([part.view(x.shape) for part, x in zip(parts, batch, strict=True)])
        here, there = places
        with guard():
            if here[0] is not batch[0]:
                torch._foreach_copy_(here, list(batch))
        for step, (a, b, c) in enumerate(self._coefficients.triples):
            with guard():
                for x, each in zip(here, gram, strict=True):
                    gram_of(x, each, strips_of(each, STRIPS_FROM))
                summed.copy_(gram)
            all_reduce(summed, self._group, label=f"Gram matrices, {label}")
            with guard():
                gram.copy_(summed)
                if step == 0 and self._coefficients.row_prescale:
                    _prescale_rows(here, gram)
                torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=update)
                for x, each, target in zip(here, update, there, strict=True):
                    torch.addmm(x, each, x, beta=a, out=target)
            here, there = there, here
        with guard():
            if here[0] is not batch[0]:
                torch._foreach_copy_(list(batch), here)


def _batches(matrices: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Matrices of one short side together, as many as the Gram matrices' memory allows.

    Nothing here depends on this rank's share of the long side, so all ranks make the same batches.
    """
    by_side: dict[int, list[torch.Tensor]] = {}
    for x in matrices:
        by_side.setdefault(x.size(0), []).append(x)
    found: list[list[torch.Tensor]] = []
    for short, all_of_them in by_side.items():
        size = max(1, _BATCH_GRAM // (short * short))
        found += [all_of_them[i : i + size] for i in range(0, len(all_of_them), size)]
    return found


def _prescale_rows(batch: Sequence[torch.Tensor], gram: torch.Tensor) -> None:
    """Divide row i by sqrt(sum_j |gram_ij|), and let `gram` follow; see `newton_schulz`."""
    sums = gram.abs().sum(dim=-1, keepdim=True)
    scale = sums.clamp_(min=torch.finfo(sums.dtype).tiny).rsqrt_()
    for x, each in zip(batch, scale, strict=True):
        x.mul_(each)
    gram.mul_(scale).mul_(scale.mT)
