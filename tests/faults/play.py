"""Play one fault: start the ranks of `fault_job`, wait for their ends, tell what was seen."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Played", "play"]

JOB = Path(__file__).with_name("fault_job.py")


@dataclass
class Played:
    """What became of a job.

    Attributes:
        seconds: from the fault (or, for ranks that differ, from the start of the wrapper) to the
            last survivor's end; the limit if one had to be killed.
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


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def play(wrapper, fault, phase="step", *, ranks=2, limit=45.0, soft_limit=3.0):
    """Run one job until all its ranks have ended, or for `limit` seconds after the fault."""
    with tempfile.TemporaryDirectory() as directory:
        port, started = free_port(), time.time()
        processes = [
            _start(wrapper, fault, phase, directory, rank, ranks, port, soft_limit)
            for rank in range(ranks)
        ]
        # The rank that was stopped, or sleeps on purpose, is not a survivor.
        survivors = processes[:-1] if fault in ("stop", "sleep", "kill", "exit0") else processes
        statuses = _ends(processes, survivors, started + 30 + limit, fault)
        ended = time.time()
        outputs = [Path(directory, f"out-{rank}").read_text() for rank in range(ranks)]
        errors = [Path(directory, f"err-{rank}").read_text() for rank in range(ranks)]
    return _judge(wrapper, fault, phase, statuses, outputs, errors, started, ended)


def _start(wrapper, fault, phase, directory, rank, ranks, port, soft_limit):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    words = [wrapper, fault, phase, "--directory", directory, "--soft-limit", str(soft_limit)]
    with (
        open(Path(directory, f"out-{rank}"), "w") as out,
        open(Path(directory, f"err-{rank}"), "w") as err,
    ):
        return subprocess.Popen(
            [sys.executable, str(JOB), *words], env=environment, stdout=out, stderr=err
        )


def _ends(processes, survivors, deadline, fault):
    while time.time() < deadline and any(one.poll() is None for one in survivors):
        time.sleep(0.05)
        if fault in ("stop", "sleep") and any(one.poll() is not None for one in survivors):
            processes[-1].send_signal(signal.SIGKILL)
    statuses = []
    for one in processes:
        killed = one.poll() is None
        if killed:
            one.kill()
        one.wait()
        statuses.append(None if killed else one.returncode)
    return statuses


def _judge(wrapper, fault, phase, statuses, outputs, errors, started, ended):
    marks = [json.loads(line) for text in outputs for line in text.splitlines() if line[:1] == "{"]
    begun = min([one["time"] for one in marks if one["what"] == "fault"], default=started)
    last = len(outputs) - 1
    told = [
        one for one in marks if one["what"] == "error" and (one["rank"] != last or fault in AGREE)
    ]
    told.sort(key=lambda one: one["time"])
    verdicts = [
        line for text in errors for line in text.splitlines() if "The job does not go on" in line
    ]
    ends = [
        line for text in errors for line in text.splitlines() if "ends, as it still waits" in line
    ]
    message = " / ".join([*verdicts[:1], *ends[:1], *(one["text"] for one in told[:1])])
    first = told[0]["time"] - begun if told else None
    return Played(
        wrapper, fault, phase, ended - begun, first, message, statuses, [*outputs, *errors]
    )


AGREE = ("width", "order", "dtype", "frozen", "optimizer", "lr", "no_step", "lr_later")


if __name__ == "__main__":
    found = play(*sys.argv[1:4])
    print("\n".join(found.output))
    print(found)
