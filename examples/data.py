"""Text for the examples, as bytes: where it comes from, what is held out, how batches are drawn."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# The tables in `encodings` are near copies of each other: a model trained on some of them would
# know the held-out ones by heart. The other folders hold tests and other people's code.
SKIPPED_FOLDERS = frozenset(
    {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
HELD_OUT_SHARE = 20
"""One file in this many, or the last 1 / this many of each file, is held out."""


class DataError(ValueError):
    """The text or the batch sizes cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text in two disjoint parts.

    Attributes:
        train: uint8 [bytes], what batches are drawn from.
        held_out: uint8 [bytes], never trained on.
        source: where it came from, for people.
    """

    train: Tensor
    held_out: Tensor
    source: str


def standard_library_files() -> list[Path]:
    """Python's own source files, in the order of their names.

    Raises:
        DataError: if this Python has no source files (some installations keep only a zip file).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]
    if not files:
        raise DataError(f"no Python source under {root}: pass your own text with --data FILE...")
    return files


def is_held_out(name: str) -> bool:
    """Whether the file of this name is held out: a property of the name, not of its neighbours."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def load_corpus(files: Sequence[Path], sequence: int) -> Corpus:
    """Read text and set part of it aside.

    Args:
        files: one's own text, whose files each give their last part to the held-out text; empty
            for the standard library, where whole files are held out.
        sequence: bytes in a training sequence; both parts must be longer than that.

    Raises:
        DataError: if a file cannot be read, or there is too little text.
    """
    train: list[bytes] = []
    held_out: list[bytes] = []
    if files:
        for path in files:
            text = _read(path)
            cut = len(text) - len(text) // HELD_OUT_SHARE
            train.append(text[:cut])
            held_out.append(text[cut:])
        source = f"{len(files)} files given"
    else:
        library = standard_library_files()
        for path in library:
            (held_out if is_held_out(path.name) else train).append(_read(path))
        source = f"{len(library)} files of Python's standard library, {len(held_out)} held out"
    parts = {"training": b"".join(train), "held-out": b"".join(held_out)}
    for name, text in parts.items():
        if len(text) <= sequence:
            raise DataError(
                f"the {name} text has {len(text)} bytes: it must have more than --sequence "
                f"{sequence}; give more text or a shorter sequence"
            )
    return Corpus(
        train=_as_tensor(parts["training"]), held_out=_as_tensor(parts["held-out"]), source=source
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--data {path}: {error.strerror}") from error


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unigram_entropy(text: Tensor) -> float:
    """Entropy of the byte frequencies of `text` (uint8, not empty), in nats a byte.

    No model that ignores context can have a lower loss on this text, however it was trained.
    """
    share = torch.bincount(text.long(), minlength=256).double() / text.numel()
    return float(torch.special.entr(share).sum())


def draw_starts(numel: int, global_batch: int, sequence: int, seed: int, step: int) -> list[int]:
    """Where the sequences of one step begin in a text of `numel` bytes.

    The draw depends on seed and step alone, so that any number of ranks trains on the same global
    batch, and a run that starts again at a step sees what it would have seen.
    """
    # The generator looks at the low 32 bits of its seed only, so the two numbers are mixed first.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {step}".encode()))
    starts = torch.randint(numel - sequence, (global_batch,), generator=generator)
    return [int(start) for start in starts]


def windows(text: Tensor, starts: Sequence[int], sequence: int) -> tuple[Tensor, Tensor]:
    """Cut inputs and their next bytes out of `text`.

    Returns:
        Tokens and targets, int64 [len(starts), sequence]; a target is the byte after its token.
    """
    both = torch.stack([text[start : start + sequence + 1] for start in starts]).long()
    return both[:, :-1], both[:, 1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """The batches of one data-parallel rank.

    Attributes:
        text: uint8 [bytes].
        global_batch: sequences in a step, over all ranks.
        micro_batches: forwards of a rank in a step, each with as many sequences.
        sequence: bytes in a sequence.
        rank: this rank within the data-parallel group.
        ranks: size of that group.
        seed: seed of the draws.
    """

    text: Tensor
    global_batch: int
    micro_batches: int
    sequence: int
    rank: int
    ranks: int
    seed: int

    def __post_init__(self) -> None:
        """Check that every rank gets the same whole number of micro-batches.

        Raises:
            DataError: naming the two sizes.
        """
        if self.micro_batches < 1:
            raise DataError(f"--micro-batches {self.micro_batches}: must be at least 1")
        if self.global_batch < 1 or self.global_batch % (self.micro_batches * self.ranks):
            raise DataError(
                f"--global-batch {self.global_batch} must be a multiple of --micro-batches "
                f"{self.micro_batches} x {self.ranks} data-parallel ranks"
            )

    def step(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The micro-batches of a step: tokens and targets, each [sequences, sequence]."""
        starts = draw_starts(self.text.numel(), self.global_batch, self.sequence, self.seed, step)
        return self._batches(self.text, starts)

    def held_out(self, text: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of at most `count` windows spread evenly over a held-out text.

        Every rank gets the same number, and windows do not overlap.

        Raises:
            DataError: if there is not one window for each rank.
        """
        last = text.numel() - 1 - self.sequence
        count = min(count, (text.numel() - 1) // self.sequence) // self.ranks * self.ranks
        if not count:
            raise DataError(
                f"{self.ranks} ranks cannot have a held-out window each: there are {text.numel()} "
                "bytes; raise --eval-windows, give more text or a shorter --sequence"
            )
        return self._batches(text, [index * last // max(1, count - 1) for index in range(count)])

    def _batches(self, text: Tensor, starts: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """This rank's windows among those at `starts`, in batches of a micro-batch's size."""
        mine = starts[self.rank :: self.ranks]
        size = self.global_batch // (self.micro_batches * self.ranks)
        parts = (mine[first : first + size] for first in range(0, len(mine), size))
        return [windows(text, part, self.sequence) for part in parts]
