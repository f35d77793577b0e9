"""`QuantisedTensor`: a BF16 matrix that is kept as FP8 planes.

To a module it is a weight of dtype bfloat16: it can be a Parameter, gets a bf16 gradient, is
copied, moved, saved and printed. It has no BF16 storage. What would need one raises
`UnsupportedError`; `dequantize()` gives the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron_lw.errors import ConfigError, UnsupportedError
from megatron_lw.fp8.linear_function import linear
from megatron_lw.fp8.planes import PlaneLayout, Planes
from megatron_lw.fp8.quantise import History, Plane, dequantise, quantise_all
from megatron_lw.fp8.recipe import Recipe

_OWN = ("_planes", "_initial", "_is_param")


class _Initial:
    """The values before the first quantisation, shared by a tensor and its aliases."""

    __slots__ = ("values",)

    def __init__(self, values: torch.Tensor | None) -> None:
        self.values = values


class QuantisedTensor(torch.Tensor):
    """A BF16 matrix `[M, K]`, kept as FP8.

    Args:
        planes: of one matrix. Aliased.
        requires_grad: as of any tensor.
        initial: bf16 `[M, K]`, the values before they were quantised, from which masters start.
    """

    _planes: Planes
    _initial: _Initial

    @staticmethod
    def __new__(
        cls: type[QuantisedTensor],
        planes: Planes,
        *,
        requires_grad: bool = False,
        initial: torch.Tensor | None = None,
    ) -> QuantisedTensor:
        """Wrap planes."""
        made: QuantisedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            planes.layout.shapes[0],
            dtype=torch.bfloat16,
            device=planes.row_data.device,
            requires_grad=requires_grad,
        )
        made._planes = planes
        made._initial = _Initial(initial)
        return made

    @classmethod
    def from_values(
        cls, values: torch.Tensor, recipe: Recipe, *, keep_initial: bool = False, name: str = "it"
    ) -> QuantisedTensor:
        """Quantise a matrix.

        Args:
            values: bf16 `[M, K]`.
            recipe: the format.
            keep_initial: keep the values too, until `take_initial`.
            name: what messages call it.

        Raises:
            ConfigError: not bf16, or a shape that the format does not have.
        """
        if values.dtype != torch.bfloat16:
            raise ConfigError(
                f"{name} is {values.dtype}; only bfloat16 weights are quantised: convert it first"
            )
        recipe.check_shape(name, tuple(values.shape))
        values = values.detach().contiguous()
        rows, cols = values.shape
        made = cls(Planes.empty([(rows, cols)], recipe, values.device))
        made.requantise(values)
        if keep_initial:
            made._initial.values = values.clone()
        return made

    @property
    def planes(self) -> Planes:
        """Bytes and scales. Aliases what the weight is."""
        return self._planes

    @property
    def recipe(self) -> Recipe:
        """The format."""
        return self._planes.recipe

    @property
    def initial(self) -> torch.Tensor | None:
        """bf16 values before quantisation, while they are kept."""
        return self._initial.values

    @initial.setter
    def initial(self, values: torch.Tensor | None) -> None:
        self._initial.values = values

    @property
    def data(self) -> torch.Tensor:
        """An alias without history, as of any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the planes of another quantised tensor of the same shape, format and device.

        Raises:
            UnsupportedError: anything else, which is also what `module.float()` would assign.
        """
        if not isinstance(value, QuantisedTensor) or value.device != self.device:
            raise UnsupportedError(
                f"a weight quantised to {self.recipe.format} cannot become {value.dtype} on "
                f"{value.device} in place (module.float(), .half() or an assignment to .data); "
                "convert a model before quantize_model, or use dequantize()"
            )
        if value.planes.layout != self._planes.layout:
            raise UnsupportedError(
                f".data of another shape or format: {value.planes.layout} for "
                f"{self._planes.layout}; use copy_()"
            )
        self._planes, self._initial = value._planes, value._initial

    def free_initial(self) -> None:
        """Let go of the values before quantisation, here and in every alias."""
        self._initial.values = None

    def rebind(self, planes: Planes) -> None:
        """Move bytes and scales into other planes of the same layout, which it is from now on."""
        planes.copy_(self._planes)
        self._planes = planes

    @torch.no_grad()
    def requantise(self, values: torch.Tensor, history: History = "restart") -> None:
        """Quantise bf16 values of the same shape, in place."""
        quantise_all(values.contiguous().view(-1), self._planes, history)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, plane: Plane = "row") -> torch.Tensor:
        """The values, a plain tensor `[M, K]`; gradients pass through unchanged."""
        values: torch.Tensor = _Dequantise.apply(self, dtype, plane)  # type: ignore[no-untyped-call]
        return values

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kind = (
            "Parameter of QuantisedTensor" if isinstance(self, nn.Parameter) else "QuantisedTensor"
        )
        values = repr(dequantise(self._planes, torch.bfloat16)).removeprefix("tensor")
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}(recipe={self.recipe}, values={values}{grad})"

    def __tensor_flatten__(self) -> tuple[list[str], PlaneLayout]:
        """Names of the tensors inside, for torch; see `__getattr__`."""
        return [f"plane_{name}" for name in self._planes.tensors()], self._planes.layout

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], layout: PlaneLayout, size: object, stride: object
    ) -> QuantisedTensor:
        """The inverse."""
        tensors = {name.removeprefix("plane_"): tensor for name, tensor in inner.items()}
        return QuantisedTensor(Planes(layout=layout, **tensors))

    def __getattr__(self, name: str) -> torch.Tensor:
        """The tensors inside, by the names of `__tensor_flatten__`."""
        if name.startswith("plane_"):
            return self._planes.tensors()[name.removeprefix("plane_")]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantisedTensor:
        """A tensor with planes of its own; like a plain Parameter's copy it has no tags."""
        if id(self) not in memo:
            memo[id(self)] = _like(self, _clone(self))
        made: QuantisedTensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Planes, tags and all, for pickle and torch.save."""
        tags = {name: value for name, value in vars(self).items() if name not in _OWN}
        is_param = isinstance(self, nn.Parameter)
        state = (self._planes, self.initial, self.requires_grad, is_param, tags)
        return _rebuild, state

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """A linear layer multiplies with the planes; everything else is torch's."""
        kwargs = kwargs or {}
        if func is functional.linear:
            return _functional_linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The operations that a quantised weight has.

        Raises:
            UnsupportedError: any other.
        """
        handler = _HANDLERS.get(func)
        if handler is None:
            raise _unsupported(func, args)
        return handler(*args, **(kwargs or {}))


class _Dequantise(torch.autograd.Function):
    """The values of a plane; the gradient of the values is that of the weight."""

    @staticmethod
    def forward(
        ctx: Any, weight: QuantisedTensor, dtype: torch.dtype, plane: Plane
    ) -> torch.Tensor:
        return dequantise(weight.planes, dtype, plane)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].to(torch.bfloat16), None, None


def _functional_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear` where an argument is quantised."""
    if isinstance(weight, QuantisedTensor) and not isinstance(input, QuantisedTensor):
        return linear(input, weight, bias)
    raise UnsupportedError(
        "functional.linear: only the weight may be quantised; call dequantize() on the input"
    )


