"""When a run ends: after its last step, when its time is up, or on Ctrl-C; on all ranks at once."""

from __future__ import annotations

import enum
import signal
import time
from types import FrameType

import torch
from config import Config

from lamina.collectives import all_reduce_small
from lamina.mesh import MeshAxis


class Stop(enum.Enum):
    """Why a run ends."""

    FINISHED = "finished"
    OUT_OF_TIME = "out of time"
    INTERRUPT = "interrupted"


class Stopping:
    """Turns SIGINT into a flag and lets the ranks agree on it after every step.

    Signals and clocks reach ranks at different moments; a rank that left the loop alone would leave
    the others waiting. So each step ends with one small message: the loss, and who wants to stop.
    torchrun passes Ctrl-C on to its ranks and waits half a minute, long enough for a checkpoint.
    """

    def __init__(self, config: Config, dp: MeshAxis) -> None:
        self.reason: Stop | None = None
        self._dp = dp
        self._interrupted = False
        self._seconds = config.train.seconds
        self._started = time.monotonic()
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def share(self, loss: float, *, last: bool) -> float:
        """Agree on whether this was the last step, and average the loss over the ranks."""
        late = 0.0 < self._seconds <= time.monotonic() - self._started
        shared = torch.tensor([loss, self._interrupted, late], dtype=torch.float64)
        all_reduce_small([shared], self._dp.group)
        total, interrupted, out_of_time = shared.tolist()
        if last:
            self.reason = Stop.FINISHED
        elif interrupted:
            self.reason = Stop.INTERRUPT
        elif out_of_time:
            self.reason = Stop.OUT_OF_TIME
        return total / self._dp.size
