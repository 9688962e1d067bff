"""A clock that goes slower where more programs want a core than the machine has.

Limits of tests find hangs. On an idle machine a rank that has not ended within a minute hangs. At
load 40 on two cores it has had three seconds of a core by then, and may well be right. So limits
are in seconds of this clock. See Note [Limits count what a rank could have used].
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LONGEST = 10  # a limit is at most so many times as long as on an idle machine

# Note [Limits count what a rank could have used]
#
# A second counts as the share of a core that each thread which wants one has just then: the cores
# over the threads that can run. The kernel counts those of all programs, so the compilers that a
# rank has started are among them, and so are the jobs of others. Ranks that wait for each other
# want no core. On a machine that is idle otherwise the clock goes at its full rate for them, and on
# a busy one a hang is told after LONGEST times its limit at the latest.


def share_of_a_core(loads: Path = Path("/proc/loadavg")) -> float:
    """What a thread that can run gets of a core now: 1 where there are cores enough."""
    try:
        running = int(loads.read_text().split()[3].partition("/")[0])
        cores = len(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # no Linux
        return 1.0
    return max(1 / LONGEST, min(1.0, cores / max(running, 1)))


class BusyClock:
    """Seconds since it was made, each as long as the share of a core that a thread could have.

    Examples:
        >>> from lamina_testing.busy_clock import BusyClock
        >>> clock = BusyClock()
        >>> clock.seconds() < 1.0
        True
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Add what has passed since the last call, at the rate of this moment: ask it often."""
        now = time.monotonic()
        self._seconds += (now - self._last) * share_of_a_core()
        self._last = now
        return self._seconds
