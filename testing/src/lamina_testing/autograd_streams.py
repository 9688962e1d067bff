"""On which streams autograd runs a backward, and what it waits for: torch's rules, on a CPU.

torch's engine runs each backward node on the stream that was current when the node was made, which
is that of its forward. It does so for accelerators only, and the guard that Python may register for
one (`torch._C._acc.DeviceGuard`, torch 2.13) has no streams. So the rules stand here once more, and
hooks on every node of a graph apply them to a recording:

- a node that is about to run waits for the nodes that have given it a gradient. A gradient that is
  None makes nobody wait.
- gradients of one place are added on the stream of the node that gets them. Memory that comes from
  another stream is told of it (`record_stream`).
- the node that accumulates into a leaf has the stream that was current when it was made. It lives
  as long as somebody holds it, so hooks on it run where the hooks were set, not where forward ran.
- the first nodes wait for the stream that calls backward. It waits, in the end, for the streams of
  all leaves. Callbacks at the end run after that.

A node's sequence number says when it was made, hence on which stream.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, cast
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lamina_testing.happens_before import Event

Key = tuple[str, int]
STREAM = "lamina stream"  # in the dictionary that autograd keeps for each node


class Queues(Protocol):
    """What a recording offers."""

    def chosen(self, stream: str) -> None:
        """A node begins, which is to run on this stream."""

    def push(self, stream: str) -> None:
        """Make a stream the current one."""

    def pop(self) -> None:
        """Go back to the one before."""

    def mark(self, stream: str) -> Event:
        """Record an event."""

    def wait(self, stream: str, event: Event | None) -> None:
        """Make a stream wait."""

    def lend(self, tensor: Tensor, stream: str) -> None:
        """Tell the allocator that a stream uses a tensor."""


def key_of(node: Node) -> Key:
    """Return what names a node as long as its graph lives."""
    leaf = getattr(node, "variable", None)
    return ("leaf", id(leaf)) if leaf is not None else ("node", sequence_number(node))


def notes_of(node: Node) -> dict[str, str]:
    """Return the dictionary that lives as long as autograd's node."""
    return cast("dict[str, str]", node.metadata)  # torch declares it as a method


def sequence_number(node: Node) -> int:
    """Return how many nodes were made before this one."""
    return int(node._sequence_nr())


