"""The ledger: what went over the wire, along which axis, and whether compute hid it.

A `Ledger` watches; it changes nothing. It sees every collective that this thread issues
while the ledger is open, and those of the backwards this thread starts (Note [Who records] says how
that reaches autograd's worker threads). Ledgers nest, and an outer one sees what an inner one sees.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lamina.collectives.call.collective import install, remove
from lamina.collectives.transport.lanes import Call
from lamina.mesh.engine import aligned

_HIDDEN_ENOUGH = 0.5
_APART = 1 << 23  # above the numbers that Linux gives to processes


@dataclass(frozen=True)
class Record:
    """One collective of this rank.

    Times are seconds on the clock of `time.perf_counter`, so records of several ledgers compare.

    - On CPU, `issued` is when the caller handed the collective over, `finished` when the transport
      and the sum that belongs to it were done (noted by the thread that did them), `waited` when
      the caller first asked for the result.
    - On CUDA, the three are the moments at which the *device* reached the collective's start and
      end on its stream, and the wait on the compute stream, from timing events, moved to the
      host's clock. The host itself never waits, so its times would say nothing.

    Attributes:
        axis: name of the mesh axis (a group's description without its ":purpose").
        communicator: the group's whole description ("dp_shard:gather").
        op: the public function ("all_gather_into", "send_recv", ...).
        purpose: the unit or bucket that it was for, in words; "" where nobody said so.
        dtype: what travelled.
        bytes: what this rank sent (docs/collectives.md has the formulas).
        between: the part of `bytes` that went to ranks of other hosts.
        group_size: ranks in the group.
        asynchronous: whether the caller got a handle back before the end.
        issued, finished, waited: see above; None where it has not happened (yet).
    """

    axis: str
    communicator: str
    op: str
    purpose: str
    dtype: torch.dtype
    bytes: int
    between: int
    group_size: int
    asynchronous: bool
    issued: float
    finished: float | None
    waited: float | None

    @property
    def duration(self) -> float:
        """Seconds from issue to finish; 0 while in flight."""
        return 0.0 if self.finished is None else max(0.0, self.finished - self.issued)

    @property
    def exposed(self) -> float:
        """Seconds of `duration` in which the caller (the compute stream) stood still for it."""
        if self.finished is None:
            return 0.0
        if not self.asynchronous:
            return self.duration
        if self.waited is None:
            return 0.0
        return min(self.duration, max(0.0, self.finished - self.waited))

    @property
    def overlapped(self) -> bool:
        """Whether the caller was free to compute for at least half of the duration.

        That is a statement about the gap between issue and wait; whether something useful ran in
        it is the caller's doing. Never true of a synchronous collective or of one in flight.
        """
        if self.finished is None or not self.asynchronous:
            return False
        return self.exposed <= (1.0 - _HIDDEN_ENOUGH) * self.duration


class Ledger:
    """Context manager that records every collective issued inside it.

        with Ledger() as ledger:
            loss = model(batch)
        print(ledger.bytes(axis="tp", op="all_gather_into"))

    Raises:
        RuntimeError: entered while it is open, or left on another thread than it was entered on.

    Examples:
        >>> with Ledger() as ledger:
        ...     all_gather_into(torch.empty(4), torch.ones(4), None).wait()
        >>> ledger.bytes(op="all_gather_into")  # one rank sends nothing
        0
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._open = False

    def __enter__(self) -> Ledger:
        if self._open:
            raise RuntimeError(
                "this Ledger is already open: nest a second Ledger() instead, or leave it first"
            )
        install(self.issued)
        self._open = True
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            remove(self.issued)
        except ValueError:
            raise RuntimeError(
                "this Ledger was entered on another thread; a ledger belongs to the thread that "
                "enters it (autograd's workers are seen from there), so leave it there"
            ) from None
        self._open = False

    def issued(self, call: Call) -> None:
        """Take note of a call (from `issue`; any thread)."""
        if call.group_size > 1:  # a group of one moves nothing
            self._calls.append(call)

    @property
    def records(self) -> list[Record]:
        """All records so far, in the order of issue.

        On CUDA this synchronises with the events of the collectives that were waited for.
        """
        # One clock for all records, made now: their events are on one time axis.
        clock = _DeviceClock()
        return [_record(call, clock) for call in tuple(self._calls)]

    def bytes(
        self, axis: str | None = None, op: str | None = None, *, between_hosts: bool | None = None
    ) -> int:
        """Bytes that this rank sent, in all or along one axis or by one function.

        Args:
            axis: "tp"; a full description with its purpose ("tp:gather") picks that communicator.
            op: name of a public function.
            between_hosts: True counts what went to other hosts, False what stayed on this one.
        """
        # Calls and not records: bytes are known at once, and nobody waits for a device.
        calls = [
            call
            for call in tuple(self._calls)
            if axis in (None, _axis(call.axis), call.axis) and op in (None, call.op)
        ]
        total, between = sum(call.nbytes for call in calls), sum(call.between for call in calls)
        return {None: total, True: between, False: total - between}[between_hosts]

    def table(self) -> str:
        """Return a table: a row per axis, function and dtype, with bytes and times, and a total."""
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in self.records:
            key = (record.axis, record.op, _dtype_name(record.dtype))
            groups.setdefault(key, []).append(record)
        rows = [_row(key, members) for key, members in groups.items()]
        everything = [record for members in groups.values() for record in members]
        rows.append(_row(("total", "", ""), everything))
        return "\n".join(aligned([_HEADINGS, *rows], left=3))

    def trace(self, path: str | Path, profile: torch.profiler.profile | None = None) -> Path:
        """Write the records as Chrome trace JSON, for ui.perfetto.dev or chrome://tracing.

        One process per rank, one track per communicator; `ts` is Unix time in microseconds, so
        that the `traceEvents` of several ranks' files can be put into one list.

        Args:
            path: file to write, compressed if it ends in `.gz`; its directory must exist.
            profile: a profile of torch's that has ended. All of its trace is written too, on its
                own clock (`baseTimeNanoseconds`), to which the records are moved.

        Returns:
            The path.
        """
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        target = Path(path)
        whole: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
        process, offset = rank, time.time() - time.perf_counter()
        if profile is not None:
            with tempfile.NamedTemporaryFile(suffix=".json") as plain:
                profile.export_chrome_trace(plain.name)
                whole = json.loads(
                    Path(plain.name).read_text()
                )  # not of the handle: it is replaced
            # Profiles number processes by the system and by devices.
            process, offset = _APART + rank, offset - whole["baseTimeNanoseconds"] * 1e-9
        whole["traceEvents"] += _events(
            self.records, rank, process, lambda seconds: round((seconds + offset) * 1e6, 3)
        )
        text = json.dumps(whole).encode()
        target.write_bytes(gzip.compress(text) if target.suffix == ".gz" else text)
        return target


class _DeviceClock:
    """Moves the times of CUDA events to the host's clock.

    Made again for every reading of records: it sets one event per device now, after all that it
    is asked about, so the recording itself needs no synchronisation and no anchor of its own.
    """

    def __init__(self) -> None:
        self._anchors: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    def host_time(self, event: torch.cuda.Event) -> float:
        """Host time in seconds of an event, once the device has got there."""
        event.synchronize()
        device = event.device
        # An event that ends now is known on both clocks. All others are measured back from it.
        if device not in self._anchors:
            with torch.cuda.device(device):
                anchor = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                anchor.record()
            anchor.synchronize()
            self._anchors[device] = (time.perf_counter(), anchor)
        seconds, anchor = self._anchors[device]
        return seconds - float(event.elapsed_time(anchor)) * 1e-3


def _record(call: Call, clock: _DeviceClock) -> Record:
    issued = call.issued_ns * 1e-9
    finished = None if call.finished_ns is None else call.finished_ns * 1e-9
    waited = None if call.waited_ns is None else call.waited_ns * 1e-9
    if call.device_events is not None and finished is not None:
        # The third one is set by `wait`, if anybody has called it by now.
        start, end, *wait = call.device_events
        issued, finished = clock.host_time(start), clock.host_time(end)
        if wait:
            waited = clock.host_time(wait[0])
    return Record(
        axis=_axis(call.axis),
        communicator=call.axis,
        op=call.op,
        purpose=call.purpose,
        dtype=call.dtype,
        bytes=call.nbytes,
        between=call.between,
        group_size=call.group_size,
        asynchronous=call.async_op,
        issued=issued,
        finished=finished,
        waited=waited,
    )


def _axis(description: str) -> str:
    """Axis of a group's description; torch calls the groups of its own meshes "mesh_<name>"."""
    return description.split(":", 1)[0].removeprefix("mesh_")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_HEADINGS = "axis,op,dtype,calls,bytes sent,to other hosts,time ms,exposed ms,overlapped".split(",")


def _row(key: tuple[str, str, str], members: Iterable[Record]) -> list[str]:
    records = list(members)
    return [
        *key,
        f"{len(records)}",
        f"{sum(record.bytes for record in records):,}",
        f"{sum(record.between for record in records):,}",
        f"{1e3 * sum(record.duration for record in records):.2f}",
        f"{1e3 * sum(record.exposed for record in records):.2f}",
        f"{sum(record.overlapped for record in records)}/{len(records)}",
    ]


def _events(
    records: list[Record], rank: int, process: int, stamp: Callable[[float], float]
) -> list[dict[str, Any]]:
    tracks = {
        name: place for place, name in enumerate(dict.fromkeys(r.communicator for r in records))
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"rank {rank}"}}
    ]
    events += [
        {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for name, tid in tracks.items()
    ]
    for number, record in enumerate(records):
        if record.finished is None:
            continue
        # Collectives of one communicator may overlap in time without nesting, which complete
        # ("X") events can't show; asynchronous pairs can, told apart by their id.
        common = {
            "pid": process,
            "tid": tracks[record.communicator],
            "cat": record.communicator,
            "id": f"{rank}.{number}",
            "name": f"{record.op} of {record.purpose}" if record.purpose else record.op,
        }
        arguments = {
            "bytes": record.bytes,
            "between_hosts": record.between,
            "dtype": _dtype_name(record.dtype),
            "ranks": record.group_size,
            "overlapped": record.overlapped,
            "exposed_us": round(record.exposed * 1e6, 3),
        }
        events.append({"ph": "b", "ts": stamp(record.issued), "args": arguments, **common})
        events.append({"ph": "e", "ts": stamp(record.finished), **common})
    return events
