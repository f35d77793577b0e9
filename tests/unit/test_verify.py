"""`verify` finds every single flipped bit, and every file that is not what was written."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lw.dist_checkpointing import coverage, data_file, verified_file
from megatron_lw.dist_checkpointing.directory import MANIFEST, read_manifest, resolve
from megatron_lw.dist_checkpointing.headers import placed
from megatron_lw.dist_checkpointing.manifest import checksum
from megatron_lw.dist_checkpointing.manifest_json import from_bytes, to_bytes
from megatron_lw.dist_checkpointing.storage import FileStorage
from megatron_lw.dist_checkpointing.verify import VerifyReport, verify
from megatron_lw.errors import CheckpointError
from tests.checkpoint_files import STEP, write_checkpoint
from tests.crash_storage import Content, MemoryStorage

ROOT = Path("/runs/first")
FLIPS = 1000
CHUNK_NBYTES = 128  # so that small files have many chunks


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coverage, data_file, verified_file):
        monkeypatch.setattr(module, "CHUNK_NBYTES", CHUNK_NBYTES)


def checkpoint() -> tuple[MemoryStorage, dict[str, Content]]:
    """A whole checkpoint in memory and its files by name."""
    storage = MemoryStorage()
    directory = write_checkpoint(storage, ROOT)
    found = {name: storage.names[directory / name] for name in storage.list(directory)}
    return storage, {name: content for name, content in found.items() if content is not None}


def regions(files: dict[str, Content]) -> dict[str, tuple[str, range]]:
    """Parts of the files, between which the flips are divided evenly."""
    found: dict[str, tuple[str, range]] = {}
    manifest = from_bytes(files[MANIFEST].data, MANIFEST)
    for record, pieces in zip(manifest.files, placed(manifest), strict=True):
        header = int.from_bytes(files[record.name].data[:8], "little")
        text = files[record.name].data[8 : 8 + header].rstrip()
        found[f"{record.rank} length"] = record.name, range(8)
        found[f"{record.rank} header"] = record.name, range(8, 8 + len(text))
        if len(text) < header:
            found[f"{record.rank} fill"] = record.name, range(8 + len(text), 8 + header)
        assert pieces[0][0] == 8 + header
        found[f"{record.rank} data"] = record.name, range(8 + header, record.nbytes)
    data = files[MANIFEST].data
    body = data.index(b'"manifest":')
    found["digest"] = MANIFEST, range(body - 67, body - 2)
    found["head"] = MANIFEST, range(body - 67)
    found["body"] = MANIFEST, range(body, len(data) - 2)
    found["tail"] = MANIFEST, range(len(data) - 2, len(data))
    return found


def test_every_flipped_bit_is_found() -> None:
    storage, files = checkpoint()
    assert verify(ROOT, storage=storage).is_whole
    places = regions(files)
    assert len(places) >= 11
    chance = random.Random(0)
    missed, named = [], Counter[str]()
    for index in range(FLIPS):
        region = list(places)[index % len(places)]
        name, bytes_ = places[region]
        byte, bit = chance.choice(bytes_), chance.randrange(8)
        content, whole = files[name], files[name].data
        content.data = whole[:byte] + bytes([whole[byte] ^ 1 << bit]) + whole[byte + 1 :]
        report = verify(ROOT, storage=storage)
        content.data = whole
        if report.is_whole or name not in report.problems[0]:
            missed.append((region, byte, bit, report.problems))
        named[region] += 1
    assert missed == []
    assert sum(named.values()) == FLIPS and min(named.values()) >= FLIPS // len(places)
    assert verify(ROOT, storage=storage).is_whole


def test_a_damaged_chunk_says_what_it_holds() -> None:
    storage, files = checkpoint()
    manifest = read_manifest(resolve(ROOT, storage), storage)
    [tensor] = [each for each in manifest.tensors if each.key == "layers.0.weight/momentum"]
    piece = tensor.pieces[0]
    content = files[manifest.files[piece.file].name]
    data = bytearray(content.data)
    data[piece.offset] ^= 1
    content.data = bytes(data)
    [problem] = verify(ROOT, storage=storage).problems
    assert "is damaged: XXH3" in problem and "it holds layers.0.weight/m" in problem
    data[piece.offset] ^= 1
    data[3] ^= 1
    content.data = bytes(data)
    [problem] = verify(ROOT, storage=storage).problems
    assert problem.endswith("it holds the header")


class TestFiles:
    """Whole files that are wrong, on a disk."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return write_checkpoint(FileStorage(), tmp_path)

    def data(self, directory: Path) -> list[Path]:
        return sorted(directory.glob("*.safetensors"))

    def problems(self, directory: Path) -> str:
        report = verify(directory)
        assert not report.is_whole
        return "\n".join(report.problems)

    def test_a_whole_one_has_no_problems(self, directory: Path) -> None:
        seen: list[tuple[int, int]] = []
        report = verify(str(directory.parent), progress=lambda *done: seen.append(done))
        assert (report.path, report.problems, report.leftovers) == (directory, (), ())
        assert report.nbytes == sum(path.stat().st_size for path in self.data(directory))
        assert report.manifest is not None and report.manifest.step == STEP
        assert seen == sorted(seen) and seen[-1] == (report.nbytes, report.nbytes)

    @pytest.mark.parametrize("size", [0, 7, 100, -1])
    def test_truncated(self, directory: Path, size: int) -> None:
        for path in (*self.data(directory), directory / MANIFEST):
            whole = path.read_bytes()
            os.truncate(path, size % len(whole))
            assert path.name in self.problems(directory)
            path.write_bytes(whole)
        assert verify(directory).is_whole

    @pytest.mark.parametrize("more", [b"\0", b"\n", b" ", b"{}", bytes(CHUNK_NBYTES)])
    def test_over_long(self, directory: Path, more: bytes) -> None:
        for path in (*self.data(directory), directory / MANIFEST):
            whole = path.read_bytes()
            path.write_bytes(whole + more)
            assert path.name in self.problems(directory)
            path.write_bytes(whole)
        assert verify(directory).is_whole

    def test_missing(self, directory: Path) -> None:
        first, second = self.data(directory)
        first.unlink()
        assert f"{first}: cannot be opened" in self.problems(directory)
        second.unlink()
        second.mkdir()
        assert f"{second}: " in self.problems(directory)
        (directory / MANIFEST).unlink()
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            verify(directory)

    def test_swapped(self, directory: Path) -> None:
        first, second = self.data(directory)
        os.rename(first, directory / "aside")
        os.rename(second, first)
        os.rename(directory / "aside", second)
        found = self.problems(directory)
        assert first.name in found and second.name in found

    def test_taken_from_another_checkpoint(self, directory: Path, tmp_path: Path) -> None:
        other = write_checkpoint(FileStorage(), tmp_path, step=STEP + 1, seed=1)
        mine, theirs = self.data(directory), self.data(other)
        assert mine[0].stat().st_size == theirs[0].stat().st_size
        shutil.copy(theirs[0], mine[0])
        assert mine[0].name in self.problems(directory)
        shutil.copy(other / MANIFEST, directory / MANIFEST)
        found = self.problems(directory)
        assert f"its manifest is that of step {STEP + 1}" in found
        assert theirs[0].name in found and "cannot be opened" in found

    def test_duplicated(self, directory: Path) -> None:
        first, second = self.data(directory)
        whole = second.read_bytes()
        shutil.copy(first, second)
        assert second.name in self.problems(directory)
        second.write_bytes(whole)
        copies = [directory / "copy", directory / f"{first.name}.bak"]
        for each in copies:
            shutil.copy(first, each)
            assert f"{each}: belongs to no checkpoint" in self.problems(directory)
            each.unlink()
        stale = first.with_name("rank00009-0123456789abcdef.safetensors")
        shutil.copy(first, stale)
        report = verify(directory)
        assert (report.problems, report.leftovers) == ((), (stale,))

    def test_replaced_by_another_file_of_its_size(self, directory: Path) -> None:
        for path in self.data(directory):
            whole = path.read_bytes()
            path.write_bytes(bytes(len(whole)))
            assert path.name in self.problems(directory)
            path.write_bytes(whole[::-1])
            assert path.name in self.problems(directory)
            path.write_bytes(whole)


