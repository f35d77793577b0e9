"""Values keep their types and bits through JSON; what has none is refused by its path."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lw.dist_checkpointing.dtypes import CODES, dtype_name, dtype_of
from megatron_lw.dist_checkpointing.values import MAX_DEPTH, Encoded, decode, encode
from megatron_lw.errors import CheckpointError

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters())
    | st.text("$ab\ud83d\ude00", max_size=4)
    | st.binary(max_size=9)
)
keys = scalars.filter(lambda key: key == key)
others = st.sampled_from(
    [
        torch.bfloat16,
        torch.device("cuda", 3),
        torch.device("meta"),
        torch.Size([2, 0]),
        np.float32("nan"),
        np.float64(-0.0),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 - 2j),
    ]
)
values = st.recursive(
    scalars | others,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


def round_trip(value: Any) -> Any:
    """Through JSON text, with the tensors kept aside."""
    kept: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> str:
        assert tensor.is_contiguous() and not tensor.requires_grad
        kept.append(tensor.clone())
        return str(len(kept) - 1)

    text = json.dumps(encode(value, put=put), allow_nan=False)
    return decode(json.loads(text), take=lambda name: kept[int(name)])


def no_tensor(_: object) -> Any:
    raise AssertionError("there are no tensors here")


def canonical(value: object) -> str:
    return json.dumps(encode(value, put=no_tensor), sort_keys=True)


def kind(key: object) -> tuple[str, str]:
    return type(key).__name__, repr(key)


def same(left: Any, right: Any) -> bool:
    """Equal in type, value and bits, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        bits = [t.reshape(-1).view(torch.uint8) for t in (left, right)]
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)
    if isinstance(left, np.ndarray | np.generic):
        alike = left.dtype == right.dtype and left.shape == right.shape
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        if len(left) != len(right):
            return False
        pairs = zip(sorted(left, key=kind), sorted(right, key=kind), strict=True)
        ordered = list(left) == list(right) or not isinstance(left, OrderedDict)
        return ordered and all(same(a, b) and same(left[a], right[b]) for a, b in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return bool(left == right)


@given(values)
def test_any_value_comes_back(value: object) -> None:
    assert same(round_trip(value), value)


@given(values, st.randoms())
def test_equal_values_give_equal_json_and_are_not_changed(
    value: object, chance: random.Random
) -> None:
    def shuffled(each: Any) -> Any:
        if isinstance(each, dict):
            entries = [(key, shuffled(item)) for key, item in each.items()]
            if not isinstance(each, OrderedDict):
                chance.shuffle(entries)
            return type(each)(dict(entries))
        return type(each)(map(shuffled, each)) if type(each) in (list, tuple) else each

    before = copy.deepcopy(value)
    assert canonical(shuffled(value)) == canonical(value)
    assert same(value, before)


@given(values, values)
def test_different_values_give_different_json(left: object, right: object) -> None:
    assert (canonical(left) == canonical(right)) == same(left, right)


@pytest.mark.parametrize("dtype", CODES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    numel = math.prod(shape) * size
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (numel,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)
    assert same(round_trip({"x": [tensor]}), {"x": [tensor]})
    assert dtype_of(dtype_name(dtype), "x") == dtype


def test_views_arrays_and_generator_states_come_back() -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    state = {
        "transposed": matrix.T,
        "gradient": torch.ones(2, requires_grad=True) * 2,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "arrays": (array.T, array[:, ::-1], np.array(7.0), frozen, np.zeros((0, 2), np.uint32)),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(1).bit_generator.state,
        "python": random.getstate(),
    }
    back = round_trip(state)
    assert same(back.pop("gradient"), state.pop("gradient").detach())
    assert same(back.pop("conjugate"), state.pop("conjugate").resolve_conj())
    assert same(back, state)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])


def test_states_of_schedulers_come_back() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    schedulers = torch.optim.lr_scheduler
    for scheduler in (
        schedulers.MultiStepLR(optimizer, [3, 5, 5]),
        schedulers.OneCycleLR(optimizer, 1.0, total_steps=10),
        schedulers.ReduceLROnPlateau(optimizer),
        schedulers.LambdaLR(optimizer, lambda _: 1.0),
    ):
        assert same(round_trip(scheduler.state_dict()), scheduler.state_dict())


def deep(levels: int) -> list[Any]:
    return [deep(levels - 1)] if levels > 1 else []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lr_lambdas": [len]}, r"^scheduler\.lr_lambdas\[0\]: builtin_function_or_method cannot"),
        ({"seen": {1, 2}}, r"^scheduler\.seen: set cannot be saved; leave it out, or turn it"),
        ({3: object()}, r"^scheduler\[3\]: object cannot"),
        (defaultdict(int), "defaultdict cannot"),
        ({(1, 2): 3}, "^scheduler: the key .1, 2. of type tuple cannot"),
        ({math.nan: 3}, "the key nan of type float cannot"),
        ({np.int64(1): 3}, "of type int64 cannot"),
        (torch.nn.Parameter(torch.ones(1)), r"a Parameter cannot .* parameter\.detach\(\)"),
        (torch.ones(1, device="meta"), "a tensor of torch.float32, torch.strided, on meta cannot"),
        (torch.ones(1, dtype=torch.complex128), "a tensor of torch.complex128"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (np.array(["a"]), "an array of <U1 cannot"),
        (np.array([object()]), "an array of object cannot"),
        (np.ones(1, dtype=">f4"), "an array of >f4 cannot"),
        (np.ones(1, dtype=np.complex128), "a tensor of torch.complex128"),
        (np.longdouble(1), "cannot be saved; use a Python value"),
        (np.datetime64("2026-01-01"), "cannot be saved; use a Python value"),
        (1j, "complex cannot"),
        (bytearray(b"a"), "bytearray cannot"),
        (deep(MAX_DEPTH + 2), "nested over 100 deep; is it part of itself"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value, put=lambda _: "", where="scheduler")


def test_a_list_within_itself_is_found() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="is it part of itself"):
        encode(loop, put=no_tensor)


@pytest.mark.parametrize(
    "encoded",
    [
        {"$code": "print"},
        {"$tuple": 3},
        {"$tuple": [], "other": 1},
        {"other": 1, "$tuple": []},
        {"$bytes": "a"},
        {"$bytes": "\u00e9"},
        {"$int": "x"},
        {"$int": 3},
        {"$float": "00"},
        {"$str": "ff"},
        {"$dtype": "nn"},
        {"$dtype": "load"},
        {"$device": "moon"},
        {"$size": ["a"]},
        {"$size": [1.5]},
        {"$scalar": []},
        {"$scalar": ["float32", "00"]},
        {"$scalar": ["float32", ""]},
        {"$scalar": ["object", "0000000000000000"]},
        {"$scalar": [["float32"], {}]},
        {"$dict": [1]},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[{"$dict": []}, 1]]},
        {"$counter": {}},
        {"$tensor": None},
        {"": {"$": []}},
        deep(MAX_DEPTH + 2),
    ],
)
def test_what_encodes_nothing_is_refused(encoded: Encoded) -> None:
    with pytest.raises(CheckpointError):
        decode(encoded, take=no_tensor)


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "$tuple $size $dict $ordered $counter $scalar $bytes $int $float $str a".split()
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)


@given(json_trees)
def test_any_json_decodes_or_is_refused(tree: Encoded) -> None:
    try:
        decode(tree, take=no_tensor)
    except CheckpointError:
        pass
