"""A record on a clock: when a GPU would have done what a step asks of it.

There is one stream of kernels, and one of messages for each communicator, as the engine has. A
message starts once the kernels before it are done (of a program with streams, those that its stream
comes after), and kernels stand still where the step waits for
a message that is not. All durations are those of the cost model (`constants`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lamina.models.plan.constants import Machine
from lamina.models.plan.record.step_record import HOST, Message, Operation, StepRecord


@dataclass
class Timing:
    """Seconds of a step.

    Attributes:
        spent: by category: `products`, `other kernels`, `host`, `optimizer`, and
            `exposed AXIS` for each axis whose messages kernels have waited for.
        forward, backward, update: seconds of all forwards, all backwards, and what follows them.
        spans: what a trace shows: track, name, begin and length.
    """

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    moments: list[tuple[int, float]] = field(default_factory=list)
    """Events of the record, and when the kernels before them were done."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.spent.values())


def product_seconds(operation: Operation, machine: Machine) -> float:
    """Seconds of a product, by the peak of its dtype and the efficiency of its shape."""
    costs, gpu = machine.costs, machine.gpu
    if "attention" in operation.name or "varlen_attn" in operation.name:
        share = costs.attention_backward if operation.backward else costs.attention
        if "backward" not in operation.name:  # a forward that runs again
            share = costs.attention
        return operation.flops / (gpu.bf16 * share)
    _, rows, columns, inner = operation.shape
    fit = rows / (rows + costs.half_rows) * columns / (columns + costs.half_rows)
    fit *= inner / (inner + costs.half_inner)
    rates = {1: gpu.fp8 * costs.fp8_product, 2: gpu.bf16 * costs.product}
    rate = rates.get(operation.width, gpu.fp32 * costs.product)
    return max(operation.flops / (rate * max(fit, 1e-3)), kernel_seconds(operation, machine))


def kernel_seconds(operation: Operation, machine: Machine) -> float:
    """Seconds in which the memory moves an operator's bytes."""
    return operation.nbytes / (machine.gpu.bandwidth * machine.costs.memory)


def message_seconds(message: Message, machine: Machine) -> float:
    """Seconds of a collective: of a ring, or of pieces that go to each rank by themselves.

    A ring over hosts crosses a host's edge once for all of its ranks there, and each of these has a
    network card. Pieces cross it for each rank.
    """
    costs, gpu, ranks = machine.costs, machine.gpu, message.ranks
    if message.axis == HOST:
        return message.nbytes / gpu.host
    if ranks < 2 or not message.nbytes:
        return 0.0
    inside = gpu.link * costs.link
    if message.between == 0:
        return message.nbytes / inside + costs.latency * _steps(message, ranks)
    outside = gpu.network * costs.network
    if _is_ring(message):
        share = message.between / message.nbytes  # of ranks that are elsewhere
        near = max(1.0, ranks - share * (ranks - 1))
        seconds = message.nbytes / min(inside, near * outside)
    else:
        seconds = max((message.nbytes - message.between) / inside, message.between / outside)
    return seconds + costs.latency_between * _steps(message, ranks)


_RINGS = frozenset(
    """
    all_gather_into all_gather gather broadcast all_reduce all_reduce_native reduce_scatter_native
    """.split()
)


def _is_ring(message: Message) -> bool:
    return message.op in _RINGS


def _steps(message: Message, ranks: int) -> float:
    """Steps one after the other: NCCL takes trees and parallel rings for small messages."""
    return max(1.0, min(ranks - 1.0, 4.0 + ranks / 16.0))


def replay(
    record: StepRecord,
    machine: Machine,
    *,
    compiled: bool = False,
    optimizer_bytes: int = 0,
) -> Timing:
    """Run a record on the clock.

    Args:
        record: of one rank's step.
        machine: what it would run on.
        compiled: whether element-wise kernels are fused.
        optimizer_bytes: what a fused optimizer reads and writes; the record's own operators of the
            optimizer are then left out, as it has one for each state.
    """
    clock = _Clock(record, machine, compiled, optimizer_bytes)
    in_order = sorted(range(len(record.messages)), key=lambda n: record.messages[n].issued)
    waits: dict[int, list[int]] = defaultdict(list)
    for number, message in enumerate(record.messages):
        if message.waited is not None:
            waits[message.waited].append(number)
    events = {*waits, *(message.issued for message in record.messages)}
    sent = 0
    for event in sorted(events):
        clock.kernels(event)
        # What begins at an event goes out before anything there waits: a wait may be for it.
        while sent < len(in_order) and record.messages[in_order[sent]].issued <= event:
            clock.send(in_order[sent])
            sent += 1
        for awaited in waits.get(event, ()):
            clock.wait(awaited)
    clock.kernels(record.end + 1)
    clock.update()
    return clock.timing


RUNS_AHEAD = 0.01
"""Seconds by which the host is ahead of the kernels where these wait for a message."""
SHOWN = 2e-5
"""Seconds of the shortest kernel that a trace shows."""
HOST_COMPILED = 0.5
"""Part of the host's time for a launch that is left in a compiled block."""


