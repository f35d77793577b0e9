"""Data files are safetensors files; whatever is read from one has been checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from megatron_lw.dist_checkpointing import data_file
from megatron_lw.dist_checkpointing.data_file import Blob, LazyBlob, WrittenFile, write_data_file
from megatron_lw.dist_checkpointing.dtypes import CODES, dtype_name
from megatron_lw.dist_checkpointing.headers import HeaderEntry, file_order, header
from megatron_lw.dist_checkpointing.manifest import CHUNK_NBYTES, FileRecord
from megatron_lw.dist_checkpointing.storage import FileStorage
from megatron_lw.dist_checkpointing.verified_file import VerifiedFile
from megatron_lw.errors import CheckpointError
from tests.crash_storage import MemoryStorage

STORAGE = FileStorage()


def written(directory: Path, blobs: Sequence[Blob | LazyBlob], rank: int = 3) -> WrittenFile:
    file = write_data_file(STORAGE, directory, rank, blobs)
    assert file is not None
    return file


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return raw.view(dtype)


def mixed() -> list[Blob]:
    """Every dtype, in an order that leaves none aligned unless the writer sees to it."""
    blobs = [
        Blob(key="none", start=(0, 0), tensor=torch.empty(3, 0)),
        Blob(key="nil", start=(0,), tensor=torch.empty(0, dtype=torch.bool)),
        Blob(key="bias", start=(), tensor=torch.tensor(7, dtype=torch.uint8)),
    ]
    for dtype in CODES:
        tensor = random_bits(dtype, 3, 5)
        blobs.append(Blob(key=f"w/{dtype_name(dtype)}", start=(2, 0), tensor=tensor))
    return blobs


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_the_library_of_the_format_reads_our_files(tmp_path: Path) -> None:
    blobs = mixed()
    file = written(tmp_path, blobs)
    read = safetensors.torch.load_file(tmp_path / file.record.name)
    assert sorted(read) == sorted(blob.entry.name for blob in blobs)
    for blob in blobs:
        found = read[blob.entry.name]
        assert (found.dtype, found.shape) == (blob.tensor.dtype, blob.tensor.shape)
        assert bits(found) == bits(blob.tensor)
    with safetensors.safe_open(tmp_path / file.record.name, "pt") as opened:
        part = opened.get_slice("w/float64@2,0")[1:, 2:4]
    assert bits(part.contiguous()) == bits(read["w/float64@2,0"][1:, 2:4].contiguous())


def test_offsets_and_checksums_say_what_is_in_the_file(tmp_path: Path) -> None:
    blobs = [*mixed(), Blob(key="big", start=(0,), tensor=torch.randn(CHUNK_NBYTES // 2))]
    file = written(tmp_path, blobs)
    content = (tmp_path / file.record.name).read_bytes()
    assert len(content) == file.record.nbytes > 2 * CHUNK_NBYTES
    starts = range(0, len(content), CHUNK_NBYTES)
    sums = [xxhash.xxh3_64_hexdigest(content[s : s + CHUNK_NBYTES]) for s in starts]
    assert file.record.checksums == tuple(sums)
    named_after = " ".join([str(len(content)), *sums]).encode()
    digest = hashlib.blake2b(named_after, digest_size=8).hexdigest()
    assert file.record.name == f"rank{file.record.rank:05d}-{digest}.safetensors"
    for blob, offset in zip(blobs, file.offsets, strict=True):
        assert offset % blob.tensor.element_size() == 0
        assert list(content[offset : offset + blob.tensor.nbytes]) == bits(blob.tensor)
    start = header([blobs[i].entry for i in file_order([blob.entry for blob in blobs])])
    assert content.startswith(start)
    assert len(start) == min(file.offsets)


def test_equal_content_gives_one_file_and_other_content_another(tmp_path: Path) -> None:
    blobs = [Blob(key="w", start=(0,), tensor=torch.arange(9.0))]
    first = written(tmp_path, blobs)
    assert written(tmp_path, blobs) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.record.name]
    assert written(tmp_path, [Blob(key="w", start=(9,), tensor=torch.arange(9.0))]) != first
    assert written(tmp_path, blobs, rank=4).record.name != first.record.name
    assert len(list(tmp_path.iterdir())) == 3


def test_no_blobs_no_file(tmp_path: Path) -> None:
    assert write_data_file(STORAGE, tmp_path, 0, []) is None
    assert list(tmp_path.iterdir()) == []


def test_staged_and_lazy_tensors_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies on a device goes through buffers; here all of it does, over many chunks."""
    sizes = (1, CHUNK_NBYTES, 17, 6 * CHUNK_NBYTES + 3, 5)
    blobs = [
        Blob(key=str(i), start=(0,), tensor=torch.randint(0, 256, (n,), dtype=torch.uint8))
        for i, n in enumerate(sizes)
    ]
    direct = written(tmp_path, blobs)
    made: list[str] = []

    def lazy(blob: Blob) -> LazyBlob:
        def make() -> Iterator[torch.Tensor]:
            made.append(blob.key)
            yield from blob.tensor.clone().reshape(-1).split(1_000_003)

        return LazyBlob(entry=blob.entry, make=make)

    assert written(tmp_path, [lazy(blob) for blob in blobs]) == direct
    assert made == [blob.key for blob in blobs]
    monkeypatch.setattr(data_file, "_on_host", lambda tensor: tensor.numel() == 17)
    assert written(tmp_path, blobs) == direct


