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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from build import learning_rate
from config import Config, TrainConfig, unused
from options import flat, refusals, words_of

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
    for name, value in changes.items():
        words += words_of(name, value) if isinstance(value, bool) else [f"--{name}", str(value)]
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
        settings["train"]["schedule_steps"] = self.schedule_steps
        del settings["run"]["directory"], settings["run"]["export"], settings["train"]["seconds"]
        del settings["log"], settings["ranks"]
        return settings

    def begin(self) -> None:
        """Make the directory, and note the settings in it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(self.settings(), indent=1))

    @property
    def schedule_steps(self) -> int:
        """Where the learning rate ends its fall."""
        return self.config.train.schedule_steps or self.config.train.steps

    def recorded(self) -> dict[str, Any] | None:
        """The settings that the directory was last used with, if it was."""
        made = self.directory / "config.json"
        return json.loads(made.read_text()) if made.exists() else None

    def goes_on(self) -> bool:
        """Whether the directory holds this run, unfinished; it may have been killed early."""
        if (self.directory / "report.json").exists():
            return False
        return self.recorded() in (None, self.settings())

    def continued(self) -> tuple[int, list[str]]:
        """Where the schedule ends as the run goes on, and sentences about what changes.

        Raises:
            ValueError: the directory's weights or text were made with other settings.
        """
        made, now = self.recorded(), dict(flat(self.settings()))
        if made is None:
            return self.schedule_steps, []
        was = dict(flat(made))
        # Of a record that is older than a setting, the setting's default is not known to differ.
        differing = {name: was[name] for name in now if name in was and was[name] != now[name]}
        if fixed := {name: value for name, value in differing.items() if _is_fixed(name)}:
            pairs = "; ".join(f"{n} was {v!r} and is {now[n]!r}" for n, v in fixed.items())
            again = command({name.replace("_", "-"): value for name, value in fixed.items()})
            raise ValueError(
                f"--run.directory {self.directory} holds a run whose weights and text are of other "
                f"settings: {pairs}. To begin another run, name another directory; to go on with "
                f"this one: {again}"
            )
        said = [
            f"--{name.replace('_', '-')} was {value!r} and is {now[name]!r} from here on"
            for name, value in differing.items()
            if not name.startswith(("train.steps", "train.schedule_steps", "eval.", "checkpoint."))
        ]
        begun = int(was.get("train.schedule_steps") or was["train.steps"])
        end, about = _schedule(begun, self.config.train)
        return end, said + about


def _schedule(begun: int, train: TrainConfig) -> tuple[int, list[str]]:
    """Where the schedule ends of a run that was begun with one of `begun` steps.

    It stays where it was, unless another end is asked for: a rate that has fallen does not rise
    because there are more steps.
    """
    asked, kept = train.schedule_steps, replace(train, schedule_steps=begun)
    rate, last = learning_rate(begun, kept), train.steps
    if asked not in (0, begun):
        other = learning_rate(begun, train)
        about = (
            f"the schedule ends at step {asked} and not at {begun}: the learning rate of step "
            f"{begun + 1} is {other:.1e} and not {rate:.1e}"
        )
        return asked, [about]
    if last <= begun:
        return begun, []
    other = learning_rate(begun, replace(train, schedule_steps=last))
    remedy = (
        f"--train.schedule-steps {last} raises it to {other:.1e} and lets it fall until step {last}"
    )
    if rate == 0.0:
        raise ValueError(
            f"--train.steps {last}: this run's schedule ended at step {begun} with a learning rate "
            f"of 0; {remedy}"
        )
    return begun, [
        f"the schedule ended at step {begun}, and later steps keep its last learning rate, "
        f"{rate:.1e}; {remedy}"
    ]


def _is_fixed(name: str) -> bool:
    """Whether a run's weights or text depend on a setting."""
    return name == "tiny" or (name.startswith(("model.", "data.")) and name != "model.dropout")


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
    refused, end, said = _as_the_first_rank_says(run)
    with refusals(speak=runtime.is_main):
        if refused:
            raise ValueError(refused)
    for line in (*unused(config, runtime.device.type), *said) if runtime.is_main else ():
        print(line, flush=True)
    run = replace(run, config=replace(config, train=replace(config.train, schedule_steps=end)))
    run.main_first(run.begin)
    return run


def _as_the_first_rank_says(run: Run) -> tuple[str, int, list[str]]:
    """Why the run may not go on in its directory, if so, and else `Run.continued`."""
    told: list[Any] = ["", 0, []]
    if run.runtime.is_main:
        try:
            told = ["", *run.continued()]
        except ValueError as error:
            told[0] = str(error)
    dist.broadcast_object_list(told)
    refused, end, said = told
    return refused, end, said


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
