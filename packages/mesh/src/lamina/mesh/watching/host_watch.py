"""The hosts of a job as one rank sees them: the processes of its own, and the beat of the next."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEAT = 2.0
"""Seconds between two beats of a host."""


class HostWatch:
    """Signs this process up under its host, number `rank` of `world_size` ranks."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self._world_size = store, world_size
        self._on_host: dict[int, tuple[int, str]] = {}
        self._number = 0  # of this host among all, on its first rank
        self._next_beat, self._heard = 0.0, ((0, 0), 0.0)
        self.server = ""
        """The host whose process serves the store, once it is known."""
        self.key = f"host/{_host_name()}"
        number = store.add(f"{self.key}/count", 1)
        me = [rank, os.getpid(), (_state_of(os.getpid()) or ("", ""))[1]]
        store.set(f"{self.key}/{number}", json.dumps(me))
        if number == 1:
            self._number = store.add("hosts", 1)
            store.set(f"hosts/{self._number}", json.dumps([self.key, socket.gethostname()]))
        if rank == 0:
            store.set("server", socket.gethostname())

    @property
    def alone(self) -> bool:
        """Whether all ranks of the job are known to be on this host."""
        return len(self._on_host) == self._world_size

    def ended(self) -> Iterator[tuple[int, int]]:
        """Ranks of this host whose process has ended since the last look, and that process."""
        if not self.alone:
            signed = self._store.add(f"{self.key}/count", 0)  # reads the count
            for number in range(len(self._on_host) + 1, signed + 1):
                if self._store.check([f"{self.key}/{number}"]):
                    rank, process, started = json.loads(self._store.get(f"{self.key}/{number}"))
                    self._on_host[rank] = process, started
        for rank, (process, started) in list(self._on_host.items()):
            state = _state_of(process)
            # Another start time: the system has given the number to another process since.
            if process > 0 and (state is None or state[1] != started or state[0] in "ZX"):
                self._on_host[rank] = -1, ""
                yield rank, process

    def states(self) -> dict[int, str]:
        """What /proc says of the ranks of this host."""
        every = ((rank, _state_of(process)) for rank, (process, _) in self._on_host.items())
        return {rank: state[0] for rank, state in every if state is not None}

    def server_is_gone(self) -> bool:
        """Whether the first rank is on this host, and its process has ended."""
        return 0 in self._on_host and _state_of(self._on_host[0][0]) is None

    def silent_host(self, limit: float) -> str | None:
        """Count for this host; the next one in words, if it has not counted for `limit` seconds.

        See Note [A host that is silent] in `lamina.mesh.watching.watchdog`.
        """
        now = time.monotonic()
        if now < self._next_beat or self.alone:
            return None
        self._next_beat = now + BEAT
        self._store.add(f"{self.key}/beat", 1)
        self.server = self.server or text_of(self._store, "server")
        # Hosts watch each other in a ring, so each asks for one count whatever their number.
        after = self._number % self._store.add("hosts", 0) + 1
        if self._number in (0, after) or not (entry := text_of(self._store, f"hosts/{after}")):
            return None
        host, name = json.loads(entry)
        beat, silent = (after, self._store.add(f"{host}/beat", 0)), now - self._heard[1]
        if beat != self._heard[0]:
            self._heard = beat, now
        elif silent > limit:
            numbers = range(1, self._store.add(f"{host}/count", 0) + 1)
            ranks = [json.loads(self._store.get(f"{host}/{number}"))[0] for number in numbers]
            if not any(text_of(self._store, f"left/{rank}") for rank in ranks):
                those = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, sorted(ranks)))}"
                why = f"silent for {silent:.0f} s: it is down, or its link is cut"
                return f"host {name} ({those}) is {why}"
        return None


def text_of(store: Any, key: str) -> str:
    """What a store has under a key; nothing if it has not got it."""
    return store.get(key).decode() if store.check([key]) else ""


def _state_of(process: int) -> tuple[str, str] | None:
    """State (R, S, T, Z, ...) and start time of a process of this host; None if there is none."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]


def host_words() -> tuple[int, ...]:
    """Words equal in one boot, network and process namespace; OSError: no /proc can be read."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
    return int(boot[:15], 16), *spaces


def _host_name() -> str:
    """Equal for processes that see each other under /proc; of its own for any other."""
    try:
        boot, _, processes = host_words()
        return f"{boot}/{processes}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
