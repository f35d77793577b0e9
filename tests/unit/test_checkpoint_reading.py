"""Saved boxes against boxes that are asked for; value = global element index."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lw.dist_checkpointing import reading
from megatron_lw.dist_checkpointing.data_file import Blob, write_data_file
from megatron_lw.dist_checkpointing.manifest import Manifest, Piece, TensorRecord
from megatron_lw.dist_checkpointing.reading import carry_out, find_reads
from megatron_lw.dist_checkpointing.runs import run_boxes
from megatron_lw.dist_checkpointing.storage import FileStorage
from megatron_lw.errors import CheckpointError
from megatron_lw.optimizer.boxes import Box


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]


def write(directory, whole: torch.Tensor, cuts: list[int]) -> tuple[Manifest, TensorRecord]:
    """A tensor cut at flat places, its pieces in two files by turns."""
    edges = [0, *sorted(set(cuts) - {0, whole.numel()}), whole.numel()]
    boxes = [
        box
        for low, high in pairwise(edges)
        for box in run_boxes(tuple(whole.shape), low, high - low)
    ]
    files, pieces = [], []
    for rank in range(2):
        mine = boxes[rank::2]
        blobs = [Blob(key="w/master", start=b.start, tensor=part_of(whole, b)) for b in mine]
        if not mine:
            continue
        blobs = [Blob(key=b.key, start=b.start, tensor=b.tensor.contiguous()) for b in blobs]
        written = write_data_file(FileStorage(), directory, rank, blobs)
        pieces += [
            Piece(box=box, file=len(files), offset=offset)
            for box, offset in zip(mine, written.offsets, strict=True)
        ]
        files.append(written.record)
    record = TensorRecord(
        name="w",
        state="master",
        dtype=str(whole.dtype).removeprefix("torch."),
        shape=tuple(whole.shape),
        pieces=tuple(sorted(pieces, key=lambda p: p.box.start)),
    )
    manifest = Manifest(
        step=0,
        topology={},
        params=(),
        tensors=(record,),
        rows=(),
        files=tuple(files),
        children={},
        groups={},
        values={},
        values_by_rank=(),
    )
    return manifest, record


@pytest.mark.parametrize("strip", [8, 64, 1 << 22])
@settings(deadline=None, max_examples=25)
@given(shape=st.lists(st.integers(1, 6), max_size=4), data=st.data())
def test_any_box_of_any_pieces_is_read(tmp_path_factory, strip, shape, data):
    """Bitwise; into strided targets and other dtypes too."""
    numel = math.prod(shape)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    whole = torch.arange(numel).view(shape).to(dtype)
    cuts = data.draw(st.lists(st.integers(0, numel), max_size=4))
    directory = tmp_path_factory.mktemp("pieces")
    manifest, record = write(directory, whole, cuts)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    box = Box(start, extent)
    kind = data.draw(st.sampled_from([dtype, torch.float32]))
    if data.draw(st.booleans()) and shape:
        target = torch.full(extent[::-1], -1, dtype=kind).permute(*reversed(range(len(extent))))
    else:
        target = torch.full(extent, -1, dtype=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "STRIP_NBYTES", strip)
        carry_out(find_reads(record, record.shape, box, target), manifest, directory, FileStorage())
    assert torch.equal(target, part_of(whole, box).to(kind))


def test_what_was_not_saved_is_not_read(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    _, record = write(tmp_path, whole, [4])
    with pytest.raises(CheckpointError, match=r"w/master has the logical shape \[3, 5\]"):
        find_reads(record, (3, 5), Box((0, 0), (3, 5)), torch.zeros(3, 5))
    beyond = Box((2, 0), (2, 4))
    with pytest.raises(CheckpointError, match=r"8 elements .* only 4 of them were saved"):
        find_reads(record, (3, 4), beyond, torch.zeros(2, 4))
    hole = TensorRecord(
        name="w", state="master", dtype="float32", shape=(3, 4), pieces=record.pieces[1:]
    )
    with pytest.raises(CheckpointError, match=r"12 elements .* only 8 of them were saved"):
        find_reads(hole, (3, 4), Box((0, 0), (3, 4)), torch.zeros(3, 4))


def test_a_damaged_chunk_is_named(tmp_path):
    manifest, record = write(tmp_path, torch.arange(12.0).view(3, 4), [4])
    path = tmp_path / manifest.files[0].name
    content = bytearray(path.read_bytes())
    content[record.pieces[0].offset] ^= 4
    path.write_bytes(content)
    target = torch.zeros(3, 4)
    reads = find_reads(record, record.shape, Box((0, 0), (3, 4)), target)
    with pytest.raises(CheckpointError, match=r"chunk 0 .* is damaged.*w/master"):
        carry_out(reads, manifest, tmp_path, FileStorage())
