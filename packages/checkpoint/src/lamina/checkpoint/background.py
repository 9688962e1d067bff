"""One task in a thread, whose failure is not lost."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable


class Background:
    """Runs one task at a time in a thread of its own.

    The thread is not a daemon: a program that ends without waiting still finishes its save, and a
    failure that nobody has collected by then is printed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: list[BaseException] = []
        self._last_words = weakref.finalize(self, _tell, self._failure)

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, task: Callable[[], object], name: str) -> None:
        """Run a task.

        Raises:
            RuntimeError: another one runs.

        """
        if self.busy:
            raise RuntimeError("a task is running: wait() first")
        failure = self._failure

        def run() -> None:
            try:
                task()
            except BaseException as error:
                failure.append(error)

        self._thread = threading.Thread(target=run, name=name, daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the task, and raise what it raised; each failure is raised once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure:
            raise self._failure.pop()


def _tell(failure: list[BaseException]) -> None:
    for error in failure:
        print(f"lamina.checkpoint: a save in the background failed: {error}", file=sys.stderr)
