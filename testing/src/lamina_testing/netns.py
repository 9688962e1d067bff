"""Network namespaces joined by links of chosen speed, for honest tests of overlap.

On the loopback device communication costs processor time that computation would need. Between
namespaces, with `tc tbf` on the link, bytes take time and little else, as on a real network. A link
can become slow, lose packets, or be cut while programs run (`Link.spoil`). Needs Linux, root and
iproute2; `unavailable` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_PREFIX = "lamina-test"
_DEVICE = "veth0"
_ADDRESSES = tuple(f"10.77.0.{place}" for place in range(1, 27))
_PORT = 29500  # free: each link has namespaces of its own
_RANDOM = 0xFFFFF038  # where a filter in classic BPF finds a random number (SKF_AD_RANDOM)


class RankProgramError(RuntimeError):
    """A program run in the namespaces failed; the message holds every rank's output."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that have left each namespace over the link, headers included."""

    sent: tuple[int, ...]

    def __sub__(self, earlier: Traffic) -> Traffic:
        both = zip(self.sent, earlier.sent, strict=True)
        return Traffic(tuple(now - before for now, before in both))


@dataclass(frozen=True)
class Link:
    """Namespaces and the links between them."""

    namespaces: tuple[str, ...]
    bits_per_second: int

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each namespace."""
        return _ADDRESSES[: len(self.namespaces)]

    def traffic(self) -> Traffic:
        """Read the interfaces' counters."""
        return Traffic(tuple(map(_sent, self.namespaces)))

    def spoil(self, node: int, *, lost: float = 0.0, bits_per_second: int | None = None) -> None:
        """Change the link of one namespace, until it is changed again.

        Args:
            node: the namespace's number.
            lost: share of the packets that vanish, in either direction, with no word to anybody;
                1.0 is a cut cable. Not all kernels have netem, so a filter drops them.
            bits_per_second: the rate at which it sends; by default that of the others.
        """
        name = self.namespaces[node]
        rate = _rate(bits_per_second or self.bits_per_second)
        _run("tc", "-n", name, "qdisc", "replace", "dev", _DEVICE, "root", "tbf", *rate)
        _run("tc", "-n", name, "qdisc", "replace", "dev", _DEVICE, "clsact")
        kept = min(round((1 - lost) * 2**32), 2**32 - 1)
        # A packet is dropped (matches) if a random word reaches `kept`. It goes to the loopback
        # device, which belongs to nobody that it is addressed to.
        filtered = f"4,32 0 0 {_RANDOM},53 0 1 {kept},6 0 0 {2**32 - 1},6 0 0 0"
        match = ("protocol", "all", "pref", "1")
        for way in ("ingress", "egress"):
            where = ("tc", "-n", name, "filter")
            with contextlib.suppress(subprocess.CalledProcessError):  # the first time, none there
                _run(*where, "del", "dev", _DEVICE, way, "pref", "1")
            if lost:
                drop = ("action", "mirred", "egress", "redirect", "dev", "lo")
                added = ("bpf", "bytecode", filtered, *drop)
                _run(*where, "add", "dev", _DEVICE, way, *match, *added)

    def variables(self, rank: int, ranks_per_namespace: int = 1) -> dict[str, str]:
        """What torchrun would give to a rank in its environment."""
        node, local_rank = divmod(rank, ranks_per_namespace)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(self.namespaces) * ranks_per_namespace,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": ranks_per_namespace,
            "GROUP_RANK": node,
            "MASTER_ADDR": _ADDRESSES[0],
            "MASTER_PORT": _PORT,
            "GLOO_SOCKET_IFNAME": _DEVICE,
            "NCCL_SOCKET_IFNAME": _DEVICE,
            "OMP_NUM_THREADS": 1,
        }
        return {name: str(value) for name, value in variables.items()}

    def run_ranks(
        self,
        program: Sequence[str],
        *,
        ranks_per_namespace: int = 1,
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> list[str]:
        """Run `program` as every rank, each with torchrun's variables; return their stdouts.

        Ranks are numbered namespace by namespace, each namespace being a node. When one fails the
        others are killed. `timeout` is in seconds. Raises RankProgramError.
        """
        processes = [
            self._start(program, rank, ranks_per_namespace, environment or {})
            for rank in range(len(self.namespaces) * ranks_per_namespace)
        ]
        try:
            _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        outputs = [process.communicate() for process in processes]
        codes = [process.returncode for process in processes]
        if any(codes):
            told = "\n".join(f"--- rank {r}:\n{o}{e}" for r, (o, e) in enumerate(outputs))
            raise RankProgramError(f"ranks ended with codes {codes}\n{told}")
        return [stdout for stdout, _ in outputs]

    def _start(
        self, program: Sequence[str], rank: int, per_namespace: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[rank // per_namespace], *program],
            env=os.environ | self.variables(rank, per_namespace) | dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def unavailable() -> str | None:
    """Return why links cannot be made here, or None if they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    try:
        with shaped_link(bits_per_second=10**9):
            return None
    except subprocess.CalledProcessError as error:
        return f"this machine refuses: {' '.join(error.cmd)}: {error.stderr.strip()}"


@contextlib.contextmanager
def shaped_link(*, bits_per_second: int, namespaces: int = 2) -> Iterator[Link]:
    """Make namespaces that each send at `bits_per_second`: two joined by a veth, more by a bridge.

    Everything is removed at the end; what a killed process has left is removed by the next one.
    Raises subprocess.CalledProcessError where the kernel or a missing right refuses.
    """
    _remove_stale()
    # Two links of one process must not meet.
    with socket.socket() as unique:
        unique.bind(("127.0.0.1", 0))
        number = unique.getsockname()[1]
    own = f"{_PREFIX}-{os.getpid()}-{number}"
    names = [f"{own}-{side}" for side in string.ascii_lowercase[:namespaces]]
    hub = f"{own}-hub" if namespaces > 2 else names[1]
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys((*names, hub)):
            _ip("netns", "add", name)
            stack.callback(_remove, name)
        if namespaces > 2:
            _ip("-n", hub, "link", "add", "br0", "up", "type", "bridge")
        for name in names if namespaces > 2 else names[:1]:
            port = name[-1] if namespaces > 2 else _DEVICE
            ends = ("netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            _ip("link", "add", _DEVICE, *ends)
            if namespaces > 2:
                _ip("-n", hub, "link", "set", "dev", port, "master", "br0", "up")
        for name, address in zip(names, _ADDRESSES, strict=False):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", _DEVICE)
            _ip("-n", name, "link", "set", _DEVICE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _run(
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                _DEVICE,
                "root",
                "tbf",
                *_rate(bits_per_second),
            )
        yield Link(tuple(names), bits_per_second)


def _rate(bits_per_second: int) -> tuple[str, ...]:
    # A bucket must hold what flows between two ticks of the kernel's clock (at worst 10 ms).
    burst = max(bits_per_second // 8 // 100, 64 * 1024)
    return ("rate", f"{bits_per_second}bit", "burst", str(burst), "latency", "50ms")


def _wait(processes: list[subprocess.Popen[str]], deadline: float) -> None:
    # Communicate in turns: a rank whose pipe is full would not end.
    waiting = list(processes)
    while waiting and time.monotonic() < deadline:
        for process in list(waiting):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.05)
                waiting.remove(process)
                if process.returncode != 0:
                    return


def _sent(namespace: str) -> int:
    path = f"/sys/class/net/{_DEVICE}/statistics/tx_bytes"
    return int(_ip("netns", "exec", namespace, "cat", path))


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _remove(namespace: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip("netns", "del", namespace)


def _remove_stale() -> None:
    for match in re.finditer(rf"^{_PREFIX}-(\d+)-\d+-[a-z]+", _ip("netns", "list"), re.MULTILINE):
        if not os.path.exists(f"/proc/{match[1]}"):
            _remove(match[0])
