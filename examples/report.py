"""What a run shows and leaves behind: progress, where the time goes, a CSV file, a loss curve."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of the CSV file.

    Attributes:
        step: steps taken so far, from 1.
        loss: mean training loss of the global batch before this step, nats a byte.
        grad_norm: norm of the whole gradient before clipping.
        lr: learning rate of this step.
        tokens_per_second: of all ranks together, in this step.
        held_out: held-out loss after this step, None where it was not measured.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    held_out: float | None = None


class Clock:
    """Seconds by stage. Stages do not nest, so that their sum can be held against the whole."""

    def __init__(self) -> None:
        """Start with no stage and the whole at zero."""
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return time.perf_counter() - self._start

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds to a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside as the stage `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def split(self, stage: str, parts: Mapping[str, float]) -> None:
        """Take named parts out of a stage: each becomes a stage `<stage>: <part>` of its own."""
        for part, seconds in parts.items():
            self.add(f"{stage}: {part}", seconds)
            self.add(stage, -seconds)


class Reporter:
    """Shows progress: a bar where there is a terminal, a line now and then where there is none."""

    def __init__(self, steps: int, *, enabled: bool, log_every: int) -> None:
        """Prepare to show `steps` steps; a rank that is not `enabled` shows nothing."""
        self.enabled = enabled
        self.records: list[StepRecord] = []
        self._steps = steps
        self._log_every = log_every
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("steps", total=steps, numbers="")

    def __enter__(self) -> Reporter:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str | Table) -> None:
        """Print, above the bar if there is one."""
        self._console.print(text, markup=False)

    def step(self, record: StepRecord) -> None:
        """Keep a step's numbers and show them."""
        self.records.append(record)
        numbers = (
            f"loss {record.loss:.3f}  grad norm {record.grad_norm:.2f}  "
            f"{record.tokens_per_second:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, numbers=numbers)
        elif record.step % self._log_every == 0 or record.step in (1, self._steps):
            self.say(f"step {record.step}/{self._steps}  {numbers}  lr {record.lr:.2e}")
        if record.held_out is not None:
            self.say(f"step {record.step}/{self._steps}  held-out loss {record.held_out:.4f}")


def time_table(clock: Clock, steps: int) -> Table:
    """Where the time went, the largest stage first; what no stage covers is the row `other`."""
    elapsed = clock.elapsed
    rows = sorted(clock.seconds.items(), key=lambda row: -row[1])
    rows.append(("other", elapsed - sum(clock.seconds.values())))
    rows.append(("all", elapsed))
    table = Table(title="Where the time goes")
    table.add_column("stage")
    for column in ("seconds", "ms a step", "share"):
        table.add_column(column, justify="right")
    for name, seconds in rows:
        table.add_row(
            name, f"{seconds:.2f}", f"{1e3 * seconds / steps:.2f}", f"{seconds / elapsed:.1%}"
        )
    return table


def write_csv(path: Path, records: Sequence[StepRecord]) -> None:
    """Write one line a step, with the names of the fields as the header."""
    names = [field.name for field in fields(StepRecord)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for record in records:
            writer.writerow([getattr(record, name) for name in names])


def write_curve(path: Path, records: Sequence[StepRecord], entropy: float) -> bool:
    """Draw training and held-out loss against steps, with the unigram entropy as a line.

    Returns:
        Whether matplotlib is there to draw with.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([r.step for r in records], [r.loss for r in records], linewidth=0.8, label="training")
    measured = [(r.step, r.held_out) for r in records if r.held_out is not None]
    axes.plot(*zip(*measured, strict=True), "o-", label="held out")
    axes.axhline(entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats a byte", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
    return True
