"""Runs the steps of a plan one after another; none can stop those that follow."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.bootstrap import ROOT
from tasks.hardware.plan import Step

OUTCOME_OF_A_TEST = re.compile(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.M)
NAME_OF_A_TEST = re.compile(r"^(\S+::\S.*)$", re.M)
MOST_LINES = 150  # of a step's output in the report
PATIENCE = 5  # times the limit of a step, in a rehearsal: a busy CPU shows nothing about a GPU
LEAST = 5  # seconds without which a step is not begun
GRACE = 5.0  # seconds between the signals that end a step


@dataclass
class Outcome:
    """What became of a step.

    Args:
        step: the step.
        state: "passed", "failed", "stopped" (it ran into its limit) or "left out".
        seconds: how long it ran.
        reason: why it failed or was left out, in a line.
        tests: outcome in lower case -> number of tests, for steps that run pytest.
        lines: the end of its output.
    """

    step: Step
    state: str
    seconds: float = 0.0
    reason: str = ""
    tests: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return what the record holds."""
        return {
            "part": self.step.part,
            "name": self.step.name,
            "command": self.step.run,
            "state": self.state,
            "seconds": round(self.seconds, 1),
            "reason": self.reason,
            "tests": self.tests,
            "lines": self.lines,
        }


def run_all(
    steps: Sequence[Step],
    run: Callable[[Step, float], Outcome],
    *,
    seconds: float,
    gpus: int,
    rehearsal: bool,
) -> Iterator[Outcome]:
    """Yield the outcome of each step; what no time or no GPU is left for is left out.

    Args:
        steps: in the order in which they run.
        run: runs one, given the seconds that it may take.
        seconds: for all of them together.
        gpus: how many there are.
        rehearsal: whether the commands of the rehearsal run, which need no GPU.
    """
    end = time.monotonic() + seconds
    for step in steps:
        left = end - time.monotonic()
        if step.gpus > gpus and not rehearsal:
            yield Outcome(step, "left out", reason=f"needs {step.gpus} GPUs, and there are {gpus}")
        elif left < LEAST:
            yield Outcome(step, "left out", reason="no time was left; run its part alone")
        else:
            yield run(step, min(left, step.limit * (PATIENCE if rehearsal else 1)))


NO_TESTS = 5
"""pytest's exit code where the marks and options have chosen none."""


def run_step(
    step: Step,
    words: Sequence[str],
    limit: float,
    log: Path,
    env: Mapping[str, str],
    *,
    skips_count: bool = False,
) -> Outcome:
    """Run one command with its output in `log`; end all its processes once `limit` is over.

    Args:
        step: what the command belongs to.
        words: the command.
        limit: seconds.
        log: file for its output.
        env: its variables.
        skips_count: whether a run of pytest passes in which every test was skipped.
    """
    begin = time.monotonic()
    with log.open("w") as output:
        # A session of its own: the signal then reaches the ranks that the command has started.
        process = subprocess.Popen(
            words, cwd=ROOT, env=dict(env), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    text = log.read_text(errors="replace")
    outcome = Outcome(step, "passed", time.monotonic() - begin)
    outcome.lines = text.splitlines()[-MOST_LINES:]
    if step.is_pytest:
        found = OUTCOME_OF_A_TEST.findall(text)
        outcome.tests = {k.lower(): n for k, n in Counter(kind for _, kind in found).items()}
    if code is None:
        outcome.state, outcome.reason = "stopped", f"after {limit:.0f} s{last_test(step, text)}"
    elif step.is_pytest and code == NO_TESTS and not outcome.tests:
        outcome.state, outcome.reason = "left out", "the layer has no test for so many ranks"
    elif code:
        outcome.state, outcome.reason = "failed", why(step, text, code)
    elif step.is_pytest and not skips_count and not outcome.tests.get("passed"):
        outcome.state, outcome.reason = "failed", f"no test ran: {skipped_because(text)}"
    return outcome


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command and of all processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def skipped_because(text: str) -> str:
    """Return the reason that pytest's summary gives for the first skipped tests."""
    match = re.search(r"^SKIPPED \[\d+\] (.*)$", text, re.M)
    return match[1] if match else "none was found"


def last_test(step: Step, text: str) -> str:
    """Return where pytest stood when it was stopped."""
    names = NAME_OF_A_TEST.findall(text) if step.is_pytest else []
    return f", in {names[-1]}" if names else ""


def why(step: Step, text: str, code: int) -> str:
    """Return in a line why a step failed: the tests' names, else the last line that says much."""
    kinds = OUTCOME_OF_A_TEST.findall(text) if step.is_pytest else []
    if failed := [name for name, kind in kinds if kind in ("FAILED", "ERROR")]:
        return f"{len(failed)} tests, {failed[0]} first"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    return f"exit code {code}: {(errors or lines or ['no output'])[-1][:200]}"