def _unsupported(operation: object, args: tuple[Any, ...]) -> UnsupportedError:
    found = [each.recipe.format for each in args if isinstance(each, QuantisedTensor)]
    return UnsupportedError(
        f"{operation} is not defined for a weight quantised to {'FP8' if not found else found[0]}; "
        "call dequantize() for its values, or copy_() to set them"
    )


def _clone(weight: QuantisedTensor, **to: Any) -> QuantisedTensor:
    """A copy with planes of its own, on another device if `to` names one."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(copy=True, **to)

    planes = {name: copied(tensor) for name, tensor in weight.planes.tensors().items()}
    initial = None if weight.initial is None else copied(weight.initial)
    return QuantisedTensor(weight.planes.with_tensors(planes), initial=initial)


def _like(weight: QuantisedTensor, made: QuantisedTensor) -> QuantisedTensor:
    """Make a copy what the original is: a Parameter, and one that needs a gradient or not."""
    if isinstance(weight, nn.Parameter):
        made._is_param = True
    made.requires_grad_(weight.requires_grad)
    return made


def _rebuild(
    planes: Planes,
    initial: torch.Tensor | None,
    requires_grad: bool,
    is_param: bool,
    tags: dict[str, Any],
) -> QuantisedTensor:
    """From a pickle."""
    made = QuantisedTensor(planes, initial=initial, requires_grad=requires_grad)
    vars(made).update(tags)
    if is_param:
        made._is_param = True
    return made


def _detach(weight: QuantisedTensor) -> QuantisedTensor:
    """An alias: the same planes, the same values before quantisation."""
    made = QuantisedTensor(weight.planes)
    made._initial = weight._initial
    return made


def _view(weight: QuantisedTensor, size: tuple[int, ...]) -> QuantisedTensor:
    """A view of the same shape, by which torch finds the node of a leaf; blocks allow no other."""
    if tuple(size) != tuple(weight.shape):
        raise _unsupported(f"aten.view to {tuple(size)}", (weight,))
    return _detach(weight)


def _copy_op(weight: QuantisedTensor, memory_format: object = None) -> QuantisedTensor:
    return _clone(weight)


def _copy_into(
    target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Quantise into a quantised weight, dequantise into a plain one.

    Equal recipes copy bytes. While the values before quantisation are kept, they follow.
    """
    if not isinstance(target, QuantisedTensor):
        return target.copy_(dequantise(source.planes, torch.float32))  # type: ignore[attr-defined]
    if source.shape != target.shape:
        raise ConfigError(
            f"copy_ of shape {tuple(source.shape)} into a quantised weight of shape "
            f"{tuple(target.shape)}: give the same shape"
        )
    if isinstance(source, QuantisedTensor) and source.recipe == target.recipe:
        target.planes.copy_(source.planes)
        values = source.initial
        if values is None and target.initial is not None:
            values = dequantise(source.planes, torch.bfloat16)
    else:
        if isinstance(source, QuantisedTensor):
            kept = source.initial
            source = dequantise(source.planes, torch.bfloat16) if kept is None else kept
        values = source.detach().to(device=target.device, dtype=torch.bfloat16)
        target.requantise(values)
    if target.initial is not None and values is not None:
        target.initial.copy_(values)
    return target


def _to_copy(
    weight: QuantisedTensor,
    *,
    dtype: torch.dtype | None = None,
    layout: object = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: object = None,
) -> torch.Tensor:
    """To a device it stays quantised; to another dtype its values go."""
    if dtype in (None, torch.bfloat16):
        return _clone(weight, device=device, non_blocking=non_blocking)
    values = dequantise(weight.planes, torch.float32)
    return values.to(device=device, dtype=dtype, non_blocking=non_blocking)


_aten = torch.ops.aten
_HANDLERS: Mapping[Any, Callable[..., torch.Tensor]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.view.default: _view,
    _aten.clone.default: _copy_op,
    _aten.copy_.default: _copy_into,
    _aten._to_copy.default: _to_copy,
}
