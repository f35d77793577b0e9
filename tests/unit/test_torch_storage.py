"""`torch.distributed.checkpoint` on one process: reading ours, and writing in our format."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, load, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from megatron_lw.dist_checkpointing.directory import MANIFEST, read_manifest
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.torch_reader import TorchLoadPlanner, TorchReader
from megatron_lw.dist_checkpointing.torch_writer import TorchWriter
from megatron_lw.dist_checkpointing.verify import verify
from megatron_lw.errors import CheckpointError
from tests import small_checkpoint as small

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
STATES = {"words.weight": "exp_avg", "layers.0.w": "momentum"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return small.save_small(tmp_path / "run")


class Request(torch.Tensor):
    """A part of a vector of 7 that is asked for, wherever it lies; by torch's own protocol."""

    values: torch.Tensor
    start: int

    def size(self, dim: None = None) -> torch.Size:  # type: ignore[override]
        return torch.Size([7])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.start]), torch.Size([len(self.values)]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.values


def part(start: int, numel: int) -> Request:
    request = torch.empty(0).as_subclass(Request)
    request.start, request.values = start, torch.full((numel,), -1.0, dtype=torch.bfloat16)
    return request


def refused(message: str, call: Callable[[], None]) -> None:
    with pytest.raises(CheckpointException) as raised:
        call()
    assert message in str(raised.value)


def test_a_plain_model_is_loaded_from_the_masters(saved: Path) -> None:
    """Bitwise: bf16(master), for every copy of a tied weight too."""
    small.add_copy(saved, "output.weight")
    names = {name: torch.Size(shape) for name, shape in small.SHAPES.items()}
    names["output.weight"] = names["words.weight"]
    model = {n: torch.empty(s, dtype=torch.bfloat16) for n, s in names.items()}
    model |= {"frozen": torch.empty_like(small.FROZEN), "calls": torch.empty_like(small.CALLS)}
    load({"model": model}, storage_reader=TorchReader(saved.parent))
    for name in small.SHAPES:
        assert torch.equal(model[name], small.master(name).to(torch.bfloat16))
    assert torch.equal(model["output.weight"], model["words.weight"])
    assert torch.equal(model["frozen"], small.FROZEN)
    assert torch.equal(model["calls"], small.CALLS)


def test_masters_and_states_are_loaded_as_they_are(saved: Path) -> None:
    """Bitwise."""
    wanted = {
        name: {"master": torch.empty(small.SHAPES[name]), state: torch.empty(small.SHAPES[name])}
        for name, state in STATES.items()
    }
    load({"optimizer": wanted}, storage_reader=TorchReader(saved))
    for name, state in STATES.items():
        assert torch.equal(wanted[name]["master"], small.master(name))
        assert torch.equal(wanted[name][state], small.master(name) * 10)


def test_values_arrive_without_pickle(saved: Path) -> None:
    wanted: dict[str, Any] = {"extra": None}
    message = "'extra' is no tensor, and DefaultLoadPlanner would unpickle it"
    refused(message, lambda: load(wanted, storage_reader=TorchReader(saved)))
    load(wanted, storage_reader=TorchReader(saved), planner=TorchLoadPlanner())
    assert wanted == {"extra": {"samples": 96}}


@pytest.mark.parametrize(
    ("key", "wanted", "message"),
    [
        ("layers.9.w", torch.empty(2), "model.layers.9.w"),
        ("layers.0.w", torch.empty(8, 6), "'model.layers.0.w' was saved as torch.bfloat16"),
        ("layers.0.w", torch.empty(6, 8, dtype=torch.bfloat16), "model.layers.0.w"),
        ("layers.1.b", part(5, 3), "'model.layers.1.b': 3 elements from (5,) are asked for, "),
        ("layers.1.b", part(7, 2), "of which 0 were saved"),
    ],
)
def test_what_was_not_saved_is_refused_by_name(
    saved: Path, key: str, wanted: object, message: str
) -> None:
    refused(message, lambda: load({"model": {key: wanted}}, storage_reader=TorchReader(saved)))
    if isinstance(wanted, Request):
        assert (wanted.values == -1).all()


def test_a_part_of_a_tensor_is_loaded(saved: Path) -> None:
    wanted = part(2, 4)
    load({"model": {"layers.1.b": wanted}}, storage_reader=TorchReader(saved))
    assert torch.equal(wanted.values, small.master("layers.1.b")[2:6].to(torch.bfloat16))


def test_a_flipped_bit_and_a_missing_checkpoint_are_named(saved: Path, tmp_path: Path) -> None:
    [data] = saved.glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    wanted = {"model": {"layers.0.w": torch.empty(8, 6, dtype=torch.bfloat16)}}
    refused("is damaged", lambda: load(wanted, storage_reader=TorchReader(saved)))
    refused("no checkpoint there", lambda: load(wanted, storage_reader=TorchReader(tmp_path / "x")))


class OtherPlanner(LoadPlanner):
    """A planner whose requests cannot be looked into."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...
    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, *args: Any) -> None: ...
    def resolve_bytes(self, *args: Any) -> Any: ...
    def resolve_tensor(self, *args: Any) -> Any: ...
    def commit_tensor(self, *args: Any) -> None: ...


def test_a_planner_that_hides_its_requests_is_refused(saved: Path) -> None:
    reader = TorchReader(saved)
    refused(
        "planner = OtherPlanner", lambda: load({}, storage_reader=reader, planner=OtherPlanner())
    )


STATE = {
    "model": {
        "w": torch.arange(12.0).view(3, 4).t(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "half": torch.arange(5, dtype=torch.bfloat16)[::2],
    },
    "step": 3,
    "history": [1, 2.5, None, float("inf")],
    "mixed": (b"raw", torch.tensor([1.5, 2.5]), np.float32(0.1)),
    "list": [torch.ones(2), torch.zeros(1)],
}


def blank() -> dict[str, Any]:
    return {
        "model": {name: torch.full_like(t, 9).contiguous() for name, t in STATE["model"].items()},
        "step": None,
        "history": None,
        "mixed": None,
        "list": [torch.empty(2), torch.empty(1)],
    }


def test_a_state_dict_of_torch_is_written_in_our_format(tmp_path: Path) -> None:
    """Bitwise, types of values included; no pickle in any file."""
    save(STATE, storage_writer=TorchWriter(tmp_path, step=4))
    directory = tmp_path / "step-0000000004"
    assert verify(tmp_path).problems == ()
    assert all(pickle.PROTO + b"\x02" not in p.read_bytes() for p in directory.iterdir())
    found = blank()
    load(found, storage_reader=TorchReader(tmp_path), planner=TorchLoadPlanner())
    for name, tensor in STATE["model"].items():
        assert found["model"][name].dtype == tensor.dtype
        assert torch.equal(found["model"][name], tensor)
    assert (found["step"], found["history"]) == (3, STATE["history"])
    raw, tensor, number = found["mixed"]
    assert (raw, type(number), number) == (b"raw", np.float32, np.float32(0.1))
    assert torch.equal(tensor, torch.tensor([1.5, 2.5]))
    assert all(map(torch.equal, found["list"], STATE["list"]))
    names = {record.name for record in read_manifest(directory).tensors}
    assert {"model.w", "model.empty", "list.0"} <= names


def test_equal_state_dicts_give_equal_files(tmp_path: Path) -> None:
    """Bitwise."""
    for root in ("a", "b"):
        save(STATE, storage_writer=TorchWriter(tmp_path / root, step=4))
    first, second = (sorted((tmp_path / r / "step-0000000004").iterdir()) for r in ("a", "b"))
    assert [p.name for p in first] == [p.name for p in second]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_a_checkpoint_id_says_where_to_write_and_read(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path, storage_writer=TorchWriter("/no", step=1))
    found = {"w": torch.zeros(2)}
    load(found, checkpoint_id=tmp_path, storage_reader=TorchReader("/no"))
    assert found["w"].tolist() == [1, 1]


def test_what_cannot_be_saved_is_named_and_nothing_committed(tmp_path: Path) -> None:
    state = {"schedule": {"rule": len}}
    writer = TorchWriter(tmp_path, step=1)
    refused(
        "schedule.rule: builtin_function_or_method cannot be saved",
        lambda: save(state, storage_writer=writer),
    )
    state = {"extra/w": torch.ones(1)}
    refused("'extra/w': names of tensors inside values", lambda: save(state, storage_writer=writer))
    assert not list(tmp_path.rglob(MANIFEST))


def test_ranks_that_plan_alone_are_refused(tmp_path: Path) -> None:
    writer, state = TorchWriter(tmp_path, step=1), {"w": torch.ones(1)}
    with pytest.raises(CheckpointError, match="use_collectives = False"):
        save(state, storage_writer=writer, use_collectives=False)
    assert not list(tmp_path.rglob(MANIFEST))


def test_values_of_a_state_dict_are_found_by_name(tmp_path: Path) -> None:
    save({"a": {"b": 1}, "$odd": "text"}, storage_writer=TorchWriter(tmp_path, step=1))
    reader = CheckpointReader(tmp_path)
    assert reader.value(reader.manifest.values["state_dict"], "state_dict") == [
        ["$odd", "text"],
        ["a.b", 1],
    ]
