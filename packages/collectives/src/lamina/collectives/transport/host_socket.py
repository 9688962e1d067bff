"""A line between two ranks of one host: notes of 24 bytes, straight from thread to thread.

gloo's messages pass two threads of its own on their way, which costs more than the note is worth.
A line is a Unix socket: who waits is woken by who sends, within microseconds, and learns at once
when the other process is gone. It carries no data, only where data lie and that they were read.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import closing

__all__ = ["Line", "Listener"]

_NOTE = struct.Struct("<QQQ")  # key, and two numbers
_GREETING = struct.Struct("<QQ")  # rank of who calls, secret of who is called


class Line:
    """One end of the connection to one rank; safe for several threads.

    Args:
        connection: the connected socket.
        peer: rank of the other end, for messages.
        timeout: seconds after which a wait gives up.
    """

    def __init__(self, connection: socket.socket, peer: int, timeout: float) -> None:
        connection.settimeout(timeout)
        self._socket, self._peer, self._timeout = connection, peer, timeout
        self._send_lock = threading.Lock()
        self._arrived = threading.Condition()
        self._inbox: dict[int, tuple[int, int]] = {}
        self._reading = False

    def send(self, key: int, first: int, second: int) -> None:
        """Send two numbers under a key. Does not wait for the other end to ask for them.

        Raises:
            RuntimeError: the other process is gone.
        """
        try:
            with self._send_lock:
                self._socket.send(_NOTE.pack(key, first, second))
        except OSError as error:
            raise self._broken(error) from error

    def take(self, key: int) -> tuple[int, int]:
        """Wait for the numbers that the other end sends under `key`.

        Threads that wait at the same time take turns in reading, and sort what comes.

        Raises:
            RuntimeError: nothing came in time, or the other process is gone.
        """
        end = time.monotonic() + self._timeout
        with self._arrived:
            while key not in self._inbox:
                if self._reading:
                    if not self._arrived.wait(max(0.0, end - time.monotonic())):
                        raise self._broken(TimeoutError())
                    continue
                self._reading = True
                self._arrived.release()
                try:
                    note = self._read()
                finally:
                    self._arrived.acquire()
                    self._reading = False
                    self._arrived.notify_all()
                found, *numbers = _NOTE.unpack(note)
                self._inbox[found] = (numbers[0], numbers[1])
            return self._inbox.pop(key)

    def _read(self) -> bytes:
        try:
            note = self._socket.recv(_NOTE.size)
        except OSError as error:
            raise self._broken(error) from error
        if len(note) < _NOTE.size:
            raise self._broken(None)
        return note

    def _broken(self, error: OSError | None) -> RuntimeError:
        if isinstance(error, TimeoutError):
            return RuntimeError(
                f"Timed out after {self._timeout:g} s of waiting for rank {self._peer} of the "
                f"group; it hangs, or makes other calls than this rank (check=True tells)"
            )
        reason = "it closed the connection" if error is None else str(error)
        return RuntimeError(
            f"rank {self._peer} of the group, on this host, is gone: {reason}; look at its log"
        )


class Listener:
    """Where this rank's neighbours can call: an abstract address, known by its number.

    Abstract addresses need no file and are seen only within one network namespace.
    """

    def __init__(self, number: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_address(number))
        self._socket.listen(4096)

    def call(self, number: int, rank: int, secret: int, peer: int, timeout: float) -> Line:
        """Connect to the listener `number` of `peer`, as `rank`, showing the peer's secret."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout)
        connection.connect(_address(number))
        connection.send(_GREETING.pack(rank, secret))
        return Line(connection, peer, timeout)

    def answer(self, callers: set[int], secret: int, timeout: float) -> dict[int, Line]:
        """Wait for calls of the ranks `callers`; hang up on whoever lacks this rank's secret."""
        lines: dict[int, Line] = {}
        self._socket.settimeout(timeout)
        while callers - lines.keys():
            connection, _ = self._socket.accept()
            connection.settimeout(timeout)
            greeting = connection.recv(_GREETING.size)
            if len(greeting) == _GREETING.size:
                rank, shown = _GREETING.unpack(greeting)
                if shown == secret and rank in callers:
                    lines[rank] = Line(connection, rank, timeout)
                    continue
            connection.close()
        return lines

    def close(self) -> None:
        """Take no more calls; the lines stay."""
        with closing(self._socket):
            pass


def _address(number: int) -> str:
    return f"\0lamina-{number:016x}"
