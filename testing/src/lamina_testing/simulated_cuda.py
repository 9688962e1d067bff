"""Stand-ins for `torch.cuda`'s streams and events, which act as CUDA's own do in its trace.

Each tells torch's trace of CUDA (`torch.cuda._gpu_trace`) what CUDA tells it: that an event was
recorded on a stream, that a stream or the host waits for an event, and that the host waits for a
stream. Nothing else happens: the tensors are those of a CPU.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace

from lamina_testing.recording import Recording

CUDA = torch.device("cuda", 0)


def stand_ins(recording: Recording) -> dict[str, Any]:
    """Return stand-ins for the names of `torch.cuda` that the packages use."""
    events, sides = itertools.count(1), itertools.count(1)

    class FakeEvent:
        """An event; before its first `record` nobody waits for it."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.cuda_event = next(events)

        def record(self, stream: FakeStream | None = None) -> None:
            where = (stream or current_stream()).cuda_stream
            gpu_trace.EventRecordCallbacks.fire_callbacks(self.cuda_event, where)

        def wait(self, stream: FakeStream | None = None) -> None:
            if recording.happens():
                where = (stream or current_stream()).cuda_stream
                gpu_trace.EventWaitCallbacks.fire_callbacks(self.cuda_event, where)

        def synchronize(self) -> None:
            if recording.happens():
                gpu_trace.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)

        def query(self) -> bool:
            return True

    class FakeStream:
        """A stream."""

        def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
            self.name = name or f"side {next(sides)}"
            self.cuda_stream = recording.number_of(self.name)
            self.device = CUDA

        @classmethod
        def named(cls, name: str) -> FakeStream:
            return cls(name=name)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, FakeStream) and other.name == self.name

        def __hash__(self) -> int:
            return hash(self.name)

        def wait_stream(self, other: FakeStream) -> None:
            self.wait_event(other.record_event())

        def wait_event(self, event: FakeEvent) -> None:
            event.wait(self)

        def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
            event = event or FakeEvent()
            event.record(self)
            return event

        def synchronize(self) -> None:
            if recording.happens():
                gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(self.cuda_stream)

    def current_stream(device: object = None) -> FakeStream:
        return FakeStream(name=recording.current)

    return {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "stream": lambda stream: recording.on(stream.name),
        "device": lambda _: contextlib.nullcontext(),
        "current_stream": current_stream,
        "is_current_stream_capturing": lambda: False,
    }
