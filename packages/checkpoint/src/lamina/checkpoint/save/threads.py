"""Pieces of work that run at once, each in a thread.

Note [Python 3.12 starts no thread while it ends]
A save in the background is waited for when the program ends, and goes on until then. Python 3.11
and 3.13 let it start threads so long; Python 3.12 raises RuntimeError from the first moment of the
end. So what cannot have a thread runs on the one that asks for it. An executor is no way to do so:
work that it has queued before the error is run by the threads that it has.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_threads(work: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at once and return what they return, in their order.

    Raises:
        BaseException: the error of the first that failed, once all have ended.
    """
    if len(work) == 1:
        return [work[0]()]
    results: list[Future[T]] = [Future() for _ in work]
    threads = []
    for act, result in zip(work, results, strict=True):
        thread = Thread(target=_complete, args=(act, result), name="save-file", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # see Note [Python 3.12 starts no thread while it ends]
            _complete(act, result)
        else:
            threads.append(thread)
    # Also where one has failed: nothing may be written to a save that is abandoned.
    for thread in threads:
        thread.join()
    return [result.result() for result in results]


def _complete(act: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(act())
    except BaseException as error:
        result.set_exception(error)
