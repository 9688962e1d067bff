"""What `torch.compile` makes of a module, without code for a device: graphs, partition, fusion.

torch traces the module, and torch's own partition decides what a forward keeps for backward. The
two graphs then run operator by operator. A recorder is told which of the operators are one kernel
on a GPU.

Note [What is fused has no memory]
    Inductor computes what only element-wise operators and reductions read in their kernels, once
    for each reader. So such a tensor has no memory. Those that it is computed from have to stay
    until the last of these kernels. Between two operators that nothing is fused into (products,
    attention), kernels that read the same tensor read it once, as they are mostly one kernel. What
    Inductor does besides, such as to keep what many kernels read, is not followed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx

from lamina.models.compat import graphs_of, modes_now, parts_of
from lamina.models.plan.record.operator_costs import tensors_in
from lamina.models.plan.record.recorder import StepRecorder


def compiled(called: Callable[..., Any]) -> Any:
    """`torch.compile(called)`, for plans: a module or function on fake tensors.

    Shapes are constants. Plans of `Job(compiled=True)` play its graphs. Elsewhere they run operator
    by operator. `torch.compiler.reset()` forgets them.

    Examples:
        >>> from lamina.models.plan import compiled
        >>> compiled(lambda x: (x.exp() + 1).sum())(torch.zeros(4))
        tensor(8.)
    """
    return torch.compile(called, backend=_backend(), dynamic=False)


class GraphRecorder(StepRecorder):  # type: ignore[no-untyped-call]
    """Records a program of which parts are `compiled`.

    Where torch itself has compiled, its kernels would not be noted. So under a `StepRecorder` torch
    runs all of it as if nothing were compiled.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch may run compiled code inside."""
        return True


@cache
def _backend() -> Any:
    return graphs_of(_runner)  # one for all, as each would trace what is alike again


def _runner(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    kernels = _Kernels(graph)

    def run(arguments: list[Any]) -> Any:
        """Run the graph; it takes the arguments out of their list, so that each can go."""
        try:
            return kernels.boxed_run(arguments)
        finally:
            kernels.forget()

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Kernels(fx.Interpreter):
    """Runs a graph, and tells the recorder of kernels. See Note [What is fused has no memory]."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        nodes = list(graph.graph.nodes)
        called = [node for node in nodes if node.op == "call_function"]
        self._free = {node for node in called if _is_free(node)}
        # What the recorder does not see by itself: `run_node` tells of kernels.
        self._unnoted = self._free | {node for node in called if _is_fused(node)}
        self._unmade = _without_memory(nodes)
        self._sources: dict[fx.Node, list[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            # What a reader of it needs is what it is made of.
            read = dict.fromkeys(
                source
                for each in node.all_input_nodes
                for source in (self._sources[each] if each in self._unmade else (each,))
            )
            self._sources[node] = list(read)
            last |= dict.fromkeys((*read, *node.all_input_nodes), node)
        # In place of the interpreter's own: a tensor stays until the last kernel that reads it.
        self.user_to_last_uses: dict[fx.Node, list[fx.Node]] = {}
        for node, reader in last.items():
            self.user_to_last_uses.setdefault(reader, []).append(node)
        self._read: set[fx.Node] = set()  # since the last operator that nothing is fused into

    def forget(self) -> None:
        """The graph has run: what forward keeps is backward's to let go."""
        self.env = {}
        self._read.clear()

    def run_node(self, n: fx.Node) -> Any:
        """Run an operator: as it is, as a part of a kernel, or as a kernel's end."""
        recorder = next((mode for mode in modes_now() if isinstance(mode, GraphRecorder)), None)
        if recorder is None or n.op != "call_function":
            return super().run_node(n)
        if n not in self._unnoted:
            self._read.clear()
            return super().run_node(n)
        with recorder.unnoted():
            result = super().run_node(n)
        if n not in self._unmade and n not in self._free:
            inputs = [self.env[source] for source in self._sources[n] if source not in self._read]
            self._read.update(self._sources[n])
            recorder.note_kernel(n.name, tensors_in(result), tensors_in(inputs))
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator; one that draws numbers is called without a generator's state.

        An operator of Lamina that is made of others, such as a collective, runs them, as it does
        outside of graphs.
        """
        name = getattr(target, "__name__", "")
        if getattr(target, "namespace", "") == "lamina" and (parts := parts_of(target)):
            return parts(*args, **kwargs)
        if name == "run_and_save_rng_state":
            return torch.empty(0), args[0](*args[1:], **kwargs)
        if name == "run_with_rng_state":
            return args[1](*args[2:], **kwargs)
        return super().call_function(target, args, kwargs)


_ELEMENTWISE = frozenset(
    """
    _to_copy cat clone convert_element_type full full_like gather iota scalar_tensor where
    """.split()
)
_REDUCTIONS = frozenset("amax amin any mean prod sum var var_mean".split())


def _name_of(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).partition("::")[2]


def _is_free(node: fx.Node) -> bool:
    """Whether it only shows what is there: a view, or one of several results."""
    return node.target is getitem or bool(getattr(node.target, "is_view", False))


def _is_elementwise(node: fx.Node) -> bool:
    tags, name = getattr(node.target, "tags", ()), _name_of(node)
    if name == "scatter":  # into a constant (the gradient of a loss): it is compared by place
        return isinstance(node.args[0], fx.Node) and _name_of(node.args[0]) == "full"
    return torch.Tag.pointwise in tags or name in _ELEMENTWISE


def _is_fused(node: fx.Node) -> bool:
    return _is_elementwise(node) or _name_of(node) in _REDUCTIONS


def _without_memory(nodes: list[fx.Node]) -> set[fx.Node]:
    """What fused operators alone read, also through views."""
    unmade: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op != "call_function" or not (_is_free(node) or _is_elementwise(node)):
            continue
        readers = [reader in unmade if _is_free(reader) else _is_fused(reader)
                   for reader in node.users]  # fmt: skip
        if readers and all(readers):
            unmade.add(node)
    return unmade
