"""From a model to facts: the only module that reads attributes off parameters.

`describe` walks the model chunks once and returns a frozen `ParamInfo` for each trainable
parameter. Every later stage works from these records and never asks the parameter again. Facts come
from `annotate` (native models) and from Megatron's own attributes; a tag that contradicts the sizes
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron_lw.errors import ConfigError
from megatron_lw.fp8.kinds import address, recipe_text
from megatron_lw.groups import Domain, ParallelGroups
from megatron_lw.optimizer.boxes import stack_boxes, tensor_parallel_boxes
from megatron_lw.optimizer.names import NameMap, natural_key
from megatron_lw.optimizer.param_info import ParamInfo, Role, logical_numel
from megatron_lw.optimizer.tags import Annotation, check_tags, row_dimension, stack_size
from megatron_lw.optimizer.weight_uses import WeightUse, weight_uses

__all__ = ["DescribedModel", "ParamInfo", "Role", "annotate", "describe", "logical_numel"]

_ANNOTATION = "_megatron_lw_annotation"
_HOLDER = "_megatron_lw_holder"


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """The facts of a model and its parameters, in canonical (natural name) order.

    Attributes:
        infos: one record a trainable parameter.
        params: global name -> the parameter.
        unstepped: name, domain, shape and dtype of frozen parameters and of buffers.
    """

    infos: tuple[ParamInfo, ...]
    params: Mapping[str, nn.Parameter]
    unstepped: tuple[tuple[str, Domain, tuple[int, ...], str], ...]


def annotate(
    param: nn.Parameter,
    *,
    tp_dim: int | None = None,
    blocks: Sequence[int] | None = None,
    split_blocks: bool = True,
    qkv: Sequence[int] | None = None,
    expert: bool = False,
    tied: str | None = None,
    matrices: int | None = None,
    logical_rows: int | None = None,
    sequence_parallel: bool = False,
    embedding: bool = False,
    output: bool = False,
    use_muon: bool | None = None,
    keep_fp32: bool = False,
) -> nn.Parameter:
    """Say what is special about a parameter of a native model; call it before wrapping the model.

    Args:
        param: the parameter; returned, so that the call can wrap its creation.
        tp_dim: dimension that is divided over the tensor-parallel ranks.
        blocks: rows of the fused matrices inside it, for the whole (global) parameter or one of a
            stack. Muon orthogonalises each by itself; rows beyond them get no update from it.
            Tensor parallelism divides each by itself.
        split_blocks: False: Muon takes the blocks together as one matrix; they only say how tensor
            parallelism divides.
        qkv: rows of query, (gate,) key and value in one query group, where the rows are group after
            group as Megatron lays them out. Muon orthogonalises each over all groups.
        expert: belongs to the expert domain.
        tied: name of the logical weight that several parameters share.
        matrices: number of matrices stacked in it on this rank: `[E, out, in]` or
            `[E * out, in]`.
        logical_rows: rows of the whole parameter without its own padding rows.
        sequence_parallel: replicated and used under sequence parallelism.
        embedding: an embedding table: stepped element by element.
        output: an output layer: stepped element by element.
        use_muon: force (True) or refuse (False) the matrix child.
        keep_fp32: keep FP32 and leave aside other sharding.

    Raises:
        ConfigError: the tags contradict the shape or each other.
    """
    tags = Annotation(
        tp_dim=tp_dim,
        blocks=None if blocks is None else tuple(blocks),
        split_blocks=split_blocks,
        qkv=None if qkv is None else tuple(qkv),
        expert=expert,
        tied=tied,
        matrices=matrices,
        logical_rows=logical_rows,
        sequence_parallel=sequence_parallel,
        embedding=embedding,
        output=output,
        use_muon=use_muon,
        keep_fp32=keep_fp32,
    )
    check_tags(f"parameter of shape {tuple(param.shape)}", param, tags)
    setattr(param, _ANNOTATION, tags)
    return param


def describe(
    chunks: Sequence[nn.Module], groups: ParallelGroups, names: NameMap | None = None
) -> DescribedModel:
    """Collect the facts of all trainable parameters of the model chunks.

    Args:
        chunks: the bare modules, one a virtual pipeline chunk.
        groups: for the tensor-parallel sizes and ranks.
        names: local to global names; the identity if None.

    Raises:
        ConfigError: a name or parameter appears twice, or a tag contradicts a shape.
    """
    names = names or NameMap()
    infos: dict[str, ParamInfo] = {}
    params: dict[str, nn.Parameter] = {}
    unstepped: dict[str, tuple[str, Domain, tuple[int, ...], str]] = {}
    seen: dict[int, str] = {}
    places: dict[int, str] = {}
    for index, chunk in enumerate(chunks):
        used = weight_uses(chunk)
        for local_name, param in chunk.named_parameters():
            name = names.to_global(index, local_name)
            if id(param) in seen:
                raise ConfigError(
                    f"parameter {name!r} of chunk {index} is the same object as {seen[id(param)]!r}"
                    " of another chunk; chunks must not share parameters"
                )
            if name in params or name in unstepped:
                raise ConfigError(
                    f"two parameters have the global name {name!r}; pass a NameMap that "
                    "tells the chunks and stages apart"
                )
            seen[id(param)] = name
            other = places.setdefault(address(name, param), name) if param.numel() else name
            if other != name:
                raise ConfigError(
                    f"parameters {other!r} and {name!r} share storage but are two objects; use one "
                    "nn.Parameter in both places, or give each its own memory"
                )
            if not param.requires_grad:
                unstepped[name] = _unstepped(name, param, frozen_domain(param))
                continue
            use = used.get(id(param), WeightUse())
            infos[name] = _info(name, local_name, index, param, use, groups)
            params[name] = param
        for local_name, buffer in chunk.named_buffers():
            name = names.to_global(index, local_name)
            unstepped[name] = _unstepped(name, buffer, buffer_domain(groups))
    _refuse_twice_tied(infos.values())
    order = sorted(infos, key=natural_key)
    return DescribedModel(
        tuple(infos[n] for n in order),
        {n: params[n] for n in order},
        tuple(unstepped[n] for n in sorted(unstepped, key=natural_key)),
    )


def describe_frozen(
    chunks: Sequence[nn.Module], groups: ParallelGroups, names: NameMap
) -> dict[str, tuple[ParamInfo, nn.Parameter]]:
    """Global name -> facts and parameter, of what takes no gradient."""
    found = {}
    for index, chunk in enumerate(chunks):
        for local_name, param in chunk.named_parameters():
            if not param.requires_grad:
                name = names.to_global(index, local_name)
                found[name] = _info(name, local_name, index, param, WeightUse(), groups), param
    return found


def frozen_domain(param: nn.Parameter) -> Domain:
    """Which ranks hold copies of a parameter that takes no gradient."""
    tags: Annotation | None = getattr(param, _ANNOTATION, None)
    is_expert = tags.expert if tags else not getattr(param, "allreduce", True)
    return "expert" if is_expert else "dense"


def buffer_domain(groups: ParallelGroups) -> Domain:
    """Which ranks surely hold copies of a buffer, which says nothing of itself."""
    return "expert" if groups.ep.size > 1 else "dense"


def _unstepped(
    name: str, tensor: torch.Tensor, domain: Domain
) -> tuple[str, Domain, tuple[int, ...], str]:
    return name, domain, tuple(tensor.shape), str(tensor.dtype)


def _refuse_twice_tied(infos: Iterable[ParamInfo]) -> None:
    """Copies of a tied weight are on different stages; on one rank they are one parameter."""
    tied: dict[str, str] = {}
    for info in infos:
        if info.tied is not None and tied.setdefault(info.tied, info.name) != info.name:
            raise ConfigError(
                f"parameters {tied[info.tied]!r} and {info.name!r} of one rank are both tied to "
                f"{info.tied!r}; use one nn.Parameter in both places"
            )


def has_attribute(param: nn.Parameter, name: str) -> bool:
    """Whether a parameter carries a true attribute of this name (for `ParamKey.attr`)."""
    return bool(getattr(param, name, False))


def bind_main_grad(param: nn.Parameter, main_grad: torch.Tensor) -> None:
    """Give a parameter its view of the gradient storage, under Megatron's attribute names."""
    param.main_grad = main_grad  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    param.grad = None


