"""Real SIGKILLs of a group of processes that does nothing but save.

    python -m tests.killed_saves DIRECTORY --rounds 200 --seed 1

Each round forks two ranks. They load the newest checkpoint, compare it, and save on and on until
they are killed: at once, or one a moment before the other; every other round as soon as a save is
seen under way, so that a slow or loaded machine hits saves too. Then what is there is verified: it
is the last checkpoint that a save returned for, or one that was being written, whole. Forked,
because starting Python and torch anew would take most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.worker import set_environment

set_environment()  # before torch is imported

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  torch's optimizers import it: a second, once instead of per fork
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import megatron_lw  # noqa: E402
from megatron_lw.dist_checkpointing import latest, load, save  # noqa: E402
from megatron_lw.dist_checkpointing.directory import leftovers, step_directory  # noqa: E402
from megatron_lw.dist_checkpointing.verify import verify  # noqa: E402

RANKS = 2
KEEP_LAST = 2
MAX_SAVES = 3  # that are let end in a round
GLANCE = 2e-4  # seconds between two looks at the directory
PATIENCE = 60.0


@dataclass(kw_only=True)
class Summary:
    """What the rounds met."""

    rounds: int = 0
    saves: int = 0
    unfinished: int = 0
    committed_unsaid: int = 0


class Killed(Exception):
    """What a round must not find."""


def set_up(store: Path, rank: int) -> tuple[megatron_lw.DistributedDataParallel, object]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 48))
    ddp = megatron_lw.DistributedDataParallel(
        model, megatron_lw.ParallelGroups.create(), megatron_lw.DDPConfig(bucket_size=5000)
    )
    optimizer = megatron_lw.get_megatron_optimizer(
        megatron_lw.OptimizerConfig(optimizer="muon", lr=0.1), [ddp]
    )
    return ddp, optimizer


def fill(model: nn.Module, step: int) -> None:
    """Weights that say which step they are of."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step).view(-1)[::2].neg_()


def differs(model: nn.Module, step: int) -> bool:
    for param in model.parameters():
        expected = torch.full_like(param, step)
        expected.view(-1)[::2].neg_()
        if not torch.equal(param, expected):
            return True
    return False


def rank_main(rank: int, root: Path, store: Path, pipe: int) -> None:
    """Load, compare, and save until killed; each step is told before and after its save."""
    ddp, optimizer = set_up(store, rank)
    step = 0
    if latest(root) is not None:
        fill(ddp.module, -1)
        loaded = load(root, ddp, optimizer)
        step = loaded.step
        if differs(ddp.module, step) or loaded.extra["step"] != step:
            raise Killed(f"rank {rank}: not the weights of step {step}")
    while True:
        step += 1
        fill(ddp.module, step)
        optimizer.reload_model_params()
        if rank == 0:
            os.write(pipe, f"begin {step}\n".encode())
        save(root, ddp, optimizer, extra={"step": step}, step=step, keep_last=KEEP_LAST)
        if rank == 0:
            os.write(pipe, f"done {step}\n".encode())


def fork_rank(rank: int, root: Path, store: Path, pipe: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        rank_main(rank, root, store, pipe)
    except BaseException:
        os.write(pipe, f"failed {rank}\n{traceback.format_exc()}".encode())
        os._exit(1)
    os._exit(0)


class Ranks:
    """The processes of one round, and what they tell."""

    def __init__(self, root: Path, store: Path, chance: random.Random) -> None:
        self.chance = chance
        self.told = b""
        self._pipe, write_end = os.pipe()
        self._children = [fork_rank(rank, root, store, write_end) for rank in range(RANKS)]
        os.close(write_end)

    def listen(self, seconds: float, word: bytes = b"", times: int = 0) -> None:
        """Read for so many seconds; or until a word has come so many times, or all have ended."""
        end = time.monotonic() + seconds
        while not times or self.told.count(word) < times:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._pipe, 1 << 16) if ready else b""
            if not part:
                return
            self.told += part

    def await_save(self, root: Path) -> None:
        """Until files of a save that has not ended are there; or all have ended."""
        end = time.monotonic() + PATIENCE
        while not leftovers(root) and time.monotonic() < end and b"failed" not in self.told:
            self.listen(GLANCE)

    def kill(self, seconds: float) -> None:
        """SIGKILL to all, in random order; every other time with moments between them."""
        apart = self.chance.random() < 0.5
        for child in self.chance.sample(self._children, len(self._children)):
            os.kill(child, signal.SIGKILL)
            if apart:
                self.listen(self.chance.uniform(0, seconds))
        for child in self._children:
            os.waitpid(child, 0)
        self.listen(PATIENCE)
        os.close(self._pipe)

    def steps(self, word: str) -> list[int]:
        """The steps that were told with a word, by a rank that had no reason to fail yet."""
        lines = self.told.split(b"failed")[0].decode().split()
        pairs = zip(lines[::2], lines[1::2], strict=False)
        return [int(step) for found, step in pairs if found == word]


def one_round(root: Path, store: Path, chance: random.Random, summary: Summary) -> None:
    """Let the ranks save a few times, then kill them some way into the next save, or in a later."""
    ranks = Ranks(root, store, chance)
    ranks.listen(PATIENCE, b"begin", 1)
    start, saves = time.monotonic(), chance.randint(1, MAX_SAVES)
    ranks.listen(PATIENCE, b"done", saves)
    duration = (time.monotonic() - start) / saves
    ranks.listen(chance.uniform(0, 1.2 * duration))
    if summary.rounds % 2:
        ranks.await_save(root)
    alive = b"failed" not in ranks.told and ranks.told.count(b"done") >= saves
    ranks.kill(duration)
    if not alive:
        raise Killed(f"the ranks ended by themselves:\n{ranks.told.decode()}")
    check(root, ranks.steps("begin"), ranks.steps("done"), summary)


def check(root: Path, begun: list[int], done: list[int], summary: Summary) -> None:
    newest = max(done, default=begun[0] - 1)
    found = latest(root)
    summary.rounds += 1
    summary.saves += len(done)
    summary.unfinished += bool(leftovers(root))
    if found is None:
        if newest:
            raise Killed(f"step {newest} was saved, but there is no checkpoint")
        return
    report = verify(root)
    if report.problems:
        raise Killed("\n".join(report.problems))
    if found not in (step_directory(root, newest), step_directory(root, begun[-1])):
        raise Killed(f"step {newest} was saved and {begun[-1]} begun, but {found} is the newest")
    summary.committed_unsaid += found != step_directory(root, newest)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(given.seed)
    summary = Summary()
    for index in range(given.rounds):
        store = given.directory / f"store-{index}"
        one_round(given.directory / "run", store, chance, summary)
    print(json.dumps(asdict(summary)))


if __name__ == "__main__":
    main()
