"""Where the time of a step goes, stage by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds of each stage of the last step.

    On CUDA a stage is measured by events on the current stream, read only when asked for, so that
    measuring adds no synchronisation to the step.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """Forget the last step."""
        self._seconds.clear()
        self._events.clear()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure one stage; several under one name in a step add up."""
        if self._cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self._events.append((name, start, stop))
            return
        begun = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def timings(self) -> dict[str, float]:
        """Stage -> seconds, in the order in which the stages ran. On CUDA waits for them to end."""
        if self._cuda:
            for name, start, stop in self._events:
                stop.synchronize()
                seconds = start.elapsed_time(stop) / 1e3
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._events.clear()
        return dict(self._seconds)
