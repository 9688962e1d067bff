"""The directory of a run: which one, and what is where in it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from config import Config

from lamina.collectives.engine import broadcast
from lamina.mesh import Runtime

RUNS = Path("runs")


@dataclass(frozen=True)
class Run:
    """Places within one run's directory."""

    directory: Path
    runtime: Runtime

    @property
    def data(self) -> Path:
        """The tokenised text."""
        return self.directory / "data"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints."""
        return self.directory / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object per line: steps and evaluations."""
        return self.directory / "metrics.jsonl"

    @property
    def plot(self) -> Path:
        """The loss, drawn."""
        return self.directory / "loss.png"

    @property
    def samples(self) -> Path:
        """What the trained model writes."""
        return self.directory / "samples.txt"

    @property
    def report(self) -> Path:
        """The numbers of the report; it is there once the run is finished."""
        return self.directory / "report.json"

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
    number = 1
    while _numbered(config.run.name, number + 1).exists():
        number += 1
    newest = _numbered(config.run.name, number)
    if not newest.exists() or _can_continue(newest, config):
        return number
    return number + 1


def _can_continue(directory: Path, config: Config) -> bool:
    if (directory / "report.json").exists():
        return False
    try:
        settings = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        return True  # killed before it began
    return settings == _settings(config)


def _settings(config: Config) -> dict[str, Any]:
    """Return what decides the numbers that come out of a run."""
    settings = json.loads(json.dumps(dataclasses.asdict(config)))
    del settings["run"]["directory"], settings["train"]["seconds"], settings["log"]
    return settings


def _begin(config: Config, run: Run) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    (run.directory / "config.json").write_text(json.dumps(_settings(config), indent=1))


def _agree(value: int) -> int:
    """Return the first rank's value on every rank."""
    shared = torch.tensor([value], dtype=torch.int64)
    broadcast(shared, dist.group.WORLD).wait()
    return int(shared)