def test_one_element_with_odd_strides_is_written_and_read(tmp_path: Path) -> None:
    """It counts as contiguous, yet its bytes cannot be viewed with those strides."""
    tensor = torch.arange(4.0)[2::2]
    assert tensor.is_contiguous() and tensor.stride() == (2,)
    [offset] = (file := written(tmp_path, [Blob(key="w", start=(0,), tensor=tensor)])).offsets
    out = torch.zeros(4)[1::3]
    out = out[:1]
    with VerifiedFile(STORAGE, tmp_path, file.record, None) as opened:
        opened.read_into(offset, out)
    assert out.tolist() == [2.0]


@pytest.mark.parametrize(
    ("blobs", "message"),
    [
        ([Blob(key="w", start=(0,), tensor=torch.ones(1))] * 2, "^w@0: written twice"),
        ([Blob(key="w", start=(0, 1), tensor=torch.ones(2, 3).T)], "^w@0,1: strides .1, 3. of"),
        ([Blob(key="w", start=(), tensor=torch.tensor(1j))], None),
        (
            [Blob(key="w", start=(), tensor=torch.ones((), dtype=torch.complex128))],
            "^w@: no checkpoint holds complex128",
        ),
        (
            [
                LazyBlob(
                    entry=HeaderEntry("w", (0,), (2,), torch.int8), make=lambda: [torch.ones(2)]
                )
            ],
            "^w@0: made as torch.float32",
        ),
        (
            [
                LazyBlob(
                    entry=HeaderEntry("w", (0,), (2,), torch.float32), make=lambda: [torch.ones(1)]
                )
            ],
            "^w@0: 1 elements made",
        ),
    ],
)
def test_what_cannot_be_written_is_named(
    tmp_path: Path, blobs: list[Blob | LazyBlob], message: str | None
) -> None:
    if message is None:
        assert written(tmp_path, blobs).record.nbytes
        return
    with pytest.raises(CheckpointError, match=message):
        write_data_file(STORAGE, tmp_path, 0, blobs)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.*cannot be written"):
        written(tmp_path / "nowhere", mixed())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def record(directory: Path) -> FileRecord:
    torch.manual_seed(0)
    values = torch.randint(0, 256, (3 * CHUNK_NBYTES,), dtype=torch.uint8)
    return written(directory, [Blob(key="w", start=(0,), tensor=values)]).record


def opened(directory: Path, record: FileRecord) -> VerifiedFile:
    return VerifiedFile(STORAGE, directory, record, lambda start, stop: f"w {start}-{stop}")


