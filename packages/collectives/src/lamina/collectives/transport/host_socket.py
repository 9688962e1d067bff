"""A socket between two ranks of one host: records of 24 bytes, straight from thread to thread.

gloo's messages pass two threads of its own on their way, which costs more than such a record is
worth. On a Unix socket the sender wakes the receiver within microseconds, and a rank learns at
once when the other process is gone. The socket carries no tensor data. It says where data lie and
that they were read.
"""

import os
import selectors
import socket
import struct
import threading
import time
from contextlib import ExitStack

_RECORD = struct.Struct("<QQQ")  # key, and two numbers
_GREETING = struct.Struct("<QQ")  # rank of the caller, secret of the rank that is called
_PEER = struct.Struct("3i")  # process, user and group, as the kernel knows them


class HostSocket:
    """One end of the connection to one rank; safe for several threads.

    Messages name the rank of the other end (`peer`). A wait gives up after `timeout` seconds.
    """

    def __init__(self, connection: socket.socket, peer: int, timeout: float) -> None:
        connection.settimeout(timeout)
        self._socket, self._peer, self._timeout = connection, peer, timeout
        self._send_lock = threading.Lock()
        self._arrived = threading.Condition()
        self._inbox: dict[int, tuple[int, int]] = {}
        self._reading = False

    def send(self, key: int, first: int, second: int) -> None:
        """Send two numbers under a key, without waiting for the other end to ask for them.

        RuntimeError says that the other process is gone.
        """
        try:
            with self._send_lock:
                self._socket.send(_RECORD.pack(key, first, second))
        except OSError as error:
            raise self._broken(error) from error

    def take(self, key: int) -> tuple[int, int]:
        """Wait for the numbers that the other end sends under `key`.

        Threads that wait at the same time take turns in reading. A record for another thread's key
        is kept until that thread takes it. RuntimeError says that nothing came in time, or that the
        other process is gone.
        """
        end = time.monotonic() + self._timeout
        with self._arrived:
            while key not in self._inbox:
                if self._reading:  # another thread reads for both
                    if not self._arrived.wait(max(0.0, end - time.monotonic())):
                        raise self._broken(TimeoutError())
                    continue
                self._reading = True
                self._arrived.release()  # nobody can be woken by who sleeps in `recv` with the lock
                try:
                    record = self._read()
                finally:
                    self._arrived.acquire()
                    self._reading = False
                    self._arrived.notify_all()
                arrived, first, second = _RECORD.unpack(record)
                self._inbox[arrived] = first, second
            return self._inbox.pop(key)

    def _read(self) -> bytes:
        try:
            record = self._socket.recv(_RECORD.size)
        except OSError as error:
            raise self._broken(error) from error
        if len(record) < _RECORD.size:
            raise self._broken(None)
        return record

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


class HostSocketListener:
    """An abstract address, known by its number, at which other ranks of the host can connect.

    Abstract addresses need no file and are seen only within one network namespace.

    Note [Whom a listener believes]
    Any user of the host can connect to an abstract address. So the kernel is asked who it is
    (SO_PEERCRED), and only the processes that are expected are listened to. Callers are read side
    by side: one that connects and says nothing holds nobody up.
    """

    def __init__(self, number: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_address(number))
        self._socket.listen(4096)

    def connect(self, number: int, rank: int, secret: int, peer: int, timeout: float) -> HostSocket:
        """Connect to the listener `number` of `peer`, as `rank`, showing the peer's secret.

        RuntimeError says that the peer is gone.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout)
        try:
            connection.connect(_address(number))
            connection.send(_GREETING.pack(rank, secret))
        except OSError as error:
            connection.close()
            raise RuntimeError(
                f"rank {peer} of the group, on this host, is gone: it takes no connection "
                f"({error}); look at its log"
            ) from error
        return HostSocket(connection, peer, timeout)

    def accept(self, callers: dict[int, int], secret: int, timeout: float) -> dict[int, HostSocket]:
        """Wait for other ranks, and hang up on everybody else.

        `callers` has the process of each rank that will call, and has to show the secret.
        RuntimeError says that one of them is gone, or does not call within `timeout` seconds.
        """
        sockets: dict[int, HostSocket] = {}
        end = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector, ExitStack() as stack:
            selector.register(self._socket, selectors.EVENT_READ)
            for rank, process in callers.items():
                if (ended := _end_of(process, stack)) is not None:
                    selector.register(ended, selectors.EVENT_READ, rank)
            # Until all have called: each event is a call, a greeting, or the end of a process.
            while missing := callers.keys() - sockets.keys():
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    raise RuntimeError(
                        f"Timed out after {timeout:g} s of waiting for ranks {sorted(missing)} of "
                        "the group, on this host, to connect"
                    )
                # Calls come first: a rank may have called and ended.
                for key, _ in sorted(ready, key=lambda event: event[0].data is not None):
                    if key.fileobj is self._socket:
                        self._take_call(selector, stack, set(callers.values()))
                        continue
                    selector.unregister(key.fileobj)
                    if isinstance(key.fileobj, socket.socket):
                        caller = _greeted(key.fileobj, secret, callers)
                        if caller is not None:
                            sockets[caller] = HostSocket(key.fileobj.dup(), caller, timeout)
                    elif key.data not in sockets:
                        raise RuntimeError(
                            f"rank {key.data} of the group (process {callers[key.data]} on this "
                            "host) is gone: it ended before it connected; look at its log"
                        )
        return sockets

    def _take_call(
        self, selector: selectors.BaseSelector, stack: ExitStack, processes: set[int]
    ) -> None:
        connection = stack.enter_context(self._socket.accept()[0])
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        process, user, _ = _PEER.unpack(credentials)
        if process in processes and user == os.geteuid():
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
        else:  # see Note [Whom a listener believes]
            connection.close()

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        self._socket.close()


def _greeted(connection: socket.socket, secret: int, callers: dict[int, int]) -> int | None:
    """The rank that has called, if it shows the secret."""
    try:
        greeting = connection.recv(_GREETING.size)
    except OSError:
        return None
    if len(greeting) != _GREETING.size:
        return None
    rank, shown = _GREETING.unpack(greeting)
    return rank if shown == secret and rank in callers else None


def _end_of(process: int, stack: ExitStack) -> int | None:
    """A descriptor that becomes readable when a process ends; None where there is no such thing."""
    try:
        descriptor = os.pidfd_open(process)
    except (OSError, AttributeError):
        return None
    stack.callback(os.close, descriptor)
    return descriptor


def _address(number: int) -> str:
    return f"\0lamina-{number:016x}"
