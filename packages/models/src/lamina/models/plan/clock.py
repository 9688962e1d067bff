"""A record on a clock: when a GPU would have done what a step asks of it.

There is one stream of kernels, and one of messages for each communicator, as the engine has. A
message starts once the kernels before it are done, and kernels stand still where the step waits for
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
from lamina.models.plan.recorder import Message, Operation, StepRecord


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


def product_seconds(operation: Operation, machine: Machine, *, fp8: bool, fp32: bool) -> float:
    """Seconds of a product, by the peak of its dtype and the efficiency of its shape."""
    costs, gpu = machine.costs, machine.gpu
    if "attention" in operation.name or "varlen_attn" in operation.name:
        share = costs.attention_backward if operation.backward else costs.attention
        if "backward" not in operation.name:  # a forward that runs again
            share = costs.attention
        return operation.flops / (gpu.bf16 * share)
    number, rows, columns, inner = operation.shape
    fit = rows / (rows + costs.half_rows) * columns / (columns + costs.half_rows)
    fit *= inner / (inner + costs.half_inner)
    wide = operation.width >= 4 or fp32
    peak = gpu.fp32 if wide else gpu.fp8 if fp8 and number == 1 else gpu.bf16
    share = costs.fp8_product if fp8 and number == 1 and not wide else costs.product
    return max(
        operation.flops / (peak * share * max(fit, 1e-3)), kernel_seconds(operation, machine)
    )


def kernel_seconds(operation: Operation, machine: Machine) -> float:
    """Seconds in which the memory moves an operator's bytes."""
    return operation.nbytes / (machine.gpu.bandwidth * machine.costs.memory)


def message_seconds(message: Message, machine: Machine) -> float:
    """Seconds of a collective: of a ring, or of pieces that go to each rank by themselves.

    A ring over hosts crosses a host's edge once for all of its ranks there, and each of these has a
    network card. Pieces cross it for each rank.
    """
    costs, gpu, ranks = machine.costs, machine.gpu, message.ranks
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


def _is_ring(message: Message) -> bool:
    return message.op in ("all_gather_into", "all_reduce", "gather", "all_gather", "broadcast")


def _steps(message: Message, ranks: int) -> float:
    """Steps one after the other: NCCL takes trees and parallel rings for small messages."""
    return max(1.0, min(ranks - 1.0, 4.0 + ranks / 16.0))


def replay(
    record: StepRecord,
    machine: Machine,
    *,
    precision: str = "bf16",
    compiled: bool = False,
    optimizer_bytes: int = 0,
) -> Timing:
    """Run a record on the clock.

    Args:
        record: of one rank's step.
        machine: what it would run on.
        precision: of products.
        compiled: whether element-wise kernels are fused.
        optimizer_bytes: what a fused optimizer reads and writes; the record's own operators of the
            optimizer are then left out, as it has one for each state.
    """
    timing, costs = Timing(), machine.costs
    fp8, fp32 = precision == "fp8", precision == "fp32"
    optimizer = next((at for at, name in record.marks if name == "optimizer"), record.end)
    messages = sorted(enumerate(record.messages), key=lambda pair: (pair[1].issued, pair[0]))
    waits: dict[int, list[int]] = {}
    for number, message in messages:
        if message.waited is not None:
            waits.setdefault(message.waited, []).append(number)
    events = sorted({*waits, *(message.issued for _, message in messages)})
    operations = iter([*record.operations, None])
    operation = next(operations)
    now = host = 0.0
    free: defaultdict[str, float] = defaultdict(float)
    ends: dict[int, float] = {}
    issued = 0

    def kernels(until: int) -> None:
        """Run the kernels before an event."""
        nonlocal now, host, operation
        while operation is not None and operation.at < until:
            fused = operation.at >= optimizer and optimizer_bytes > 0
            if not fused:
                host += costs.launch * (0.5 if compiled else 1.0)
                if host > now:
                    _add(timing, "host", host - now, operation, optimizer)
                    now = host
                if operation.flops:
                    seconds = product_seconds(operation, machine, fp8=fp8, fp32=fp32)
                    kind = "products"
                else:
                    seconds = kernel_seconds(operation, machine)
                    seconds *= costs.fused if compiled and operation.at < optimizer else 1.0
                    kind = "other kernels"
                if seconds > 2e-5:
                    timing.spans.append((kind, operation.name, now, seconds))
                _add(timing, kind, seconds, operation, optimizer)
                now += seconds
            timing.moments.append((operation.at, now))
            operation = next(operations)

    for event in events:
        kernels(event)
        while issued < len(messages) and messages[issued][1].issued <= event:
            number, message = messages[issued]
            begin = max(now, free[message.communicator])
            seconds = message_seconds(message, machine)
            free[message.communicator] = ends[number] = begin + seconds
            label = f"{message.op} {message.purpose}".strip()
            timing.spans.append((message.communicator, label, begin, seconds))
            issued += 1
        for number in waits.get(event, ()):
            late = ends.get(number, now) - now
            if late > 0:
                message = record.messages[number]
                timing.spans.append(("kernels wait", message.communicator, now, late))
                _add(timing, f"exposed {message.axis}", late, operation, optimizer)
                now += late
                host = max(host, now - 0.01)  # the host runs ahead by so much
    kernels(record.end + 1)
    if optimizer_bytes:
        seconds = optimizer_bytes / (machine.gpu.bandwidth * costs.memory)
        timing.spent["optimizer"] += seconds
        timing.update += seconds
        timing.spans.append(("other kernels", "optimizer", now, seconds))
    return timing


def _add(
    timing: Timing, kind: str, seconds: float, operation: Operation | None, optimizer: int
) -> None:
    timing.spent[kind] += seconds
    if operation is None or operation.at >= optimizer:
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
