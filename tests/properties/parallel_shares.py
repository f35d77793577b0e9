"""Which part of a parameter each rank of a case has, and which gradient, from the ranks' order."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from megatron_lw import fp8
from tests.properties.parallel_models import HUGE, Case, Spec, Step


def checksum(x: torch.Tensor) -> int:
    """CRC-32 of the bytes of a tensor; of a quantised one of all that it consists of."""
    x = x.detach()  # waits for a gather that is under way; a look at `planes` does not
    parts = list(x.planes.tensors().values()) if isinstance(x, fp8.QuantisedTensor) else [x]
    flat = [part.contiguous().view(-1) for part in parts if part.numel()]
    return zlib.crc32(b"".join(part.view(torch.uint8).numpy().tobytes() for part in flat))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank is on every axis, by Megatron's order of ranks."""

    tp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    replica: int


def place_of(case: Case, rank: int) -> Place:
    """The coordinates of a rank."""
    axes = case.axes
    stage = axes["tp"] * axes["dp"]
    inside = rank % stage
    return Place(
        tp=inside % axes["tp"],
        dp=inside // axes["tp"],
        pp=rank // stage,
        etp=inside % axes["etp"],
        ep=inside // axes["etp"] % axes["ep"],
        edp=inside // axes["etp"] // axes["ep"],
        replica=inside,
    )


def holds(spec: Spec, place: Place) -> bool:
    """Whether a rank has a part or copy of the parameter."""
    return place.pp in spec.stages and spec.expert in (None, -1, place.ep)


def part_of(case: Case, spec: Spec, whole: torch.Tensor, place: Place) -> torch.Tensor:
    """A rank's part of a tensor of the parameter's whole shape."""
    axes = case.axes
    size, index = axes["tp"], place.tp
    if spec.expert is not None:
        size, index = axes["etp"], place.etp
    if spec.expert == -1:
        whole = whole.chunk(axes["ep"], 0)[place.ep]
    if spec.tp_dim is None or size == 1:
        return whole
    blocks = spec.blocks if spec.blocks and spec.tp_dim == 0 else (whole.shape[spec.tp_dim],)
    pieces = [b.chunk(size, spec.tp_dim)[index] for b in whole.split(list(blocks), spec.tp_dim)]
    return torch.cat(pieces, spec.tp_dim).contiguous()


def whole_of(case: Case, spec: Spec, parts: dict[tuple[str, int], torch.Tensor]) -> torch.Tensor:
    """The whole parameter from the parts of all ranks; copies are equal."""
    whole = torch.full(spec.shape, torch.nan)
    index = torch.arange(whole.numel()).view(spec.shape)
    for rank in range(case.ranks):
        if holds(spec, place := place_of(case, rank)):
            at = part_of(case, spec, index, place).reshape(-1)
            whole.view(-1)[at] = parts[spec.name, rank].reshape(-1)
    return whole


def share_of(spec: Spec, place: Place) -> tuple[int, ...]:
    """Which share of the tokens a rank's gradient is for; ranks of one share have equal ones."""
    if spec.kind == "tied":
        return place.pp, place.dp
    if spec.kind == "sequence_parallel":
        return place.tp, place.dp
    if spec.kind == "fp32":
        return (place.replica,)
    return (place.dp if spec.expert is None else place.edp,)


def initial(case: Case, spec: Spec) -> torch.Tensor:
    """The whole parameter before training, representable in its dtype, fp32."""
    generator = _generator(case, spec, "initial")
    return torch.randn(spec.shape, generator=generator).to(dtype_of(spec)).float()


def dtype_of(spec: Spec) -> torch.dtype:
    """The dtype of the weight."""
    return torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32


def gradient(
    case: Case, spec: Spec, share: tuple[int, ...], number: int, micro: int
) -> torch.Tensor | None:
    """The whole parameter's gradient for a share of a micro-batch; None where there is none.

    Small integers where sums are to be exact, else power-law spectra; all representable in BF16.
    """
    step = case.steps[number]
    generator = _generator(case, spec, f"{share}/{number}/{micro}")
    absent = float(torch.rand((), generator=generator)) * 10 < step.absent
    if absent or step.kind == "empty" or not spec.trainable or 0 in spec.shape:
        return None
    if case.exact:
        grad = torch.randint(-6, 7, spec.shape, generator=generator).float()
    else:
        grad = _power_law(torch.randn(spec.shape, generator=generator))
    if "logical_rows" in spec.tag:
        grad[spec.tag["logical_rows"] :] = 0.0
    return grad * HUGE if step.kind == "huge" else grad


def poisoned(case: Case, step: Step) -> tuple[str, int] | None:
    """The name and the one rank whose gradient is not finite."""
    names = [s for s in case.specs if s.trainable and 0 not in s.shape and s.kind != "padded"]
    if step.kind != "nonfinite" or not names:
        return None
    spec = names[step.poison % len(names)]
    ranks = [rank for rank in range(case.ranks) if holds(spec, place_of(case, rank))]
    return spec.name, ranks[step.poison // len(names) % len(ranks)]


def _generator(case: Case, spec: Spec, text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{case.seed}/{spec.name}/{text}".encode()))


def _power_law(x: torch.Tensor) -> torch.Tensor:
    """Singular values that fall as 1/k, for two and more dimensions."""
    if x.dim() >= 2:
        u, s, v = torch.linalg.svd(x.reshape(x.shape[0], -1), full_matrices=False)
        x = (u @ torch.diag(s.max() / torch.arange(1, len(s) + 1)) @ v).view(x.shape)
    return x.bfloat16().float()


def tokens_of(dp: int) -> int:
    """Tokens of a data-parallel rank.

    One rank has a power of two, so that three and more tensor-parallel ranks, each with a quotient
    to be summed, round none.
    """
    return 4 + 2 * dp
