"""Resharding: memory stays below the limit, and what cannot be planned without a run is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save

import megatron_lw
import megatron_lw.dist_checkpointing
from megatron_lw.dist_checkpointing import reading
from megatron_lw.dist_checkpointing.directory import MANIFEST, read_manifest
from megatron_lw.dist_checkpointing.manifest import Manifest, ParamRecord, Piece, TensorRecord
from megatron_lw.dist_checkpointing.manifest_json import to_bytes
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.reshard import FIXED_NBYTES, MIN_MEMORY, reshard
from megatron_lw.dist_checkpointing.target import RankTarget, TargetPlan
from megatron_lw.dist_checkpointing.torch_reader import TorchReader
from megatron_lw.dist_checkpointing.torch_writer import TorchWriter
from megatron_lw.dist_checkpointing.verify import verify
from megatron_lw.errors import CheckpointError, ConfigError
from megatron_lw.optimizer.boxes import Box
from megatron_lw.topology import Topology
from tests import small_checkpoint as small

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
ONE = Topology(dp=1, tp=1, ep=1, pp=1, etp=1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return small.save_small(tmp_path / "run")


def rewrite(directory: Path, **changes: Any) -> None:
    manifest = replace(read_manifest(directory), **changes)
    (directory / MANIFEST).write_bytes(to_bytes(manifest))


def with_param(manifest: Manifest, name: str, **changes: Any) -> Manifest:
    params = (replace(p, **changes) if p.name == name else p for p in manifest.params)
    return replace(manifest, params=tuple(params))


def test_batches_stay_below_the_limit_and_pieces_are_cut_where_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise; a limit that a piece of 48 MiB and all pieces together exceed."""
    state = {"large": torch.arange(12 << 20, dtype=torch.float32).view(3, -1)}
    state |= {f"small.{i}": torch.full((1 << 20,), float(i)) for i in range(5)}
    save(state, storage_writer=TorchWriter(tmp_path / "a", step=1), no_dist=True)
    batches: list[int] = []
    plain = reading.carry_out

    def counted(reads: Iterable[reading.Read], *rest: Any) -> None:
        reads = list(reads)
        batches.append(sum(read.target.nbytes for read in reads))
        plain(reads, *rest)

    monkeypatch.setattr("megatron_lw.dist_checkpointing.reshard.carry_out", counted)
    told: list[tuple[int, int]] = []
    reshard(
        tmp_path / "a",
        tmp_path / "b",
        Topology(dp=2, tp=1, ep=1, pp=1, etp=1),
        max_memory=MIN_MEMORY,
        progress=lambda *at: told.append(at),
    )
    assert max(batches) <= (MIN_MEMORY - FIXED_NBYTES) / 2 == 16 << 20
    assert sum(batches) == sum(t.nbytes for t in state.values()) == told[-1][0] == told[-1][1]
    assert len(batches) > 3 and verify(tmp_path / "b").is_whole
    reader = CheckpointReader(tmp_path / "b")
    for record in reader.manifest.tensors:
        assert torch.equal(reader.tensor(record), state[record.name])


def odd_model() -> nn.Module:
    model = nn.Linear(4, 3)
    model.register_parameter("none", nn.Parameter(torch.empty(0, 3)))
    codes = nn.Parameter(torch.arange(6, dtype=torch.uint8), requires_grad=False)
    model.register_parameter("codes", codes)
    return model