class Payload:
    """Unpickling it makes a directory."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


def refused(directory: Path) -> VerifyReport:
    report = verify(directory)
    assert not report.is_whole
    return report


def test_pickles_are_refused_wherever_they_are(tmp_path: Path) -> None:
    trace = tmp_path / "executed"
    directory = write_checkpoint(FileStorage(), tmp_path / "run")
    payload = pickle.dumps(Payload(trace))
    for path in sorted(directory.iterdir()):
        whole = path.read_bytes()
        for content in (payload, payload.ljust(len(whole), b"\0"), payload + whole):
            path.write_bytes(content[: max(len(whole), len(payload))])
            assert path.name in refused(directory).problems[0]
            if path.name == MANIFEST:
                with pytest.raises(CheckpointError, match="not the manifest of a checkpoint"):
                    read_manifest(directory)
        path.write_bytes(whole)
    for name in (".metadata", "common.pt", "__0_0.distcp", "rank00000-0123456789abcdef.pt"):
        (directory / name).write_bytes(payload)
        assert f"{directory / name}: belongs to no checkpoint" in refused(directory).problems[0]
        (directory / name).unlink()
    assert verify(directory).is_whole and not trace.exists()
    pickle.loads(payload)
    assert trace.exists(), "the payload would have shown"


def test_a_header_that_says_something_else_is_found_behind_right_checksums() -> None:
    """A writer that is not ours could sign anything; the header is still held to the manifest."""
    storage, files = checkpoint()
    directory = resolve(ROOT, storage)
    manifest = read_manifest(directory, storage)
    record = manifest.files[0]
    data = files[record.name].data.replace(b"F32", b"I32", 1)
    chunks = range(0, len(data), CHUNK_NBYTES)
    sums = tuple(checksum([data[c : c + CHUNK_NBYTES]]) for c in chunks)
    name = data_file.file_name(record.rank, len(data), sums)
    storage.names[directory / name] = Content(data, len(data))
    signed = replace(record, name=name, checksums=sums)
    files[MANIFEST].data = to_bytes(replace(manifest, files=(signed, *manifest.files[1:])))
    [problem] = verify(ROOT, storage=storage).problems
    assert problem == f"{directory / name}: its header does not say what the manifest does"
