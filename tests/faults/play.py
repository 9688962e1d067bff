"""Play one fault: start the ranks of `fault_job`, wait for their ends, tell what was seen."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

JOB = Path(__file__).with_name("fault_job.py")


@dataclass
class Played:
    """What became of a job.

    Attributes:
        seconds: from the fault (or, for ranks that differ, from the start of the last rank's
            wrapper) to the end of all ranks; the limit if one had to be killed.
        told: seconds to the first message on any survivor; None if none was seen.
        message: the first error of a survivor, or the watchdog's verdict.
        statuses: exit status of each rank; None if it had to be killed.
    """

    wrapper: str
    fault: str
    phase: str
    seconds: float
    told: float | None
    message: str
    statuses: list[int | None]
    output: list[str] = field(repr=False, default_factory=list)


def places(ranks):
    """torchrun's variables of each rank of a job on this host."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port}
    each = ({**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks))
    return [{name: str(value) for name, value in one.items()} for one in each]


def play(wrapper, fault, phase="step", *, ranks=2, limit=45.0, soft_limit=3.0):
    """Run one job until all its ranks have ended, or for `limit` seconds after the fault.

    A job whose last rank is stopped, or asleep, ends when the others have told so.
    """
    with tempfile.TemporaryDirectory() as directory:
        files = [
            Path(directory, f"{kind}-{rank}") for kind in ("out", "err") for rank in range(ranks)
        ]
        for file in files:
            file.touch()
        words = [wrapper, fault, phase, "--directory", directory, "--soft-limit", str(soft_limit)]
        with Nursery() as nursery:
            nursery.start(words, places(ranks))
            statuses = _ends(nursery, files, fault, limit)
        ended = time.time()
        texts = [file.read_text() for file in files]
    return _judge(wrapper, fault, phase, statuses, texts[:ranks], texts[ranks:], ended)


class Nursery:
    """A process that has imported everything, and forks the ranks of a job."""

    _idle = []  # noqa: RUF012 - nurseries that have no ranks now

    def __init__(self, before=(), job=(str(JOB), "nursery")):
        """`before` is what the command begins with, to run on another host."""
        self._command = [*before, sys.executable, *job]
        self._kept = not before

    def __enter__(self):
        self.process = (
            self._idle.pop()
            if self._idle and self._kept
            else subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        return self

    def start(self, words, places):
        """Start a rank for each of some sets of torchrun's variables."""
        self.process.stdin.write(json.dumps([words, places]) + "\n")
        self.process.stdin.flush()
        self.ranks = json.loads(self.process.stdout.readline())

    def ends(self, seconds):
        """Exit statuses of all ranks, or None if some still run after so many seconds."""
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        if not ready:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else [-signal.SIGKILL] * len(self.ranks)

    def __exit__(self, *exception):
        if exception[0] is None and self._kept:
            self._idle.append(self.process)
        else:
            self.process.kill()
            self.process.wait()


def _ends(nursery, files, fault, limit):
    """Exit statuses; None of ranks that had to be killed."""
    started, begun = time.time(), None
    while (statuses := nursery.ends(0.1)) is None:
        begun = begun or _begun(files)
        late = time.time() > (begun + limit if begun else started + 150)
        if late or (fault in PAUSES and any(VERDICT in file.read_text() for file in files)):
            for rank in nursery.ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGUSR2)
                    os.kill(rank, signal.SIGCONT)
            statuses = nursery.ends(30)
            break
    return [None if one == -signal.SIGUSR2 else one for one in statuses]


def _begun(files):
    """When the fault happened; of ranks that differ, when the last of them began to wrap."""
    marks = marks_of([file.read_text() for file in files])
    planted = [one["time"] for one in marks if one["what"] == "fault"]
    differ = any(one["what"] == "differs" for one in marks)
    wraps = [one["time"] for one in marks if one["what"] == "wrap"] if differ else []
    return min(planted) if planted else max(wraps, default=None)


def marks_of(texts):
    lines = [line for text in texts for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith('{"what"')]


def _judge(wrapper, fault, phase, statuses, outputs, errors, ended):
    marks = marks_of(outputs)
    planted = [one["time"] for one in marks if one["what"] == "fault"]
    wraps = [one["time"] for one in marks if one["what"] == "wrap"]
    begun = min(planted) if planted else max(wraps, default=ended)
    last = len(outputs) - 1
    alone = fault in ("exception",)  # its own message is no news
    told = [one for one in marks if one["what"] == "error" and not (alone and one["rank"] == last)]
    told.sort(key=lambda one: one["time"])
    lines = [line for text in errors for line in text.splitlines()]
    verdicts = [line for line in lines if line.startswith(VERDICT)]
    ends = [line for line in lines if "ends, as it still waits" in line]
    errors_told = [one["text"].splitlines()[0] for one in told[:1]]
    said = verdicts[-1:] if fault in PAUSES else [*errors_told, *ends[:1], *verdicts[-1:]]
    first = told[0]["time"] - begun if told else (ended - begun if said else None)
    return Played(
        wrapper, fault, phase, ended - begun, first, said[0] if said else "", statuses, lines
    )


VERDICT = "The job does not go on"
PAUSES = ("stop", "sleep")


if __name__ == "__main__":
    found = play(*sys.argv[1:4])
    print("\n".join(found.output))
    print(found)
