"""What the watchdog and the comparison of facts cost in a step without faults.

    python benchmarks/watchdog.py [--neighbours 8] [--seconds 5] [--calls 200] [--step 0.3]

CPU time, which does not depend on how busy the machine is:

* thread: of the watchdog's thread, as a share of one core, beside so many processes of the host;
* calls: of noting one collective in its group's log, times the collectives of a step;
* facts: of the digest that rides in the flags of a final backward, for AdamW with two groups.

The sum is printed as a share of a step of `--step` seconds; the limit is 0.5%.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lamina.collectives.call.collective import issue
from lamina.collectives.engine import CommonFacts
from lamina.collectives.transport.lanes import lane_of
from lamina.ddp.parameters.facts import OptimizerAgreement
from lamina.mesh.watching.watchdog import Watchdog


def thread_share(neighbours: int, seconds: float) -> float:
    """CPU seconds per second of a watchdog's thread, over a TCP store."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dog = Watchdog(store, 0, neighbours, 30.0)
    words = [sys.executable, "-c", "import time; time.sleep(1000)"]
    others = [subprocess.Popen(words) for _ in range(neighbours - 1)]
    try:
        for rank, other in enumerate(others, start=1):
            number = store.add(f"{dog._hosts.key}/count", 1)
            with open(f"/proc/{other.pid}/stat") as stat:
                started = stat.read().rpartition(")")[2].split()[19]
            store.set(f"{dog._hosts.key}/{number}", f'[{rank}, {other.pid}, "{started}"]')
        time.sleep(2)
        clock = time.pthread_getcpuclockid(dog._threads[0].ident or 0)
        begun = time.clock_gettime(clock)
        time.sleep(seconds)
        return (time.clock_gettime(clock) - begun) / seconds
    finally:
        dog.close()
        for other in others:
            other.kill()


def seconds_of(action, times: int = 20_000) -> float:
    """CPU seconds of one call."""
    begun = time.thread_time()
    for _ in range(times):
        action()
    return (time.thread_time() - begun) / times


def note_seconds() -> float:
    """What `issue` does for the watchdog: one in a group of eight beside one that nobody notes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    group = dist.group.WORLD
    noted = seconds_of(lambda: issue("gather", lane_of(group), torch.float32, 0))
    return noted - seconds_of(lambda: issue("gather", lane_of(None), torch.float32, 0))


def facts_seconds() -> float:
    """The digest of an optimizer's hyperparameters."""
    module = nn.Linear(4, 4)
    groups = [{"params": [module.weight]}, {"params": [module.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    common = CommonFacts("at the end of a backward", [])
    agreement = OptimizerAgreement(optimizer)
    return seconds_of(lambda: common.words(agreement.now()), 2000)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--neighbours", type=int, default=8, help="ranks of the host")
    parser.add_argument("--seconds", type=float, default=5, help="for which the thread is watched")
    parser.add_argument("--calls", type=int, default=200, help="collectives of a step")
    parser.add_argument("--step", type=float, default=0.3, help="seconds of a step")
    given = parser.parse_args()
    thread = thread_share(given.neighbours, given.seconds)
    calls, facts = note_seconds() * given.calls, facts_seconds()
    share = thread + (calls + facts) / given.step
    print(f"thread: {thread:.4%} of a core beside {given.neighbours - 1} processes")
    print(f"calls:  {calls * 1e6:.0f} us for {given.calls} collectives")
    print(f"facts:  {facts * 1e6:.0f} us for each final backward")
    print(f"ratio:  {share:.3%} of a step of {given.step:g} s (limit 0.5%)")


if __name__ == "__main__":
    main()