def test_parameters_without_elements_and_frozen_integers_are_saved_and_resharded(
    tmp_path: Path,
) -> None:
    """A save refused frozen integers as weights to be stepped; states of nothing had no place."""
    groups = megatron_lw.ParallelGroups.single()
    built = []
    for _ in range(2):
        ddp = megatron_lw.DistributedDataParallel(odd_model(), groups)
        config = megatron_lw.OptimizerConfig(lr=0.1)
        built.append((ddp, megatron_lw.get_megatron_optimizer(config, [ddp])))
    (ddp, optimizer), (other, its_optimizer) = built
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    directory = megatron_lw.dist_checkpointing.save(tmp_path / "a", ddp, optimizer, step=1)
    assert verify(directory).is_whole

    alike = reshard(tmp_path / "a", tmp_path / "b", ONE)
    files = [[each.read_bytes() for each in sorted(d.glob("rank*"))] for d in (directory, alike)]
    assert files[0] == files[1] and len(files[0]) == 1
    reshard(tmp_path / "a", tmp_path / "c", Topology(dp=3, tp=1, ep=1, pp=1, etp=1))
    assert verify(tmp_path / "c").is_whole
    other.module.codes.data.zero_()
    megatron_lw.dist_checkpointing.load(tmp_path / "c", other, its_optimizer)
    found = other.state_dict()
    assert found["none"].shape == (0, 3) and found["codes"].tolist() == [0, 1, 2, 3, 4, 5]
    for name, value in ddp.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_state_dict_of_torch_keeps_its_keys(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0), "none": torch.empty(0, 2)}, "step": 5}
    save(state, storage_writer=TorchWriter(tmp_path / "a", step=1), no_dist=True)
    reshard(tmp_path / "a", tmp_path / "b", Topology(dp=4, tp=1, ep=1, pp=1, etp=1))
    found = {"model": {"w": torch.zeros(6), "none": torch.empty(0, 2)}}
    load(found, storage_reader=TorchReader(tmp_path / "b"), no_dist=True)
    assert torch.equal(found["model"]["w"], state["model"]["w"])


