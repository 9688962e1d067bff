"""Play a fault of a host, or of the link to it: network namespaces are the hosts.

Each host has a namespace of its own for its network, its processes and its name, so that a rank
sees of another host what it would see of another machine. `lamina_testing.netns` spoils links.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from play import Nursery, marks_of

from lamina_testing.netns import shaped_link

HOST_FAULTS = {
    "cut_link": "the link of a host is cut",
    "cut_link_of_store": "the link of the host with the store is cut",
    "kill_host": "a host is killed",
    "kill_host_with_store": "the host with the store is killed",
    "slow_link": "a link of 100 kbit/s instead of 1 Gbit/s",
    "loss": "a link loses 1% of the packets",
    "slow_rank": "a rank needs five times as long",
}
"""What is played, in words."""
SURVIVED = ("slow_link", "loss", "slow_rank")
"""What ends no job."""
RATE = 10**9
STEPS = {"slow_rank": 41, "slow_link": 42}
SECONDS = {"slow_link": 90}
"""How long a job has from its fault on, otherwise 60: its last steps go over that link."""
TOLD = ("error", "straggler", "network")
HERE = Path(__file__).with_name("host_job.py")


@dataclass
class PlayedOnHosts:
    """What became of a job on several hosts.

    Attributes:
        told: seconds from the fault to the first message of each host; None if it said nothing.
        messages: the first message of each host.
        seconds: from the fault to the end of all ranks.
        statuses: exit status of each rank; None if it had to be killed.
        digests: of the weights at the end, of each rank that came to it.
        resumed: the digest after the job went on, on the hosts that were left; None if it did not.
        begun: the step that it went on at.
    """

    wrapper: str
    fault: str
    told: list[float | None]
    messages: list[str]
    seconds: float
    statuses: list[int | None]
    digests: set[str]
    resumed: str | None = None
    begun: int | None = None
    output: str = field(repr=False, default="")


def odd_host(fault, hosts):
    """Which host the fault is at."""
    return 0 if fault.endswith("store") else hosts - 1


def spoil(fault, link, nurseries):
    """Do what the fault is."""
    at = odd_host(fault, len(nurseries))
    if fault.startswith("cut_link"):
        link.spoil(at, lost=1.0)
    elif fault.startswith("kill_host"):
        nurseries[at].process.kill()
    elif fault == "slow_link":
        link.spoil(at, bits_per_second=10**5)
    elif fault == "loss":
        link.spoil(at, lost=0.01)


def play_on_hosts(fault, wrapper="hsdp", *, hosts=2, per_host=2):
    """Play a fault, and let a job that has ended by it go on, on the hosts that are left."""
    with (
        tempfile.TemporaryDirectory() as directory,
        shaped_link(bits_per_second=RATE, namespaces=hosts) as link,
        contextlib.ExitStack() as stack,
    ):
        job = Job(wrapper, fault, Path(directory), link, per_host)
        nurseries = [
            stack.enter_context(Nursery(on_host(name), (str(HERE), "nursery", f"node{at}")))
            for at, name in enumerate(link.namespaces)
        ]
        job.start(nurseries)
        job.wait(120, until=lambda: job.count("fault") == hosts * per_host)
        spoil(fault, link, nurseries)
        job.faulted_at = time.time()
        Path(directory, "played").touch()
        job.wait(SECONDS.get(fault, 60))
        played = job.judged()
        if not played.digests and wrapper == "hsdp":
            left = [one for at, one in enumerate(nurseries) if at != odd_host(fault, hosts)]
            rest = Job(wrapper, fault, Path(directory), link, per_host)
            rest.start(left, first=nurseries.index(left[0]))
            rest.wait(120)
            (digest,) = {one["text"] for one in rest.marks("digest")} or {None}
            played.resumed = digest
            played.begun = max((one["begun"] for one in rest.marks("digest")), default=None)
            played.output += rest.output()
        return played


def on_host(namespace):
    """What a command on another host begins with."""
    apart = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    return ["ip", "netns", "exec", namespace, *apart]


class Job:
    """A run of the job, on the hosts of some nurseries."""

    def __init__(self, wrapper, fault, directory, link, per_host):
        self._wrapper = wrapper
        self._fault, self._directory, self._link, self._per_host = fault, directory, link, per_host
        self.faulted_at = 0.0
        self._ended, self._first = 0.0, {}

    def start(self, nurseries, first=0):
        """Start the ranks; `first` is the number of the host that serves the store."""
        self._nurseries = nurseries
        for file in self._directory.glob("*-[0-9]*"):
            file.unlink()
        size = len(nurseries) * self._per_host
        words = [self._wrapper, self._fault, "--directory", str(self._directory)]
        words += ["--steps", str(STEPS.get(self._fault, 12))]
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": self._link.addresses[first]}
        for at, nursery in enumerate(nurseries):
            ranks = range(at * self._per_host, (at + 1) * self._per_host)
            variables = [{**self._link.variables(r, self._per_host), **common} for r in ranks]
            nursery.start(words, variables)
        self._statuses = {}

    def wait(self, seconds, until=lambda: False):
        """Wait for the ends of all ranks, or something else, and note when each host says what."""
        end = time.monotonic() + seconds
        while len(self._statuses) < len(self._nurseries) and not until():
            for at, nursery in enumerate(self._nurseries):
                if at not in self._statuses and (found := nursery.ends(0.05)) is not None:
                    self._statuses[at] = found
                if at not in self._first and (said := self.said(at)):
                    self._first[at] = time.time(), said
            if time.monotonic() > end:
                break
        self._ended = time.time()

    def texts(self, kind, at):
        """What the ranks of a host have written."""
        ranks = range(at * self._per_host, (at + 1) * self._per_host)
        files = [self._directory / f"{kind}-{rank}" for rank in ranks]
        return [file.read_text() for file in files if file.exists()]

    def marks(self, what):
        """The marks of all ranks."""
        texts = [text for at in range(len(self._nurseries)) for text in self.texts("out", at)]
        return [one for one in marks_of(texts) if one["what"] == what]

    def count(self, what):
        return len(self.marks(what))

    def said(self, at):
        """The first message of a host."""
        marks = [one for one in marks_of(self.texts("out", at)) if one["what"] in TOLD]
        lines = [line for text in self.texts("err", at) for line in text.splitlines()]
        stuck = [line for line in lines if "ends, as it still waits" in line]
        marks.sort(key=lambda one: one["time"])
        return next(iter([one["text"].splitlines()[0] for one in marks] + stuck), "")

    def output(self):
        """All that was written."""
        texts = [
            self.texts(kind, at) for kind in ("out", "err") for at in range(len(self._nurseries))
        ]
        return "\n".join(text for each in texts for text in each)

    def judged(self):
        """What became of it."""
        hosts = range(len(self._nurseries))
        hung = [None] * self._per_host
        statuses = [one for at in hosts for one in self._statuses.get(at, hung)]
        told = {at: when - self.faulted_at for at, (when, _) in self._first.items()}
        return PlayedOnHosts(
            self._wrapper,
            self._fault,
            [told.get(at) for at in hosts],
            [self._first[at][1] if at in self._first else "" for at in hosts],
            self._ended - self.faulted_at,
            statuses,
            {one["text"] for one in self.marks("digest")},
            output=self.output(),
        )


if __name__ == "__main__":
    found = play_on_hosts(sys.argv[1], hosts=int((sys.argv[2:] or "2")[0]))
    print(found.output)
    print(found)