class Holder:
    """Who holds a parameter in its buckets; copies and pickles of the parameter hold nothing."""

    __slots__ = ("release",)

    def __init__(self, release: Callable[[], None] | None = None) -> None:
        self.release = release

    def __deepcopy__(self, memo: object) -> Holder:
        """A copy of the parameter lies in no bucket."""
        return Holder()

    def __reduce__(self) -> tuple[type[Holder], tuple[()]]:
        """Neither does a pickled one."""
        return Holder, ()


def take_hold(params: Iterable[nn.Parameter], holder: Holder) -> None:
    """Make `holder` the one that holds the parameters; an earlier one is told to let go."""
    for param in params:
        before: Holder | None = getattr(param, _HOLDER, None)
        if before is not None and before is not holder and before.release is not None:
            before.release()
        setattr(param, _HOLDER, holder)


def take_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd left for the buffer to add, or None; clears `param.grad`.

    A layer that accumulates its weight gradient into `main_grad` itself sets
    `grad_added_to_main_grad`; what autograd then holds is a placeholder and is dropped, unless the
    layer also asks for it with `zero_out_wgrad`.
    """
    grad, param.grad = param.grad, None
    if getattr(param, "grad_added_to_main_grad", False):
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if not getattr(param, "zero_out_wgrad", False):
            return None
    return grad


def _info(
    name: str,
    local_name: str,
    chunk: int,
    param: nn.Parameter,
    use: WeightUse,
    groups: ParallelGroups,
) -> ParamInfo:
    tags: Annotation = getattr(param, _ANNOTATION, None) or _megatron_tags(name, param, groups)
    check_tags(f"parameter {name!r}", param, tags)
    domain: Domain = "dense"
    if tags.expert:
        domain = "expert"
    elif tags.keep_fp32 and not tags.sequence_parallel:
        domain = "replicated"
    tensor = groups.domain(domain).tensor
    local_shape = tuple(param.shape)
    matrices = stack_size(local_shape, tags.matrices)
    global_shape, boxes = tensor_parallel_boxes(
        name,
        local_shape,
        tags.tp_dim,
        tags.blocks,
        tensor.size,
        tensor.rank,
        row_dimension(len(local_shape), matrices),
    )
    ep_size = groups.ep.size if tags.expert and matrices is not None else 1
    if ep_size > 1:
        global_shape, boxes = stack_boxes(global_shape, boxes, ep_size, groups.ep.rank)
    role: Role = "matrix" if param.dim() >= 2 else "vector"
    if tags.embedding or use.is_table:
        role = "embedding"
    if tags.output:
        role = "output"
    return ParamInfo(
        name=name,
        local_name=local_name,
        chunk=chunk,
        dtype=str(param.dtype).removeprefix("torch."),
        local_shape=local_shape,
        global_shape=global_shape,
        boxes=boxes,
        domain=domain,
        tp_dim=tags.tp_dim if tensor.size > 1 else None,
        divisible_dim=tags.tp_dim,
        role=role,
        matrices=matrices,
        ep_size=ep_size,
        blocks=tags.blocks,
        split_blocks=tags.split_blocks,
        qkv=tags.qkv,
        logical_rows=tags.logical_rows,
        tied=tags.tied,
        sequence_parallel=tags.sequence_parallel,
        use_muon=tags.use_muon,
        keep_fp32=tags.keep_fp32,
        depthwise=use.depthwise,
        recipe=recipe_text(name, param),
    )


def _megatron_tags(name: str, param: nn.Parameter, groups: ParallelGroups) -> Annotation:
    """The same facts from the attributes that Megatron's layers put on their parameters."""
    parallel = bool(getattr(param, "tensor_model_parallel", False))
    partition_dim = getattr(param, "partition_dim", -1)
    if parallel and not 0 <= partition_dim < param.dim():
        raise ConfigError(
            f"parameter {name!r}: tensor_model_parallel is set but partition_dim = "
            f"{partition_dim} is not a dimension of shape {tuple(param.shape)}"
        )
    qkv = getattr(param, "qkv_split_shapes", None) if getattr(param, "is_qkv", False) else None
    if getattr(param, "is_qkv", False) and not qkv:
        raise ConfigError(
            f"parameter {name!r}: is_qkv is set but qkv_split_shapes = {qkv!r}; give the rows of "
            "query, key and value in one query group"
        )
    shared = bool(getattr(param, "shared_embedding", False) or getattr(param, "shared", False))
    expert = not getattr(param, "allreduce", True)
    blocks = None
    if parallel and qkv is None:
        tensor = groups.domain("expert" if expert else "dense").tensor
        blocks = _strided_blocks(name, param, partition_dim, tensor.size)
    return Annotation(
        tp_dim=partition_dim if parallel else None,
        blocks=blocks,
        split_blocks=blocks is None,
        qkv=None if qkv is None else tuple(int(rows) for rows in qkv),
        expert=expert,
        tied="embedding" if shared else None,
        sequence_parallel=bool(getattr(param, "sequence_parallel", False)),
        embedding=shared or bool(getattr(param, "is_embedding_or_output_parameter", False)),
        use_muon=getattr(param, "use_muon", None),
        keep_fp32=bool(getattr(param, "keep_in_fp32", False)),
    )


def _strided_blocks(
    name: str, param: nn.Parameter, partition_dim: int, tp_size: int
) -> tuple[int, ...] | None:
    """The blocks that a `partition_stride` above 1 means: gate and up, each divided by itself."""
    stride = int(getattr(param, "partition_stride", 1))
    if stride == 1:
        return None
    if partition_dim != 0 or param.shape[0] % stride:
        raise ConfigError(
            f"parameter {name!r} of shape {tuple(param.shape)}: partition_stride = {stride} along "
            f"dimension {partition_dim} does not divide its rows into blocks; use annotate(blocks=)"
        )
    return (param.shape[0] * tp_size // stride,) * stride
