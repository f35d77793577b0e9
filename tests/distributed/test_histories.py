"""Histories of maxima through checkpoints: the bytes of delayed weights are those of the save.

Class *bitwise*.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_lw.dist_checkpointing.catalogue import state_dict_sources
from megatron_lw.dist_checkpointing.export import export
from megatron_lw.dist_checkpointing.manifest import HISTORY
from megatron_lw.dist_checkpointing.reader import CheckpointReader
from megatron_lw.dist_checkpointing.reshard import reshard
from megatron_lw.dist_checkpointing.verify import verify
from megatron_lw.fp8.recipe import Recipe
from megatron_lw.topology import Topology
from tests.distributed import history_cases as cases
from tests.distributed.fp8_cases import same
from tests.harness import run_ranks

NUM_WEIGHTS = 6
"""Quantised weights of the model of the cases."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[cases.State]]:
    """A checkpoint of two ranks with three maxima, and the weights of each rank at the save."""
    folder = tmp_path_factory.mktemp("saved")
    results = run_ranks(cases.save, 2, folder, "delayed")
    return folder, [before for before, _, _ in results]


def histories(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder)
    records = [record for record in reader.manifest.tensors if record.state == HISTORY]
    return {record.name: reader.tensor(record) for record in records}


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, background: bool) -> None:
    """Weights, planes, histories, masters, states, losses and norms on every rank."""
    whole = run_ranks(cases.save, 2, tmp_path, "delayed", background)
    again = run_ranks(cases.load, 2, tmp_path, "delayed", {}, True)
    for (before, seen, end), (after, told, seen_again, end_again) in zip(whole, again, strict=True):
        same(before, after)
        same(end, end_again)
        assert seen == seen_again and told == []
        pasts = [t for label, t in before.items() if label.startswith("history")]
        assert len(pasts) == NUM_WEIGHTS and all(past.all() for past in pasts)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_has_the_same_bytes(
    saved: tuple[Path, list[cases.State]], ranks: int
) -> None:
    folder, [before, *_] = saved
    for after, told, _, _ in run_ranks(cases.load, ranks, folder, "delayed", {}):
        same(before, after)
        assert told == []


def test_weights_alone_come_with_their_scales(saved: tuple[Path, list[cases.State]]) -> None:
    folder, before = saved
    results = run_ranks(cases.load, 2, folder, "delayed", {"weights_only": True})
    for state, (after, told, _, _) in zip(before, results, strict=True):
        same(state, after)
        assert told == []


def test_recipes_change_both_ways(saved: tuple[Path, list[cases.State]], tmp_path: Path) -> None:
    """Said aloud, once; and a history that starts anew gives other bytes, so that it matters."""
    folder, [before, _] = saved
    keys = [f"{name}/{HISTORY}" for name in histories(folder)]
    (_, told, _, _), (_, silent, _, _) = run_ranks(cases.load, 2, folder, "block", {})
    listed = ", ".join(keys)
    assert told == [f"histories of maxima that no weight follows are dropped: {listed}"]
    assert silent == []
    run_ranks(cases.resave, 2, folder, "block", tmp_path)
    assert histories(tmp_path) == {}
    (anew, told, _, _), (_, silent, _, _) = run_ranks(cases.load, 2, tmp_path, "delayed", {})
    listed = ", ".join(sorted(keys))
    assert told == [f"histories of maxima that were not saved start anew: {listed}"]
    assert silent == []
    scales = [label for label in before if label.startswith("row_scale")]
    differ = [label for label in scales if not torch.equal(before[label], anew[label])]
    assert len(scales) == NUM_WEIGHTS and differ
    for label in (label for label in before if label.startswith("history")):
        assert torch.equal(anew[label][:, :1], before[label][:, :1])
        assert not anew[label][:, 1:].any()


@pytest.mark.parametrize("length", [2, 5])
def test_another_length_keeps_the_newest(
    saved: tuple[Path, list[cases.State]], length: int
) -> None:
    folder, [before, _] = saved
    recipe = Recipe(format="delayed", history=length)
    (after, told, _, _), (_, silent, _, _) = run_ranks(cases.load, 2, folder, recipe, {})
    assert len(told) == 1 and "another length or number of parts" in told[0]
    assert silent == []
    count = 1 + min(3, length)
    for label in (label for label in before if label.startswith("history")):
        assert after[label].shape == (1, 1 + length)
        assert torch.equal(after[label][:, :count], before[label][:, :count])
        assert not after[label][:, count:].any()


def test_a_history_that_is_left_out_stays(saved: tuple[Path, list[cases.State]]) -> None:
    folder, _ = saved
    options = {"leave_out": [f"mid.weight/{HISTORY}"]}
    for after, told, _, _ in run_ranks(cases.load, 2, folder, "delayed", options):
        assert told == []
        assert (after["history of parameter 'mid.weight'"][:, 1:] == 99.0).all()
        assert (after["history of parameter 'up.weight'"] < 99.0).all()


def test_parts_of_tensor_parallelism_have_their_own(tmp_path: Path) -> None:
    """The same layout: all of it. Another one: the largest maxima of all parts."""
    whole = run_ranks(cases.save_divided, 2, tmp_path, 2)
    label = "history of parameter '0.weight'"
    assert not torch.equal(whole[0][0][label], whole[1][0][label])
    again = run_ranks(cases.load_divided, 2, tmp_path, 2)
    for (before, end), (after, told, end_again) in zip(whole, again, strict=True):
        same(before, after)
        same(end, end_again)
        assert told == []
    [(one, told, _)] = run_ranks(cases.load_divided, 1, tmp_path, 1)
    assert len(told) == 1 and told[0].endswith(f": 0.weight/{HISTORY}")
    parts = torch.cat([before[label] for before, _ in whole])
    assert torch.equal(one[label], parts.amax(0, keepdim=True))
    kept = "history of parameter '1.weight'"
    assert torch.equal(one[kept], whole[0][0][kept])
    made = reshard(tmp_path, tmp_path / "made", Topology(dp=2, tp=2, etp=2, ep=1, pp=1))
    for rank, (after, told, _) in enumerate(run_ranks(cases.load_divided, 4, made, 2)):
        same(whole[rank % 2][0], after)
        assert told == []


def test_tools_know_histories(saved: tuple[Path, list[cases.State]], tmp_path: Path) -> None:
    """verify, reshard, export and the keys of torch's reader."""
    folder, [before, _] = saved
    assert verify(folder).problems == ()
    found = histories(folder)
    assert len(found) == NUM_WEIGHTS
    for name, history in found.items():
        assert torch.equal(history, before[f"history of parameter {name!r}"][:, 1:])
    manifest = CheckpointReader(folder).manifest
    keys = state_dict_sources(manifest).keys()
    assert keys >= {f"optimizer.{name}.{HISTORY}" for name in found}
    assert export(folder, tmp_path / "exported").num_weights == len(manifest.params)
    for ranks in (2, 3):
        made = reshard(
            folder,
            tmp_path / str(ranks),
            Topology(dp=ranks, tp=1, etp=1, ep=1, pp=1),
            bucket_size=20000,
        )
        assert verify(made).problems == ()
        same(histories(made), found)
        for after, told, _, _ in run_ranks(cases.load, ranks, made, "delayed", {}):
            same(before, after)
            assert told == []
    mine, theirs = (
        {file.name: file.read_bytes() for file in made.rglob("*.safetensors")}
        for made in (folder, tmp_path / "2")
    )
    assert mine == theirs and len(mine) == 2
