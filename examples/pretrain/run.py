"""A run: its directory, when it ends, and how it goes on."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from config import Config

from lamina.checkpoint import Preemption
from lamina.collectives.engine import all_reduce_small, broadcast
from lamina.mesh import Runtime

RUNS = Path("runs")
_COMMAND = "python3 noxfile.py -s train --"


def command(changes: Mapping[str, object], *, anew: bool = False) -> str:
    """The command of this run with some options changed; `anew` leaves its own options out."""
    own = [] if anew else _without(changes, sys.argv[1:])
    new = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    return f"{_COMMAND} {shlex.join([*own, *new])}"


def _without(names: Collection[str], words: Iterable[str]) -> Iterator[str]:
    """The words of a command line without options of these names, `--name value` or not."""
    dropped = False
    for word in words:
        if word.startswith("--"):
            dropped = word[2:].partition("=")[0].replace("_", "-") in names
        if not dropped:
            yield word


@dataclass(frozen=True)
class Run:
    """One run: its directory, and this rank of it."""

    directory: Path
    runtime: Runtime

    def main_first(self, work: Callable[[], None]) -> None:
        """Do something on the first rank while the others wait; a failure there ends all."""
        failure: Exception | None = None
        if self.runtime.is_main:
            try:
                work()
            except Exception as error:
                failure = error
        if _agree(int(failure is not None)):
            raise failure or RuntimeError("the first rank failed; its own error says why")


def open_run(config: Config, runtime: Runtime) -> Run:
    """Choose the directory, on the first rank, and tell all.

    A named directory is used as it is. Otherwise the newest of runs/NAME, runs/NAME-2, ... is
    continued if it is unfinished and has the same settings; if not, the next one is begun.
    """
    if config.run.directory:
        directory = Path(config.run.directory)
    else:
        number = _agree(_choose_number(config) if runtime.is_main else 0)
        directory = _numbered(config.run.name, number)
    run = Run(directory, runtime)
    run.main_first(lambda: _begin(config, run))
    return run


def _numbered(name: str, number: int) -> Path:
    return RUNS / (name if number == 1 else f"{name}-{number}")


def _choose_number(config: Config) -> int:
    numbers = itertools.count(1)
    number = next(n for n in numbers if not _numbered(config.run.name, n + 1).exists())
    newest = _numbered(config.run.name, number)
    return number + (newest.exists() and not _can_continue(newest, config))


def _can_continue(directory: Path, config: Config) -> bool:
    if (directory / "report.json").exists():
        return False
    try:
        settings = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return True  # killed before it began
    return settings == settings_of(config)


def settings_of(config: Config) -> dict[str, Any]:
    """Return what decides the numbers that come out of a run."""
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    del settings["run"]["directory"], settings["run"]["export"], settings["train"]["seconds"]
    del settings["log"], settings["ranks"]
    return settings


def _begin(config: Config, run: Run) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "config.json").write_text(json.dumps(settings_of(config), indent=1))


def _agree(value: int) -> int:
    """Return the first rank's value on every rank."""
    shared = torch.tensor([value], dtype=torch.int64)
    broadcast(shared, dist.group.WORLD).wait()
    return int(shared)


class Stop(enum.Enum):
    """Why a run ends."""

    FINISHED = "finished"
    OUT_OF_TIME = "out of time"
    INTERRUPT = "interrupted"
    PREEMPTED = "preempted"


class Stopping:
    """Turns signals into flags and lets the ranks agree on them after every step.

    Signals and clocks reach ranks at different moments; a rank that left the loop alone would leave
    the others waiting. So each step ends with one small message: who wants to stop.
    torchrun passes Ctrl-C on to its ranks and waits half a minute, long enough for a checkpoint.
    SIGTERM and SIGUSR1 mean that the machine is wanted back: the run ends with an exit code that
    lets `torchrun --max-restarts` or a requeued SLURM job go on.
    """

    def __init__(self, config: Config) -> None:
        self.reason: Stop | None = None
        self._signals = Preemption((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        self._seconds = config.train.seconds
        self._started = time.monotonic()

    @property
    def told(self) -> bool:
        """Whether the run ends because somebody said so, and goes on later."""
        return self.reason in (Stop.INTERRUPT, Stop.PREEMPTED)

    def agree(self, *, last: bool) -> None:
        """Agree on whether this was the last step."""
        late = 0.0 < self._seconds <= time.monotonic() - self._started
        told = self._signals.received
        interrupted, preempted = told is signal.SIGINT, told not in (None, signal.SIGINT)
        shared = torch.tensor([last, interrupted, preempted, late], dtype=torch.uint8)
        all_reduce_small([shared], dist.group.WORLD, op="max")
        votes = shared.tolist()
        reasons = (Stop.FINISHED, Stop.INTERRUPT, Stop.PREEMPTED, Stop.OUT_OF_TIME)
        self.reason = next((r for r, vote in zip(reasons, votes, strict=True) if vote), None)
