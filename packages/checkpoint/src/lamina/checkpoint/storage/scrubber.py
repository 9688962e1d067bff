"""Reads kept checkpoints again while training goes on, to find those that have rotted."""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable

from lamina.checkpoint.errors import CheckpointDamagedError
from lamina.checkpoint.storage.locations import Location
from lamina.checkpoint.storage.manifest import MANIFEST, Manifest
from lamina.checkpoint.storage.stores import Store

_REST = 60.0  # seconds between two rounds, so that small checkpoints are not read all the time


class Scrubber:
    """Compares checkpoints with their checksums, one after another, in a thread of its own.

    Bytes come from the disk and not from its cache, as far as the system can be asked for that.

    The newest are read first. A step whose checkpoint cannot be read is added to `damaged`, with a
    warning that names the file. `rate` are bytes that are read per second, on average over each 4
    MiB, and `rest` seconds between two rounds.
    """

    def __init__(
        self, store: Store, damaged: set[int], rate: float, *, rest: float = _REST
    ) -> None:
        self._given = store, damaged, rate, rest
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)  # the thread does not keep this object
        work = (*self._given, self._stop)
        self._thread = threading.Thread(target=_rounds, args=work, name="scrubber", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, after the piece that is being read."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


class _StoppedError(Exception):
    """The thread is to end."""


def _rounds(
    store: Store, damaged: set[int], rate: float, rest: float, stop: threading.Event
) -> None:
    def pace(size: int) -> None:
        if stop.wait(size / rate):
            raise _StoppedError

    while True:
        try:
            for step, location in reversed(store.locations().items()):
                _scrub(step, location, damaged, pace)
        except _StoppedError:
            return
        except Exception as error:  # a lost connection, of any store: the next round tries anew
            warnings.warn(f"checkpoints are not scrubbed: {error}", stacklevel=2)
        if stop.wait(rest):
            return


def _scrub(step: int, location: Location, damaged: set[int], pace: Callable[[int], None]) -> None:
    # Note [A scrubber reads what others replace]
    # A save may replace or delete a checkpoint while it is read. So damage counts only if a second
    # reading finds it too, and the manifest is the one from before. That is looked at once the
    # damage has been noted: a save that comes later takes the note back itself.
    text = _text(location)
    first = None if step in damaged else _damage(location, pace)
    if first is None or _damage(location, pace) != first:
        return
    damaged.add(step)
    if _text(location) != text or not location.is_there():
        damaged.discard(step)
    else:
        warnings.warn(f"step {step} has rotted and counts as kept no more: {first}", stacklevel=2)


def _text(location: Location) -> bytes | None:
    with contextlib.suppress(OSError):
        return bytes(location.read(MANIFEST))
    return None


def _damage(location: Location, pace: Callable[[int], None]) -> str | None:
    try:
        manifest = Manifest.read(location)
        for name in manifest.files:
            manifest.check_file(location, name, moved=pace, from_disk=True)
    except CheckpointDamagedError as error:
        return str(error)
    return None
