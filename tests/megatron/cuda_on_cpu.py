"""Lets CUDA-only Megatron code run on the CPU with gloo: values, not races.

`install()` turns, inside this process and for good, every "cuda" device into "cpu" and NCCL into
gloo; streams and events do nothing. Call it before anything imports Megatron.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if str(device).startswith("cuda"):
        return CPU
    return device


class _CudaToCpu(TorchFunctionMode):
    """Every operation that names a CUDA device names the CPU instead."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            args = (args[0], _on_cpu(args[1]), *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron asks for "torch.cuda.BFloat16Tensor" and the like.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Stream:
    """A stream: everything on it has happened already."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def query(self) -> bool:
        return True

    def _nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def _nothing(self, *_: Any) -> None:
        pass

    record = wait = synchronize = _nothing


class _TypedMeta(type):
    """`isinstance(x, torch.cuda.FloatTensor)` and `torch.cuda.FloatTensor([...])`."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype is cls.dtype

    def __call__(cls, *args: Any, **_: Any) -> torch.Tensor:
        if len(args) == 1 and isinstance(args[0], list | tuple):
            return torch.tensor(args[0], dtype=cls.dtype)
        return torch.empty(*args, dtype=cls.dtype)


_TYPES = {
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "DoubleTensor": torch.float64,
    "ByteTensor": torch.uint8,
}
_PROPERTIES = types.SimpleNamespace(
    major=9, minor=0, total_memory=1 << 34, name="cpu", multi_processor_count=1
)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _patch_cuda() -> None:
    cuda: Any = torch.cuda
    for name in (
        "set_device synchronize empty_cache set_stream manual_seed manual_seed_all "
        "reset_peak_memory_stats ipc_collect _lazy_init _lazy_call"
    ).split():
        setattr(cuda, name, _always(None))
    for name in "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split():
        setattr(cuda, name, _always(0))
    cuda.memory.empty_cache = _always(None)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _always(None)
    cuda.is_available = _always(True)
    cuda.device_count = _device_count
    cuda.current_device = _always(CPU)
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.is_current_stream_capturing = _always(False)
    cuda.get_device_capability = _always((9, 0))
    cuda.get_device_properties = _always(_PROPERTIES)
    cuda.get_device_name = _always("cpu")
    cuda.mem_get_info = _always((1 << 34, 1 << 34))
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(
        state
    )
    for name, dtype in _TYPES.items():
        setattr(cuda, name, _TypedMeta(name, (), {"dtype": dtype}))
    accelerator: Any = torch.accelerator
    accelerator.current_device_index = _always(0)
    accelerator.is_available = _always(False)
    accelerator.current_accelerator = _always(None)


def _patch_tensors() -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = _always(None)
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self
    to = module.to

    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    module.to = to_cpu
    optimizer: Any = torch.optim.Optimizer
    optimizer._accelerator_graph_capture_health_check = _always(None)
    optimizer._cuda_graph_capture_health_check = _always(None)


class _Done:
    """The work handle of a collective that was made of synchronous ones."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _patch_groups() -> None:
    distributed: Any = dist
    init, new_group, barrier = dist.init_process_group, dist.new_group, dist.barrier

    def init_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init("gloo", *args, **kwargs)

    def new_gloo(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        kwargs.pop("device_id", None)
        if timeout is not None:
            kwargs["timeout"] = timeout
        return new_group(ranks=ranks, backend="gloo", **kwargs)

    def barrier_anywhere(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    distributed.init_process_group, distributed.new_group = init_gloo, new_gloo
    distributed.barrier = barrier_anywhere


def _patch_collectives() -> None:
    distributed: Any = dist
    all_gather, all_to_all = dist.all_gather, dist.all_to_all_single

    def all_to_all_of_lists(
        output: Any,
        given: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        splits = [
            found.tolist() if isinstance(found, torch.Tensor) else found
            for found in (output_split_sizes, input_split_sizes)
        ]
        return all_to_all(output, given, *splits, group=group, async_op=async_op)

    def uneven_all_gather(
        parts: list[torch.Tensor], given: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        # gloo gathers equal sizes only.
        if len({part.numel() for part in parts}) == 1:
            return all_gather(parts, given, group=group, async_op=async_op)
        group = dist.group.WORLD if group is None else group
        for index, part in enumerate(parts):
            if index == dist.get_rank(group):
                part.copy_(given)
            if part.numel():
                dist.broadcast(part, dist.get_global_rank(group, index), group=group)
        return _Done() if async_op else None

    distributed.all_to_all_single = all_to_all_of_lists
    distributed.all_gather = uneven_all_gather


_installed: list[_CudaToCpu] = []


def install() -> None:
    """Patch this process; a second call does nothing."""
    if _installed:
        return
    _patch_cuda()
    _patch_tensors()
    _patch_groups()
    _patch_collectives()
    _installed.append(_CudaToCpu())
    _installed[0].__enter__()