def test_reads_any_range(directory: Path, record: FileRecord) -> None:
    content = (directory / record.name).read_bytes()
    edges = sorted(
        {0, 1, 77, record.nbytes - 1, record.nbytes}
        | {c * CHUNK_NBYTES + d for c in (1, 2, 3) for d in (-1, 0, 1)}
    )
    with opened(directory, record) as file:
        for start in edges:
            for stop in edges:
                if start <= stop:
                    out = torch.zeros(stop - start, dtype=torch.uint8)
                    file.read_into(start, out)
                    assert out.numpy().tobytes() == content[start:stop]
        out = torch.zeros(2, 3)
        file.read_into(128, out)
        assert out.numpy().tobytes() == content[128:152]


def test_a_read_in_order_reads_each_chunk_once(
    directory: Path, record: FileRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    with opened(directory, record) as file:
        inner = file._file.read_into

        def counted(offset: int, out: memoryview) -> None:
            reads.append(offset)
            inner(offset, out)

        monkeypatch.setattr(file._file, "read_into", counted)
        step = CHUNK_NBYTES // 3 + 1
        for start in range(0, record.nbytes, step):
            file.read_into(start, memoryview(bytearray(min(step, record.nbytes - start))))
    assert reads == [chunk * CHUNK_NBYTES for chunk in range(4)]


def test_a_damaged_chunk_is_found_by_any_read_of_it(
    directory: Path, record: FileRecord, tmp_path: Path
) -> None:
    content = bytearray((directory / record.name).read_bytes())
    content[CHUNK_NBYTES + 5] ^= 4
    (tmp_path / record.name).write_bytes(content)
    message = (
        f"{record.name}: chunk 1 .bytes {CHUNK_NBYTES} to {2 * CHUNK_NBYTES}. is damaged: "
        f".*; it holds w {CHUNK_NBYTES}-{2 * CHUNK_NBYTES}$"
    )
    with opened(tmp_path, record) as file:
        file.read_into(CHUNK_NBYTES - 9, memoryview(bytearray(9)))
        for start, count in (
            (2 * CHUNK_NBYTES - 1, 1),
            (CHUNK_NBYTES - 1, 2),
            (0, record.nbytes),
        ):
            with pytest.raises(CheckpointError, match=message):
                file.read_into(start, memoryview(bytearray(count)))
        [problem] = file.check()
        assert "chunk 1" in problem
    with opened(directory, record) as file:
        assert file.check() == []


def test_size_and_presence_are_checked_first(record: FileRecord, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        opened(tmp_path, record)
    (tmp_path / record.name).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=f"5 bytes, but the manifest .* {record.nbytes}"):
        opened(tmp_path, record)


@pytest.mark.parametrize("start", [-1, 3 * CHUNK_NBYTES + 1000])
def test_reads_outside_are_refused(directory: Path, record: FileRecord, start: int) -> None:
    with opened(directory, record) as file:
        with pytest.raises(CheckpointError, match="do not lie in its"):
            file.read_into(start, memoryview(bytearray(1)))


def test_what_is_written_is_flushed_meanwhile_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_file, "_FLUSH_NBYTES", CHUNK_NBYTES)
    storage = MemoryStorage()
    storage.make_directory(Path("/run"))
    tensor = torch.randint(0, 256, (8 * CHUNK_NBYTES,), dtype=torch.uint8)
    assert write_data_file(storage, Path("/run"), 0, [Blob(key="w", start=(0,), tensor=tensor)])
    kinds = [each.kind for each in storage.operations if each.kind in ("write", "flush", "replace")]
    assert kinds.count("flush") > 1 and kinds[-2:] == ["flush", "replace"]


@pytest.mark.parametrize("fails", ["create", "write", "flush", "replace", "flush_directory"])
def test_a_full_disk_is_said_and_leaves_no_file_of_a_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Also where it is flushing beside writing that fails."""
    monkeypatch.setattr(data_file, "_FLUSH_NBYTES", CHUNK_NBYTES)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    storage = FileStorage()
    of_file = fails in ("write", "flush")
    monkeypatch.setattr(type(storage.create(tmp_path / "x")) if of_file else storage, fails, fail)
    tensor = torch.randint(0, 256, (4 * CHUNK_NBYTES,), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"rank00000-.*cannot be written: .*No space left"):
        write_data_file(storage, tmp_path, 0, [Blob(key="w", start=(0,), tensor=tensor)])
    assert len(list(tmp_path.glob("*.safetensors"))) == (fails == "flush_directory")
