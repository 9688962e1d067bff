"""When a run ends: after its last step, when its time is up, or when told; on all ranks at once."""

from __future__ import annotations

import enum
import signal
import time
from types import FrameType

import torch
from config import Config

from lamina.checkpoint import Preemption
from lamina.collectives.engine import all_reduce_small
from lamina.mesh.engine import MeshAxis


class Stop(enum.Enum):
    """Why a run ends."""

    FINISHED = "finished"
    OUT_OF_TIME = "out of time"
    INTERRUPT = "interrupted"
    PREEMPTED = "preempted"


class Stopping:
    """Turns signals into flags and lets the ranks agree on them after every step.

    Signals and clocks reach ranks at different moments; a rank that left the loop alone would leave
    the others waiting. So each step ends with one small message: the loss, and who wants to stop.
    torchrun passes Ctrl-C on to its ranks and waits half a minute, long enough for a checkpoint.
    SIGTERM and SIGUSR1 mean that the machine is wanted back: the run ends with an exit code that
    lets `torchrun --max-restarts` or a requeued SLURM job go on.
    """

    def __init__(self, config: Config, dp: MeshAxis) -> None:
        self.reason: Stop | None = None
        self._dp = dp
        self._interrupted = False
        self._preemption = Preemption(group=dp.group)
        self._seconds = config.train.seconds
        self._started = time.monotonic()
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def share(self, loss: float, *, last: bool) -> float:
        """Agree on whether this was the last step, and average the loss over the ranks."""
        late = 0.0 < self._seconds <= time.monotonic() - self._started
        told = self._preemption.received is not None
        shared = torch.tensor([loss, self._interrupted, told, late], dtype=torch.float64)
        all_reduce_small([shared], self._dp.group)
        total, interrupted, preempted, out_of_time = shared.tolist()
        if last:
            self.reason = Stop.FINISHED
        elif interrupted:
            self.reason = Stop.INTERRUPT
        elif preempted:
            self.reason = Stop.PREEMPTED
        elif out_of_time:
            self.reason = Stop.OUT_OF_TIME
        return total / self._dp.size
