"""Turns the outcomes of all ranks into one failure that reads from its cause."""

from __future__ import annotations

from _pytest._code.code import (
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)

from lamina_testing.jobs import Job, RankOutcome

# A rank that dies is noticed a moment later than its peers notice the closed connection.
_DEATH_LEAD = 0.5


class RanksFailed(Exception):  # noqa: N818 - an outcome, as pytest names them
    """A body failed on at least one rank."""

    def __init__(self, report: RanksReport) -> None:
        super().__init__(report.headline)
        self.report = report


class RanksReport:
    """One failed body: `headline` for the summary, `text` from the first failure on."""

    def __init__(self, job: Job, outcomes: list[RankOutcome]) -> None:
        first, others = _order(outcomes)
        world = f"{job.world_size} rank{'s' if job.world_size > 1 else ''}"
        where = f"{world}, {job.backend} on {job.device}"
        if first.status == "hung":
            self.headline = f"timeout: no end within {job.timeout:g} s on {where}"
            blocks = [self.headline + "; the stack of every rank that was still running:"]
        else:
            self.headline = f"rank {first.rank} of {job.world_size}: {_describe(first)}"
            blocks = [f"rank {first.rank} failed first ({where}): {_describe(first)}"]
        blocks.append(first.text)
        if first.status == "hung":
            blocks[-1] = f"rank {first.rank}:\n{first.text}"
        for outcome in others:
            block = f"rank {outcome.rank}: {_describe(outcome)}"
            blocks.append(f"{block}\n{outcome.text}" if outcome.status == "hung" else block)
        self.text = "\n\n".join(block for block in blocks if block)
        self._path = job.path

    def __str__(self) -> str:
        return self.text

    def representation(self) -> ReprExceptionInfo:
        """Return pytest's own kind of report, which its summary and pytest-xdist understand."""
        entry = ReprEntryNative([f"{line}\n" for line in self.text.splitlines()])
        traceback = ReprTraceback([entry], None, "native")
        return ReprExceptionInfo(traceback, ReprFileLocation(self._path, 0, self.headline))


def _order(outcomes: list[RankOutcome]) -> tuple[RankOutcome, list[RankOutcome]]:
    def order(outcome: RankOutcome) -> tuple[int, float]:
        if outcome.status == "died":
            return 0, outcome.time - _DEATH_LEAD
        return {"failed": 0, "hung": 1}.get(outcome.status, 2), outcome.time

    first = min(outcomes, key=order)
    return first, [outcome for outcome in outcomes if outcome is not first]


def _describe(outcome: RankOutcome) -> str:
    if outcome.status == "passed":
        return "passed"
    if outcome.status == "hung":
        return "still running, killed; its stack, innermost call first:"
    if outcome.status in ("skipped", "xfailed"):
        return f"{outcome.status}: {outcome.summary}"
    return outcome.summary
