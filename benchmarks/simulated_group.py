"""One process as rank 0 of many: collectives that copy on a side stream, at a set bandwidth.

The group is torch's "fake" one, so every tensor has the shape it has on 8 or 64 ranks. A collective
writes to its output what rank 0 would send to itself, on a side stream that first waits for the
caller's, and holds that stream for as long as the bytes that a rank sends would take. All groups
share the stream, as they would share the network. Numbers are not a training run's: only time,
memory and copies mean something. On a CPU collectives copy at once and take no time: a dry run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

GATHERS = ("_allgather_base", "all_gather_single", "allgather", "allgather_into_tensor_coalesced")
SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced")
EXCHANGES = ("alltoall", "alltoall_base", "all_to_all_single")
SUMS = ("allreduce", "allreduce_coalesced")


class SimulatedNetwork:
    """Copies and waits on the side stream; counts what a rank would have sent.

    Args:
        gbyte: bytes a rank sends in a second, in units of 10^9.
        device: where the tensors lie.
    """

    def __init__(self, gbyte: float, device: torch.device) -> None:
        self.sent = 0
        self._rate = gbyte * 1e9
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cycles = _cycles_per_second() if self._stream is not None else 0.0
        self._flights: dict[int, tuple[object, torch.cuda.Event]] = {}

    def issue(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(group: dist.ProcessGroup, *args: object, **kwargs: object) -> object:
            given = args
            if name in SCATTERS + EXCHANGES:
                given = tuple(_without_elements(one) for one in args)
            work = method(group, *given, **kwargs)
            outputs, inputs = _sides(name, args)
            nbytes = _sent(name, outputs, inputs, group.size())
            self.sent += nbytes
            if self._stream is None:
                _copy(outputs, inputs)
                return work
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                _copy(outputs, inputs)
                torch.cuda._sleep(int(nbytes / self._rate * self._cycles))
            if work is not None:
                self._flights[id(work)] = (work, self._stream.record_event())
            return work

        return call

    def wait(self, method: Callable[..., object]) -> Callable[..., object]:
        def call(work: dist.Work, *args: object, **kwargs: object) -> object:
            result = method(work, *args, **kwargs)
            flight = self._flights.pop(id(work), None)
            if flight is not None:
                torch.cuda.current_stream().wait_event(flight[1])
            return result

        return call


@contextlib.contextmanager
def simulated_world(ranks: int, gbyte: float, device: torch.device) -> Iterator[SimulatedNetwork]:
    """This process is rank 0 of `ranks`; no process group may be there before."""
    network = SimulatedNetwork(gbyte, device)
    with contextlib.ExitStack() as stack:
        for name in GATHERS + SCATTERS + EXCHANGES + SUMS:
            method = getattr(dist.ProcessGroup, name, None)
            if method is not None:  # versions of torch differ in which there are
                patched = network.issue(name, method)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, patched))
        for name in ("wait", "synchronize"):
            patched = network.wait(getattr(dist.Work, name))
            stack.enter_context(mock.patch.object(dist.Work, name, patched))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        yield network


def _sides(name: str, args: tuple[object, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if name in SUMS:
        tensors = list(_tensors(args[0]))
        return tensors, tensors
    return list(_tensors(args[0])), list(_tensors(args[1]))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _sent(name: str, outputs: list[torch.Tensor], inputs: list[torch.Tensor], ranks: int) -> int:
    """Bytes that a rank sends: all but its own piece of the larger side, twice for a sum."""
    larger = sum(one.nbytes for one in (outputs if name in GATHERS else inputs))
    return larger * (ranks - 1) // ranks * (2 if name in SUMS else 1)


def _without_elements(value: object) -> object:
    """Return what a collective is asked, of tensors without elements.

    From torch 2.12 on the fake group fills the outputs of reductions and exchanges itself, on the
    caller's stream. Those of gathers it fills in every version, and figures of a GPU have that.
    """
    if isinstance(value, torch.Tensor):
        return value.new_empty(0)
    if isinstance(value, list | tuple):
        return [_without_elements(one) for one in value if not isinstance(one, int)]
    return value


def _copy(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Fill the outputs with the inputs, repeated or cut to their size."""
    if outputs is inputs:
        return
    with torch.no_grad(), _disable_current_modes():
        if len(outputs) > len(inputs):
            inputs = inputs * (len(outputs) // len(inputs))
        for output, given in zip(outputs, inputs, strict=True):
            target, source = output.reshape(-1), given.reshape(-1)
            if target.data_ptr() == source.data_ptr() and target.numel() <= source.numel():
                continue
            if target.numel() <= source.numel():
                target.copy_(source[: target.numel()])
            else:
                rows = target.view(-1, source.numel())
                in_place = source.data_ptr() == target.data_ptr()
                rows[int(in_place) :].copy_(source)


def _cycles_per_second() -> float:
    """How many cycles of `torch.cuda._sleep` last a second on this GPU."""
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return 1e3 * cycles / start.elapsed_time(end)
