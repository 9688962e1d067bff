"""A run: its directory, when it ends, and how it goes on."""

from __future__ import annotations

import enum
import itertools
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from config import Config

from lamina.checkpoint import Preemption
from lamina.collectives.engine import all_reduce_small
from lamina.mesh import Runtime

RUNS = Path("runs")


def command(changes: Mapping[str, object], *, anew: bool = False) -> str:
    """The command of this run with some options changed; `anew` leaves its own options out."""
    words, dropped = [], anew
    for word in sys.argv[1:]:
        if word.startswith("--") and not anew:
            dropped = word[2:].partition("=")[0].replace("_", "-") in changes
        words += [] if dropped else [word]
    words += [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    return f"python3 noxfile.py -s train -- {shlex.join(words)}"


@dataclass(frozen=True)
class Run:
    """One run: its settings and directory, and this rank of it."""

    config: Config
    directory: Path
    runtime: Runtime

    def main_first(self, work: Callable[[], object]) -> None:
        """Do something on the first rank while the others wait; each names what fails there."""
        told = [""]
        try:
            if self.runtime.is_main:
                work()
        except Exception as error:
            told = [f"{type(error).__name__}: {error}"]
            raise
        finally:
            dist.broadcast_object_list(told)
        if told[0]:
            raise RuntimeError(f"the first rank failed: {told[0]}")

    def settings(self) -> dict[str, Any]:
        """What decides the numbers that come out of a run."""
        settings: dict[str, Any] = json.loads(json.dumps(asdict(self.config)))
        del settings["run"]["directory"], settings["run"]["export"], settings["train"]["seconds"]
        del settings["log"], settings["ranks"]
        return settings

    def begin(self) -> None:
        """Make the directory, and note the settings in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(self.settings(), indent=1))

    def goes_on(self) -> bool:
        """Whether the directory holds this run, unfinished; it may have been killed early."""
        made = self.directory / "config.json"
        if (self.directory / "report.json").exists():
            return False
        return not made.exists() or bool(json.loads(made.read_text()) == self.settings())


def open_run(config: Config, runtime: Runtime) -> Run:
    """Choose the directory, on the first rank, and tell all.

    A named directory is used as it is. Otherwise the newest of runs/NAME, runs/NAME-2, ... is
    continued if it is unfinished and has the same settings; if not, the next one is begun.
    """
    chosen = [config.run.directory]
    if runtime.is_main and not config.run.directory:
        names = (config.run.name + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
        pairs = itertools.pairwise(Run(config, RUNS / name, runtime) for name in names)
        newest, after = next(two for two in pairs if not two[1].directory.exists())
        chosen = [str((newest if newest.goes_on() else after).directory)]
    dist.broadcast_object_list(chosen)
    run = Run(config, Path(chosen[0]), runtime)
    run.main_first(run.begin)
    return run


class Stop(enum.Enum):
    """Why a run ends, the strongest reason first."""

    FINISHED = "finished"
    INTERRUPT = "interrupted"
    PREEMPTED = "preempted"
    OUT_OF_TIME = "out of time"


class Stopping:
    """Turns signals into flags and lets the ranks agree on them after every step.

    Signals and clocks reach ranks at different moments; a rank that left the loop alone would leave
    the others waiting. So each step ends with one small message: who wants to stop.
    torchrun passes Ctrl-C on to its ranks and waits half a minute, long enough for a checkpoint.
    SIGTERM and SIGUSR1 mean that the machine is wanted back.
    """

    def __init__(self, seconds: float) -> None:
        self.reason: Stop | None = None
        self._signals = Preemption((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        self._deadline = time.monotonic() + (seconds or float("inf"))

    @property
    def told(self) -> bool:
        """Whether the run ends because somebody said so, and goes on later."""
        return self.reason in (Stop.INTERRUPT, Stop.PREEMPTED)

    def agree(self, *, last: bool) -> None:
        """Agree on whether this was the last step."""
        told, late = self._signals.received, time.monotonic() >= self._deadline
        mine = (last, told is signal.SIGINT, told not in (None, signal.SIGINT), late)
        votes = torch.tensor(mine, dtype=torch.uint8)
        all_reduce_small([votes], dist.group.WORLD, op="max")
        self.reason = next((r for r, vote in zip(Stop, votes, strict=True) if vote), None)

    def leave(self) -> None:
        """After a preemption, exit so that torchrun --max-restarts or a requeued job goes on."""
        if self.reason is Stop.PREEMPTED:
            raise SystemExit(self._signals.exit_code)