class _Clock:
    """One rank's step as seconds pass: kernels in their order, and messages beside them."""

    def __init__(
        self,
        record: StepRecord,
        machine: Machine,
        compiled: bool,
        optimizer_bytes: int,
    ) -> None:
        self.timing = Timing()
        self._record, self._machine, self._compiled = record, machine, compiled
        self._optimizer_bytes = optimizer_bytes
        marks = (at for at, name in record.marks if name == "optimizer")
        self._optimizer = next(marks, record.end)
        self._now = 0.0  # when the kernels so far are done
        self._host = 0.0  # when the host has launched them
        self._next = 0  # the operator that comes next
        self._free: defaultdict[str, float] = defaultdict(float)  # when a communicator is free
        self._ends: dict[int, float] = {}  # when each message has arrived, by number

    def kernels(self, until: int) -> None:
        """Run the kernels before an event."""
        operations = self._record.operations
        while self._next < len(operations) and operations[self._next].at < until:
            operation = operations[self._next]
            # The record has one operator of the optimizer for each state, and a GPU one kernel.
            if operation.at < self._optimizer or not self._optimizer_bytes:
                self._launch(operation)
                self._run(operation)
            self.timing.moments.append((operation.at, self._now))
            self._next += 1

    def _launch(self, operation: Operation) -> None:
        """The host launches a kernel, which cannot begin before."""
        self._host += self._machine.costs.launch * (HOST_COMPILED if self._compiled else 1.0)
        if self._host > self._now:
            self._spend("host", self._host - self._now, operation)
            self._now = self._host

    def _run(self, operation: Operation) -> None:
        if operation.flops:
            kind = "products"
            seconds = product_seconds(operation, self._machine)
        else:
            kind = "other kernels"
            seconds = kernel_seconds(operation, self._machine)
            unfused = self._compiled and not self._record.fused
            if unfused and operation.at < self._optimizer:
                seconds *= self._machine.costs.fused
        if seconds > SHOWN:
            self.timing.spans.append((kind, operation.name, self._now, seconds))
        self._spend(kind, seconds, operation)
        self._now += seconds

    def send(self, number: int) -> None:
        """A message begins once the kernels before it are done and its communicator is free."""
        message = self._record.messages[number]
        ready = self._now if message.after is None else max(self._host, self._when(message.after))
        ends = (self._ends.get(before, 0.0) for before in message.behind)
        begin = max(ready, self._free[message.communicator], *ends, 0.0)
        seconds = message_seconds(message, self._machine)
        self._free[message.communicator] = self._ends[number] = begin + seconds
        label = f"{message.op} {message.purpose}".strip()
        self.timing.spans.append((message.communicator, label, begin, seconds))

    def _when(self, event: int) -> float:
        """When the kernels before an event were done."""
        moments = self.timing.moments
        place = bisect_left(moments, event, key=lambda moment: moment[0])
        return moments[place - 1][1] if place else 0.0

    def wait(self, number: int) -> None:
        """Kernels stand still until a message is there."""
        late = self._ends.get(number, self._now) - self._now
        if late <= 0:
            return
        message, operations = self._record.messages[number], self._record.operations
        self.timing.spans.append(("kernels wait", message.communicator, self._now, late))
        following = operations[self._next] if self._next < len(operations) else None
        self._spend(f"exposed {message.axis}", late, following)
        self._now += late
        self._host = max(self._host, self._now - RUNS_AHEAD)

    def update(self) -> None:
        """The optimizer's one kernel."""
        if self._optimizer_bytes:
            bandwidth = self._machine.gpu.bandwidth * self._machine.costs.memory
            seconds = self._optimizer_bytes / bandwidth
            self.timing.spans.append(("other kernels", "optimizer", self._now, seconds))
            self._spend("optimizer", seconds, None)

    def _spend(self, kind: str, seconds: float, operation: Operation | None) -> None:
        """Count seconds under a kind, and to the pass of the operator that they are before."""
        timing = self.timing
        timing.spent[kind] += seconds
        if operation is None or operation.at >= self._optimizer:
            timing.update += seconds
        elif operation.backward:
            timing.backward += seconds
        else:
            timing.forward += seconds


def memory_over_time(timing: Timing, record: StepRecord) -> list[tuple[float, dict[str, int]]]:
    """Bytes by category, at the seconds at which they change."""
    places = [at for at, _ in timing.moments]
    points = []
    for at, now in record.timeline():
        place = bisect_left(places, at)
        points.append((timing.moments[place][1] if place < len(places) else timing.total, now))
    return points


def write_trace(timing: Timing, record: StepRecord, path: str | Path) -> None:
    """Write a step as Chrome trace JSON, for ui.perfetto.dev: kernels, messages, memory."""
    tracks = {name: at for at, name in enumerate(dict.fromkeys(each[0] for each in timing.spans))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": at, "name": "thread_name", "args": {"name": name}}
        for name, at in tracks.items()
    ]
    events += [
        {"ph": "X", "pid": 0, "tid": tracks[track], "name": name, "ts": 1e6 * at, "dur": 1e6 * long}
        for track, name, at, long in timing.spans
    ]
    for stamp, now in memory_over_time(timing, record):
        sizes = {name: nbytes / 2**30 for name, nbytes in now.items()}
        events.append(
            {"ph": "C", "pid": 0, "name": "memory, GiB", "ts": 1e6 * stamp, "args": sizes}
        )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
