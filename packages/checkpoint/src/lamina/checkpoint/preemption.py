"""Turns signals to leave into a flag that all ranks see after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch.distributed as dist

from lamina.checkpoint.ranks import Ranks

RESUME_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: "try again". Not 0, so torchrun restarts; a script that starts ranks
itself (srun python) can tell it from a crash, but torchrun's own exit code is 1 for both."""


class Preemption:
    """Turns signals into a flag that all ranks see after the same step.

        with Preemption() as preemption:
            while step < last:
                ...
                if preemption.requested():
                    manager.save(step, state)
                    manager.close()
                    raise SystemExit(preemption.exit_code)

    A signal reaches ranks at different moments, or only one of them; a rank that left its loop
    alone would leave the others waiting in a collective. So `requested` is collective: one small
    message. Signal handlers only set a flag, for nothing else is safe in them.

    Args:
        signals: what to listen to. SIGTERM is what torchrun and clouds send, SIGUSR1 what
            `sbatch --signal=USR1@120` sends to the processes of a step two minutes before the
            end. A torchrun there has to be told to pass it on:
            `--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`.
        group: the ranks that must agree; None is all.

    Attributes:
        exit_code: `RESUME_EXIT_CODE`.

    Raises:
        ValueError: not in the main thread, where alone Python lets signals be handled.

    Examples:
        >>> preemption = Preemption()
        >>> preemption.requested()
        False
        >>> preemption.close()
    """

    exit_code = RESUME_EXIT_CODE

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("Preemption must be made in the main thread: signals arrive there")
        self._ranks = Ranks(group)
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {
            number: signal.signal(number, self._note) for number in signals
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

    def requested(self) -> bool:
        """Whether any rank has been told to leave (collective)."""
        return self._ranks.any([self.received is not None])[0]

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before = {}

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
