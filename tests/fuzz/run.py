"""`python3 noxfile.py -s fuzz -- --cases N --seed S`: random programs, against one process.

--cases N         how many (200)
--seed S          a number or a word; case INDEX follows from S and INDEX alone (0)
--first INDEX     where to begin (0)
--case S:INDEX    one case: its program is printed, then its verdict
--jobs N          sets of ranks at a time (2)
--no-shrink       leave failing cases as they are
--out DIR         where scripts of failing cases go (.fuzz)
--keep            write the counts to docs/records/fuzz.md
"""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from fuzz.case import Case, program_of  # noqa: E402
from fuzz.draw import draw  # noqa: E402
from fuzz.judge import Verdict  # noqa: E402
from fuzz.record import write_record  # noqa: E402
from fuzz.script import script_of  # noqa: E402
from fuzz.session import AT_ONCE, Fuzzer  # noqa: E402
from fuzz.shrink import shrink  # noqa: E402

from lamina_testing.client import PRELOADED, ForkServer  # noqa: E402

COMPILERS = (
    "networkx",
    "torch._dynamo.repro.after_dynamo",
    "torch.fx.experimental.symbolic_shapes",
)


class Campaign:
    """Cases that several sets of ranks run side by side, and what was said of them."""

    def __init__(self, out: Path, shrinks: bool) -> None:
        self.verdicts: dict[str, tuple[Case, Verdict]] = {}
        self._out, self._shrinks = out, shrinks
        self._lock = threading.Lock()

    def run(self, cases: list[Case], jobs: int) -> None:
        """Run them all. A script is written for each case that fails."""
        by_ranks: dict[int, list[Case]] = {}
        for case in cases:
            by_ranks.setdefault(case.ranks, []).append(case)
        pieces = [
            group[first : first + AT_ONCE]
            for group in by_ranks.values()
            for first in range(0, len(group), AT_ONCE)
        ]
        workers = [threading.Thread(target=self._work, args=(pieces,)) for _ in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self, pieces: list[list[Case]]) -> None:
        server = ForkServer((*PRELOADED, *COMPILERS))
        fuzzer = Fuzzer(server)
        try:
            while True:
                with self._lock:
                    if not pieces:
                        return
                    piece = pieces.pop(0)
                fuzzer.run(piece, lambda case, verdict: self._say(fuzzer, case, verdict))
        finally:
            server.close()

    def _say(self, fuzzer: Fuzzer, case: Case, verdict: Verdict) -> None:
        self.verdicts[case.name] = (case, verdict)
        if verdict.good:
            return
        print(f"{case.name}: {verdict.outcome}: {verdict.detail[:400]}", flush=True)
        smallest, last = case, verdict
        if self._shrinks and verdict.outcome != "unsteady":
            smallest, last = shrink(case, verdict, fuzzer.one)
        self._out.mkdir(parents=True, exist_ok=True)
        path = self._out / f"{case.name.replace(':', '-')}-{verdict.outcome}.py"
        path.write_text(script_of(smallest, last, case.name))
        print(f"{case.name}: {path}", flush=True)


def main() -> int:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / ".fuzz")
    parser.add_argument("--keep", action="store_true")
    words = parser.parse_args()
    begun = time.monotonic()
    if words.case:
        seed, _, index = words.case.rpartition(":")
        cases = [draw(seed, int(index))]
        print(program_of(cases[0]))
    else:
        indices = range(words.first, words.first + words.cases)
        cases = [draw(words.seed, index) for index in indices]
    campaign = Campaign(words.out, not words.no_shrink)
    campaign.run(cases, min(words.jobs, len(cases)))
    verdicts = list(campaign.verdicts.values())
    counts = collections.Counter(verdict.outcome for _, verdict in verdicts)
    seconds = time.monotonic() - begun
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    print(f"fuzz: {len(verdicts)} cases of seed {words.seed} in {seconds:.0f} s: {said}")
    if words.case:
        print(verdicts[0][1].detail)
    if words.keep:
        write_record(ROOT, words.seed, verdicts, datetime.date.today())
    return 0 if all(verdict.good for _, verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
