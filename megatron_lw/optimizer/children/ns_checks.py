"""What a Newton-Schulz call refuses to take, with the argument's name and value."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_lw.errors import ConfigError


def check_input(name: str, x: Tensor, *ndims: int) -> None:
    """Check that a tensor is floating-point and has one of these numbers of dimensions.

    Raises:
        ConfigError: it is not.
    """
    if x.ndim not in ndims or not x.is_floating_point():
        wanted = " or ".join(f"{ndim}-D" for ndim in ndims)
        raise ConfigError(
            f"{name}: {x.dtype} of shape {tuple(x.shape)} cannot be orthogonalised; "
            f"give {wanted} floating-point tensors"
        )


def check_out(name: str, out: Tensor, x: Tensor) -> None:
    """Check that `out` can take a result for x.

    Raises:
        ConfigError: it cannot.
    """
    if out.shape != x.shape or out.device != x.device or not out.is_floating_point():
        raise ConfigError(
            f"{name}: {out.dtype} of shape {tuple(out.shape)} on {out.device} cannot take the "
            f"result; give a floating-point tensor of shape {tuple(x.shape)} on {x.device}"
        )


def check_pairs(matrices: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Check inputs and results of a list, one by one.

    Raises:
        ConfigError: different numbers of them, or a pair that does not fit.
    """
    if len(matrices) != len(outs):
        raise ConfigError(f"{len(matrices)} matrices, {len(outs)} outs: give one for each")
    for x, out in zip(matrices, outs, strict=True):
        check_input("matrices", x, 2)
        check_out("outs", out, x)


def check_equal(matrices: Sequence[tuple[Tensor, object]], what: str) -> None:
    """Check that what a list is batched by is equal in all its matrices, and the dtype too.

    Args:
        matrices: each with the value that must be equal.
        what: the name of that value.

    Raises:
        ConfigError: a matrix differs from the first.
    """
    for x, value in matrices:
        first, expected = matrices[0]
        if value != expected or x.dtype != first.dtype:
            raise ConfigError(
                f"matrices: {x.dtype} of {tuple(x.shape)} beside {first.dtype} of "
                f"{tuple(first.shape)}; group them by {what} and dtype"
            )
