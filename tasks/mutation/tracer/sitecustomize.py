"""Notes which test enters which function of a layer, in pytest and in all that it starts.

Python imports a `sitecustomize` that stands on PYTHONPATH whenever it starts, so ranks and their
fork server are seen too. A line `file:first line<tab>test` is added to the file named by
LAMINA_ENTERED for each function below LAMINA_ENTERED_SOURCE, once per process and test.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType


def install(source: str, out: str) -> None:
    """Begin, in this process, its threads, and the processes that it forks."""
    known: dict[int, tuple[CodeType, str]] = {}  # holding the code keeps its id from being reused
    noted: set[tuple[str, str]] = set()
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    moved = 900 + handle % 100  # programs close or reuse low descriptors
    os.dup2(handle, moved)
    os.close(handle)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        entry = known.get(id(code))
        if entry is None:
            inside = code.co_filename.startswith(source)
            name = f"{code.co_filename[len(source) :]}:{code.co_firstlineno}" if inside else ""
            entry = known[id(code)] = (code, name)
        if not entry[1]:
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if test and (entry[1], test) not in noted:
            noted.add((entry[1], test))
            os.write(moved, f"{entry[1]}\t{test}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


if os.environ.get("LAMINA_ENTERED"):
    install(os.environ["LAMINA_ENTERED_SOURCE"], os.environ["LAMINA_ENTERED"])