class AutogradStreams:
    """Knows the current stream of each moment, and steers backwards.

    Args:
        queues: the recording.
        first: the stream that is current before anything else.
    """

    def __init__(self, queues: Queues, first: str) -> None:
        self._queues = queues
        self._switches, self._streams = [0], [first]
        self._backwards: list[Backward] = []
        self._thread = threading.get_ident()

    def switched(self, stream: str) -> None:
        """The current stream is another one from now on."""
        number = torch._C._autograd._get_sequence_nr()
        if self._switches[-1] == number:
            self._streams[-1] = stream
        else:
            self._switches.append(number)
            self._streams.append(stream)

    def stream_of(self, node: Node, used_by: Node | None) -> str:
        """Return the stream that was current when a node was made."""
        if getattr(node, "variable", None) is None:
            return self._streams[bisect.bisect(self._switches, sequence_number(node)) - 1]
        # A leaf's node is made by the first node that uses it, unless somebody had asked before.
        made = "" if used_by is None else self.stream_of(used_by, None)
        return str(notes_of(node).setdefault(STREAM, made))

    def follow(self) -> None:
        """Notice that autograd has gone on to another node, or to its callbacks."""
        if self._backwards:
            self._backwards[-1].follow()

    @contextlib.contextmanager
    def steering(self, current: Callable[[], str]) -> Iterator[None]:
        """Steer every backward within the block."""
        run = torch.autograd.graph._engine_run_backward
        edge_of = torch.autograd.graph.get_gradient_edge

        def steered(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                # A GPU's backward runs on a thread of its own, whose sequence numbers begin anew.
                return run(outputs, *args, **kwargs)
            backward = Backward(self._queues, current())
            self._backwards.append(backward)
            try:
                backward.plan(outputs, self.stream_of)
                return run(outputs, *args, **kwargs)
            finally:
                backward.end()
                self._backwards.remove(backward)

        def asked(tensor: Tensor) -> GradientEdge:
            edge = edge_of(tensor)
            if tensor.is_leaf:
                notes_of(edge.node).setdefault(STREAM, current())
            return edge

        with contextlib.ExitStack() as stack:
            for module in list(sys.modules.values()):
                for name, old, new in (
                    ("_engine_run_backward", run, steered),
                    ("get_gradient_edge", edge_of, asked),
                ):
                    if getattr(module, "__dict__", {}).get(name) is old:
                        stack.enter_context(mock.patch.object(module, name, new))
            yield


class Backward:
    """One backward: which node runs, and what each is to wait for."""

    def __init__(self, queues: Queues, caller: str) -> None:
        self._queues, self._caller = queues, caller
        self._stream: dict[Key, str] = {}
        self._consumers: dict[Key, list[Key | None]] = {}
        self._arrived: dict[Key, list[tuple[str, Event]]] = {}
        self._leaves: set[str] = set()
        self._running: Key | None = None
        self._pushed = self._ended = False
        self._handles: list[Any] = []

    def plan(self, outputs: Any, stream_of: Callable[[Node, Node | None], str]) -> None:
        """Set hooks on all nodes of the graph."""
        start = self._queues.mark(self._caller)
        roots = [one.node if isinstance(one, GradientEdge) else one.grad_fn for one in outputs]
        found: list[tuple[Node, Node | None]] = []
        for one, node in zip(outputs, roots, strict=True):
            if node is None:  # a leaf is its own loss
                node = torch.autograd.graph.get_gradient_edge(one).node
            found.append((node, None))
            self._arrived.setdefault(key_of(node), []).append((self._caller, start))
        # Nodes that were made first are asked last, for they say who has made a leaf's node.
        nodes: dict[Key, Node] = {}
        users: dict[Key, Node] = {}
        while found:
            node, user = found.pop()
            key = key_of(node)
            if user is not None and (
                key not in users or sequence_number(user) < sequence_number(users[key])
            ):
                users[key] = user
            if key not in nodes:
                nodes[key] = node
                found += [(after, node) for after, _ in node.next_functions if after is not None]
        for key, node in nodes.items():
            self._stream[key] = stream_of(node, users.get(key)) or self._caller
            after = [None if n is None else key_of(n) for n, _ in node.next_functions]
            self._consumers[key] = after
            self._handles += [
                node.register_prehook(partial(self._begins, key)),
                node.register_hook(partial(self._has_run, key)),
            ]

    def follow(self) -> None:
        """Begin the node that runs, if a hook of others is called before ours."""
        node = torch._C._current_autograd_node()
        if self._ended or (node is None and self._running is None):
            return
        key = None if node is None else key_of(node)
        if key is None or key not in self._stream:
            self._at_the_end()
        elif key != self._running:
            self._enter(key)

    def end(self) -> None:
        """Autograd has returned."""
        for handle in self._handles:
            handle.remove()
        self._at_the_end()

    def _begins(self, key: Key, _: Any) -> None:
        if key != self._running:
            self._enter(key)

    def _enter(self, key: Key) -> None:
        stream = self._stream[key]
        for producer, event in self._arrived.pop(key, ()):
            if producer != stream:
                self._queues.wait(stream, event)
        self._running = key
        self._queues.chosen(stream)
        self._switch(stream)
        if not any(self._consumers[key]):
            self._leaves.add(stream)

    def _has_run(self, key: Key, given: tuple[Tensor | None, ...], _: Any) -> None:
        """Note who gets a gradient. Sums are queued next, on the stream of the one who does."""
        stream = self._stream[key]
        event = self._queues.mark(stream)
        sums = stream
        for consumer, gradient in zip(self._consumers[key], given, strict=False):
            if consumer is None or gradient is None:
                continue
            self._queues.lend(gradient, self._stream[consumer])
            arrived = self._arrived.setdefault(consumer, [])
            if arrived:
                sums = self._stream[consumer]
                for producer, other in (*arrived, (stream, event)):
                    if producer != sums:
                        self._queues.wait(sums, other)
            arrived.append((stream, event))
        self._switch(sums)

    def _switch(self, stream: str) -> None:
        if self._pushed:
            self._queues.pop()
        self._queues.push(stream)
        self._pushed = True

    def _at_the_end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._pushed:
            self._queues.pop()
        for stream in sorted(self._leaves - {self._caller}):
            self._queues.wait(self._caller, self._queues.mark(stream))