def test_values_that_differ_between_ranks_are_not_dropped_in_silence(
    saved: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(saved)
    shared = small.save_small(tmp_path / "other", extra={"rng": torch.arange(3), "samples": 96})
    manifest = read_manifest(shared)
    extra = dict(manifest.values["extra"])  # type: ignore[arg-type]
    own = {"rng": extra.pop("rng")}
    values = {**manifest.values, "extra": extra}
    rewrite(shared, values=values, values_by_rank=(own,))
    target = Topology(dp=2, tp=1, ep=1, pp=1, etp=1)
    with pytest.raises(CheckpointError, match=r"extra\['rng'\] differs between the 1 ranks .* 2"):
        reshard(shared, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()
    made = read_manifest(reshard(shared, tmp_path / "out", target, drop_rank_values=True))
    assert made.values["extra"] == {"samples": 96} and made.values_by_rank == ()
    assert not [record for record in made.tensors if record.name.startswith("extra/")]
    same = read_manifest(reshard(shared, tmp_path / "same", ONE))
    assert same.values_by_rank == () and set(same.values["extra"]) == {"rng", "samples"}


def test_the_padding_of_a_vocabulary_follows_the_target(saved: Path, tmp_path: Path) -> None:
    topology = Topology(dp=1, tp=5, ep=1, pp=1, etp=1)
    with pytest.raises(CheckpointError, match=r"'tied/words' stores 12 .* tp=5 .*vocab-multiple"):
        reshard(saved, tmp_path / "a", topology)
    made = read_manifest(reshard(saved, tmp_path / "b", topology, vocab_multiple=3))
    [words] = [param for param in made.params if param.name == "tied/words"]
    assert (words.shape, words.stored_rows) == ((10, 6), 15)
    padded = [r for row in made.rows for r in row.runs if r.name == "tied/words"]
    assert sum(run.numel for run in padded) == 60 and verify(tmp_path / "b").is_whole


@pytest.mark.parametrize(
    ("changes", "topology", "message"),
    [
        ({}, Topology(dp=1, tp=1, ep=1, pp=3, etp=1), "pp=3 is more than the model's 2 layers"),
        (
            {"tp_dim": 1},
            Topology(dp=1, tp=4, ep=1, pp=1, etp=4),
            r"parameter 'layers.0.w' stores 6 of shape \(8, 6\) .* tp=4",
        ),
        (
            {"tp_dim": 0, "blocks": (5, 3)},
            Topology(dp=1, tp=2, ep=1, pp=1, etp=2),
            r"parameter 'layers.0.w': blocks \(5, 3\)",
        ),
        (
            {"domain": "expert"},
            Topology(dp=2, tp=1, ep=2, pp=1, etp=1),
            "parameter 'layers.0.w': ep=2 needs to know its expert",
        ),
        (
            {"domain": "expert", "names": ("layers.0.experts.7.w",)},
            Topology(dp=2, tp=1, ep=2, pp=1, etp=1),
            "ep=2 does not divide the 1 experts",
        ),
        (
            {"domain": "expert", "is_stack": True, "matrices": 8},
            Topology(dp=3, tp=1, ep=3, pp=1, etp=1),
            "parameter 'layers.0.w' stores 8 .* ep=3",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    saved: Path, tmp_path: Path, changes: dict[str, Any], topology: Topology, message: str
) -> None:
    manifest = with_param(read_manifest(saved), "layers.0.w", **changes)
    (saved / MANIFEST).write_bytes(to_bytes(manifest))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        reshard(saved, tmp_path / "out", topology)
    assert not list((tmp_path / "out").rglob(MANIFEST))


def test_limits_and_targets_that_are_taken_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_memory = 1000"):
        reshard(saved, tmp_path / "out", ONE, max_memory=1000)
    reshard(saved, tmp_path / "out", ONE)
    with pytest.raises(CheckpointError, match="is there already"):
        reshard(saved, tmp_path / "out", ONE)


def test_a_tensor_that_no_rank_would_write_is_not_lost_in_silence(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TargetPlan.rank

    def without(self: TargetPlan, rank: int) -> RankTarget:
        target = plain(self, rank)
        kept = tuple(w for w in target.wanted if w.record.name != "frozen")
        return replace(target, wanted=kept)

    monkeypatch.setattr(TargetPlan, "rank", without)
    with pytest.raises(CheckpointError, match="'frozen/value' has no place in the target"):
        reshard(saved, tmp_path / "out", ONE)
    assert not list((tmp_path / "out").rglob(MANIFEST))


def owned(manifest: Manifest, shape: tuple[int, ...], matrices: int) -> Manifest:
    """The manifest with a state of `layers.0.w` that is no row."""
    state = TensorRecord(
        name="layers.0.w",
        state="second_moment",
        dtype="float32",
        shape=shape,
        pieces=(Piece(box=Box((0,) * len(shape), shape), file=0, offset=0),),
    )
    manifest = replace(manifest, tensors=(*manifest.tensors, state))
    return with_param(manifest, "layers.0.w", matrices=matrices)


def holders(manifest: Manifest, topology: Topology) -> list[tuple[int, Box]]:
    plan = TargetPlan(manifest, topology)
    return [
        (rank, wanted.box)
        for rank in range(topology.world)
        for wanted in plan.rank(rank).wanted
        if wanted.record.state == "second_moment"
    ]


def test_a_state_at_the_owner_goes_to_one_owner(saved: Path) -> None:
    manifest = read_manifest(saved)
    topology = Topology(dp=3, tp=2, ep=1, pp=1, etp=1)
    [(_, box)] = holders(owned(manifest, (8, 1), 1), topology)
    assert box == Box((0, 0), (8, 1))
    found = holders(owned(manifest, (4, 3), 2), topology)
    assert sorted(box.start for _, box in found) == [(0, 0), (2, 0)]
    assert {box.shape for _, box in found} == {(2, 3)}
    [(_, box)] = holders(owned(manifest, (), 2), topology)
    assert box == Box((), ())


def test_every_copy_of_a_tied_weight_has_rows_and_one_is_written(saved: Path) -> None:
    small.add_copy(saved, "output.weight")
    plan = TargetPlan(read_manifest(saved), Topology(dp=2, tp=1, ep=1, pp=2, etp=1))
    ranks = [plan.rank(rank) for rank in range(4)]
    rows = [row.rank for each in ranks for row in each.rows if "tied" in row.bucket]
    writers = {each.rank for each in ranks for w in each.wanted if w.record.name == "tied/words"}
    assert rows == [0, 1, 2, 3] and writers == {0}  # its 60 elements fit into one row
    layers: list[list[ParamRecord]] = [
        [param for param in each.params if param.name.startswith("layers")] for each in ranks
    ]
    assert [sorted({p.name[7] for p in mine}) for mine in layers] == [["0"], ["0"], ["1"], ["1"]]
