"""Listens to torch's trace of CUDA for a `Recording`, and to launches of Triton's kernels.

The trace is the one of CUDA's sanitizer (`torch.cuda._sanitizer`): torch's C++ code calls back
wherever it records an event, waits for one or synchronises, also where autograd does so by itself.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch import Tensor

from lamina_testing.happens_before import HOST, Event
from lamina_testing.recording import Recording, caller


class CudaTrace:
    """Tells a recording what CUDA's trace tells.

    Torch swallows what a callback raises, so the first error is raised at the end of `listening`.

    Args:
        recording: to tell.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._events: dict[int, Event] = {}
        self._error: Exception | None = None
        self._in_operator = self._synchronised = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen within the block."""
        heard: dict[Any, Any] = {
            gpu_trace.EventRecordCallbacks: self._recorded,
            gpu_trace.EventWaitCallbacks: self._waits,
            gpu_trace.EventDeletionCallbacks: self._deleted,
            gpu_trace.EventSynchronizationCallbacks: self._host_waits_for_event,
            gpu_trace.StreamSynchronizationCallbacks: self._host_waits_for_stream,
            gpu_trace.DeviceSynchronizationCallbacks: self._host_waits_for_all,
        }
        callbacks = {registry: self._safe(method) for registry, method in heard.items()}
        if self._recording.on_gpu:
            torch._C._activate_gpu_trace()
        for registry, callback in callbacks.items():
            registry.add_callback(callback)
        try:
            yield
        finally:
            for registry, callback in callbacks.items():
                registry.callback_list.remove(callback)
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def operator(self) -> Iterator[None]:
        """Within the block an operator runs; a wait of the host in it is one for the operator."""
        before, self._in_operator = self._in_operator, True
        try:
            yield
        finally:
            self._in_operator = before

    def operator_has_run(self, stream: str) -> None:
        """The operator stands in the recording; if the host waited in it, it waits now."""
        if self._synchronised:
            self._synchronised = False
            self._recording.wait(HOST, self._recording.mark(stream))

    def _safe(self, method: Any) -> Any:
        def call(*numbers: int) -> None:
            try:
                if not self._recording._unseen:
                    method(*numbers)
            except Exception as error:
                self._error = self._error or error

        return call

    def _recorded(self, event: int, stream: int) -> None:
        self._events[event] = self._recording.mark(self._recording.name_of(stream))

    def _waits(self, event: int, stream: int) -> None:
        self._wait(self._recording.name_of(stream), self._events.get(event))

    def _deleted(self, event: int) -> None:
        self._events.pop(event, None)

    def _host_waits_for_event(self, event: int) -> None:
        self._wait(HOST, self._events.get(event))

    def _host_waits_for_stream(self, stream: int) -> None:
        if self._in_operator:
            self._synchronised = True
            return
        self._wait(HOST, self._recording.mark(self._recording.name_of(stream)))

    def _host_waits_for_all(self) -> None:
        for stream in list(self._recording._names.values()):
            self._wait(HOST, self._recording.mark(stream))

    def _wait(self, stream: str, event: Event | None) -> None:
        recording = self._recording
        site = recording._asked_by[0] if recording._asked_by else caller()
        counted = recording._asked_by or not recording.on_gpu  # stand-ins count it themselves
        if not counted and not recording.keeps(site):
            return  # a GPU has waited all the same; in the record it orders nothing
        recording.wait(stream, event, site)


@contextlib.contextmanager
def triton_launches(recording: Recording) -> Iterator[None]:
    """Queue each Triton kernel that is launched within the block: no dispatch mode sees them."""
    with contextlib.ExitStack() as stack:
        for kind in kinds_of_kernels():
            stack.enter_context(mock.patch.object(kind, "run", queued(recording, kind.run)))
        yield


def kinds_of_kernels() -> list[Any]:
    """Return Triton's classes of kernels: compiled ones, and those that its interpreter runs."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
    return [JITFunction, InterpretedFunction]


def queued(recording: Recording, launch: Any) -> Any:
    """Return what launches a kernel and queues it."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        with recording.unseen():
            result = launch(kernel, *args, **kwargs)
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        # A virtual GPU computes a kernel by running it once more, over tensors of the host.
        here = {
            name: value
            for name, value in given.items()
            if isinstance(value, Tensor) and value.device.type == recording.device.type
        }
        if here and not kwargs.get("warmup"):
            written = written_by(kernel.fn)
            found = [recording.access(value, name in written) for name, value in here.items()]
            accesses = [access for access in found if access is not None]
            recording.run(recording.current, f"triton {kernel.fn.__name__}", accesses)
        return result

    return run


def written_by(kernel: Any) -> set[str]:
    """Return the parameters of a Triton kernel through which it stores, from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel)))
    made_from: dict[str, set[str]] = {}
    stored: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                made_from.setdefault(ast.unparse(target), set()).update(names_in(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.store":
            stored |= names_in(node.args[0])
    while more := {name for known in stored for name in made_from.get(known, ())} - stored:
        stored |= more
    return stored & set(inspect.signature(kernel).parameters)


def names_in(node: ast.AST) -> set[str]:
    """Return the variables of an expression."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
