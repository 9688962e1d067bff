"""Types of parallelism: whether collectives and gradients fit what the ranks hold.

    python -m lamina.models.parallel_types my.module:build --tp 2 --dp-shard 4

`build(mesh)` returns the model and the arguments of its forward. One process plays one rank of the
mesh, which may have thousands; nothing is sent. Meta's `spmd_types` (`pip install
lamina-models[types]`) follows the types of all tensors over each axis: R (equal on all ranks, with
partial gradients), I (equal, as its gradients are), V (varying) and P (partial, to be summed). An
operation, a collective or a loss that does not fit them is an error that names the module.

The types of parameters are those of their roles (`lamina.mesh.mark`), because roles decide over
which axes the engine sums a gradient: R is what it sums over, I what it takes for equal, V what is
cut. docs/types.md says what cannot be found so.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lamina.collectives.engine import (
    REGION_STEPS,
    DualFunction,
    Pending,
    all_reduce_small,
    start_all_gather,
)
from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed, role_of
from lamina.mesh.engine import DENSE_AXES, EXPERT_AXES, MODEL_AXES, axis_if_there
from lamina.models.attention.pieced import _PiecedAttention
from lamina.models.decoder.gpt import GPTModel
from lamina.models.layers.dropout import Dropout
from lamina.models.layers.embedding import _LookUp
from lamina.models.layers.hyper_connections import _DoublyStochastic, _TokenLogits
from lamina.models.layers.linear import CutProduct, Multiply
from lamina.models.layers.loss import _CrossEntropy, _LinearCrossEntropy
from lamina.models.layers.norms import _RMSNormOnCPU
from lamina.models.moe import dispatcher, losses, router
from lamina.models.moe.exchange import RowExchange, _Receive, _Send
from lamina.models.moe.experts import (
    _AddToRuns,
    _ContiguousGradient,
    _ExpertProduct,
    _NoRowsNoGradient,
    _OnFirstRank,
)
from lamina.models.moe.layer import MoELayer
from lamina.models.moe.losses import _Inject
from lamina.models.moe.routing import _CopiesToRows, _RowsToTokens
from lamina.models.pipelining.cuts import cut_layers
from lamina.models.pipelining.module import GPTStage, Microbatch

try:
    import spmd_types as spmd
    from spmd_types import I, P, R, V, rules
    from spmd_types.checker import typecheck
except ImportError as error:
    raise ImportError("types of parallelism need `pip install lamina-models[types]`") from error

__all__ = ["ParallelTypeError", "check_types"]

Types = dict[Any, Any]
"""A type for each axis of more than one rank."""

# Functions that send nothing. What each rank computes depends on its own tensors alone.
_LOCAL: tuple[type[torch.autograd.Function], ...] = (
    _AddToRuns,
    _ContiguousGradient,
    _CopiesToRows,
    _DoublyStochastic,
    _ExpertProduct,
    _LookUp,
    _NoRowsNoGradient,
    _RMSNormOnCPU,
    _RowsToTokens,
    _TokenLogits,
)

# A value of each type is equal (E), varying or partial over ranks; and so is its gradient.
_VALUE = {R: "E", I: "E", V: "V", P: "P"}
_GRADIENT = {R: "P", I: "E", V: "V", P: "E"}


class ParallelTypeError(TypeError):
    """Ranks would compute wrong values or gradients; or nobody can say, and then it says so."""


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh by name, without those of one rank and without `pp`."""

    dense: dict[str, Any]
    expert: dict[str, Any]

    @staticmethod
    def of(mesh: ParallelMesh | DeviceMesh) -> Axes:
        """Find them. A DeviceMesh has the dimensions that it names, for experts too."""
        dense: Sequence[str] = DENSE_AXES
        expert: Sequence[str] = EXPERT_AXES
        if isinstance(mesh, DeviceMesh):
            dense = expert = mesh.mesh_dim_names or ()

        def wide_axes(names: Sequence[str]) -> dict[str, Any]:
            axes = {name: axis_if_there(mesh, name) for name in names if name != "pp"}
            wide = {name: axis for name, axis in axes.items() if axis and axis.size > 1}
            return {name: spmd.MeshAxis.of(axis.group) for name, axis in wide.items()}

        return Axes(wide_axes(dense), wide_axes(expert))

    def parameter(self, parameter: Tensor) -> Types:
        """The types of a parameter, by its role: what the engine sums its gradient over is R."""
        role = role_of(parameter)
        whole = R if role.tp_grad == "sum" else I
        cut = whole if role.tp_shard_dim is None else V
        kinds = {"tp": cut, "expert_tp": cut, "ep": V}
        axes = self.expert if role.expert else self.dense
        return {axis: kinds.get(name, R) for name, axis in axes.items()}

    def argument(self) -> Types:
        """The types of an input: ranks of `tp` have the same, and others have their own."""
        return {axis: I if name == "tp" else V for name, axis in self.dense.items()}


def check_types(
    model: nn.Module, *arguments: Any, mesh: ParallelMesh | DeviceMesh, **named: Any
) -> dict[str, str]:
    """Run a forward and follow the types of all tensors over the axes of a mesh.

    A `GPTModel` on a mesh with `pp` runs as its pipeline stages do, one after the other. The call
    needs a process group; `init_distributed("fake", world_size=...)` makes one of any size.

    Args:
        model: a model without a wrapper, on the CPU. Its parameters have roles.
        arguments: of its forward. Tensors without types vary over all axes but `tp`.
        mesh: the mesh that the model was built with.
        named: arguments by name.

    Returns:
        The type of the result along each axis of the mesh: R, I, V or P. A scalar is a loss, which
        is I or P.

    Raises:
        ParallelTypeError: types do not fit; a scalar result is no loss that `backward` is right
            for; or the model has parts that are not typed, such as dropout.

    Examples:
        >>> from lamina.models.parallel_types import check_types
        >>> mesh = ParallelLayout(dp_shard=1).build("cpu")
        >>> check_types(VocabParallelEmbedding(8, 4, mesh), torch.zeros(1, 2).long(), mesh=mesh)
        {}
    """
    refuse_untyped(model)
    axes = Axes.of(mesh)
    with ExitStack() as stack:
        stack.enter_context(_rules())
        stack.enter_context(spmd.set_current_mesh(axes.dense))
        for layer in (each for each in model.modules() if isinstance(each, MoELayer)):
            for module in layer.modules():
                of_experts = module is layer or module in layer.experts.modules()
                stack.enter_context(_on_mesh(module, axes.expert if of_experts else axes.dense))
        stack.enter_context(typecheck("strict"))
        given = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        for tensor in (*model.parameters(), *model.buffers(), *given):
            stack.callback(_forget, tensor, set(vars(tensor)))
        for parameter in model.parameters():
            spmd.assert_type(parameter, axes.parameter(parameter))
        for buffer in model.buffers():
            spmd.assert_type(buffer, dict.fromkeys(axes.dense.values(), R))
        for value in given:
            if not spmd.has_local_type(value):
                spmd.assert_type(value, axes.argument())
        stages = axis_if_there(mesh, "pp")
        try:
            if isinstance(model, GPTModel) and stages is not None and stages.size > 1:
                result = _through_stages(model, stages.size, *arguments, **named)
            else:
                result = model(*arguments, **named)
            types = spmd.get_local_type(result)
            if result.ndim == 0:
                types = {axis: _as_loss(name, types[axis]) for name, axis in axes.dense.items()}
        except spmd.SpmdTypeError as error:
            where = _innermost(model, error.__traceback__)
            raise ParallelTypeError(f"{where or type(model).__name__}: {error}") from error
    return {name: types[axis].name for name, axis in axes.dense.items()}


def refuse_untyped(model: nn.Module) -> None:
    """Raise ParallelTypeError for what types cannot express."""
    for name, module in model.named_modules():
        rate = module.rate if isinstance(module, Dropout) else getattr(module, "p", 0.0)
        if rate and module.training and "dropout" in type(module).__name__.lower():
            raise ParallelTypeError(
                f"{name} drops elements: whether ranks of tp drop the same ones is in the state of "
                "random generators, which types do not see. Check the model with rate 0"
            )


def _forget(tensor: Tensor, kept: set[str]) -> None:
    """Drop the types of a tensor, which are attributes."""
    for name in set(vars(tensor)) - kept:
        delattr(tensor, name)


def _through_stages(model: GPTModel, stages: int, tokens: Tensor, labels: Tensor) -> Tensor:
    """Run the model as a pipeline does: what a stage returns is what the next one takes."""
    x: Tensor | None = None
    batch = Microbatch(tokens, labels, None, None)
    for at, layers in enumerate(cut_layers(model.config, stages)):
        x = GPTStage(model, layers, first=at == 0, last=at == stages - 1)(x, batch)
    assert x is not None  # noqa: S101 - there is at least one stage
    return x


def _as_loss(name: str, kind: Any) -> Any:
    """The type of a loss along an axis: losses of ranks with data of their own are summed later."""
    if kind in (I, P):
        return kind
    if kind is V and name not in MODEL_AXES:
        return P
    raise spmd.SpmdTypeError(
        f"the loss is {kind.name} along {name}: each rank starts its own backward, so it has to be "
        "I (equal, and its gradient too) or P (to be summed)"
    )


def _innermost(model: nn.Module, trace: TracebackType | None) -> str:
    """The name of the innermost module in whose forward an error arose."""
    names = {id(module): name for name, module in model.named_modules()}
    innermost = ""
    while trace is not None:
        innermost = names.get(id(trace.tb_frame.f_locals.get("self")), "") or innermost
        trace = trace.tb_next
    return innermost


@contextmanager
def _on_mesh(module: nn.Module, axes: dict[str, Any]) -> Iterator[None]:
    """While the module computes, tensors have types over these axes."""
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        entered.append(spmd.set_current_mesh(axes))
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    hooks = module.register_forward_pre_hook(enter), module.register_forward_hook(leave)
    try:
        yield
    finally:
        while entered:
            leave()
        for hook in hooks:
            hook.remove()


@contextmanager
def _rules() -> Iterator[None]:
    """Inside, `spmd_types` knows the functions of Lamina that send something."""
    for function in _LOCAL:
        spmd.register_local_autograd_function(function)
    with ExitStack() as stack:
        for function, rule in _RULES.items():
            function.spmd_typecheck = staticmethod(rule)  # type: ignore[attr-defined]
            stack.callback(delattr, function, "spmd_typecheck")
        for module in (dispatcher, losses, router):
            for name, typed in _SENDS.items():
                if hasattr(module, name):
                    stack.enter_context(_replaced(module, name, typed))
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _within(types: Types, group: ProcessGroup) -> list[Any]:
    """The axes that make up a group; none if it is no product of axes."""
    over = spmd.MeshAxis.of(group)
    axes = [axis for axis in types if axis <= over]
    return axes if math.prod(axis.size() for axis in axes) == over.size() else []


def _sent(types: Types, group: ProcessGroup, kinds: Sequence[Any], becomes: Any) -> Types:
    """What a collective of numbers without gradients makes of types; they must be of `kinds`."""
    axes = _within(types, group)
    if not axes or any(types[axis] not in kinds for axis in axes):
        raise spmd.SpmdTypeError(f"{types} cannot be sent over {spmd.MeshAxis.of(group)}")
    return {**types, **dict.fromkeys(axes, becomes)}


def _reduced(tensors: Sequence[Tensor], group: ProcessGroup | None, op: Any = "sum") -> None:
    """`all_reduce_small` of tensors with types: what is summed twice would be R the second time."""
    kinds, sent_types = (V, P) if op == "sum" else (R, I, V), []
    if group is not None:
        sent_types = [_sent(spmd.get_local_type(tensor), group, kinds, R) for tensor in tensors]
    with spmd.no_typecheck():
        all_reduce_small(tensors, group, op)
    for tensor, types in zip(tensors, sent_types, strict=False):
        spmd.mutate_type(tensor, src=dict(spmd.get_local_type(tensor)), dst=types)


def _gathered(tensor: Tensor, group: ProcessGroup, **how: Any) -> Pending[Tensor]:
    types = _sent(spmd.get_local_type(tensor), group, (V,), R)
    with spmd.no_typecheck():
        result = start_all_gather(tensor, group, **how).wait()
    spmd.assert_type(result, types)
    return Pending(None, lambda: result)


def _exchanged(tensor: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """Each rank of a world that is played sends as many rows as this one."""
    _sent(spmd.get_local_type(tensor), group, (V,), V)
    result = tensor.clone()
    return Pending(None, lambda: result)


def _like(result: Tensor, *operands: Any) -> None:
    """The type of a result that each rank computes from these operands alone."""
    terms = ",".join("_" * operand.ndim for operand in operands)
    rules.einsum(f"{terms}->{'_' * result.ndim}", *operands, out=result)


def _dual(result: Tensor, *, tensor: Tensor, function: Any, dual: Any) -> None:
    """A region's type follows from its two steps: one maps values, and the other gradients."""
    steps = [REGION_STEPS[step.func].split() for step in (function, dual)]
    group = function.keywords["ref"].group
    whole = rules.einsum(f"{'_' * tensor.ndim}->{'_' * result.ndim}", tensor, linear_in=(0,))
    types = spmd.get_local_type(tensor)
    if not _within(types, group):
        types = spmd.get_local_type(whole)  # the same over the axes of the current mesh
    result_types = dict(types)
    for axis in _within(types, group):
        sources = {V: (V, P), R: (R,), I: (I,), P: (P,)}[types[axis]]
        if not tensor.requires_grad and types[axis] in (R, I):
            sources = (R, I)
        fits = (
            target
            for source in sources
            for target in (I, R, V, P)
            if _VALUE[source] + _VALUE[target] in steps[0]
            and _GRADIENT[target] + _GRADIENT[source] in steps[1]
        )
        result_types[axis] = next(fits, None)
        if result_types[axis] is None:
            raise spmd.SpmdTypeError(
                f"{types[axis].name} along {axis} does not fit a region that takes values "
                f"{_in_words(steps[0])} and gradients {_in_words(steps[1])}"
            )
    spmd.assert_type(result, result_types)


def _in_words(step: Sequence[str]) -> str:
    words = {"E": "equal", "V": "varying", "P": "partial"}
    return "as they are" if len(step) > 1 else " to ".join(words[each] for each in step[0])


def _multiply(
    result: Tensor,
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cut: CutProduct,
) -> None:
    whole: Any = x
    if cut.group is not None and cut.side == "output":
        if cut.sequence:
            whole = rules.all_gather(x, cut.group, src=V, dst=R)
        else:
            whole = rules.convert(x, cut.group, src=I, dst=R)
    operands = [whole, weight] if bias is None else [whole, weight, bias]
    if cut.group is None or cut.side == "output":
        _like(result, *operands)
        return
    terms = ",".join("_" * operand.ndim for operand in operands)
    partial = rules.einsum(f"{terms}->{'_' * (result.ndim + cut.sequence)}", *operands)
    if cut.sequence:
        rules.reduce_scatter(partial, cut.group, src=V, dst=V, out=result)
    else:
        rules.all_reduce(partial, cut.group, src=V, dst=I, out=result)


def _linear_cross_entropy(
    result: Tensor, *, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, axis: Any
) -> None:
    rules.ignore(labels)
    if bias is not None:
        rules.ignore(bias)  # of the rows that the rank has of the weight
    if axis is None:
        _like(result, hidden, weight)
        return
    rules.convert(hidden, axis.group, src=R, dst=R)
    total = rules.einsum("__,__->", hidden, weight)
    rules.all_reduce(total, axis.group, src=V, dst=I, out=result)


def _cross_entropy(result: Tensor, *, logits: Tensor, labels: Tensor, axis: Any) -> None:
    rules.ignore(labels)
    whole = logits if axis is None else rules.all_reduce(logits, axis.group, src=V, dst=I)
    _like(result, whole)


def _attend(
    result: Tensor, *, query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup | None
) -> None:
    tensors: list[Any] = [query, key, value]
    if group is not None:
        tensors = [rules.all_to_all(x, group, src=V, dst=V) for x in tensors]
    _like(result, *tensors)


def _exchange(
    result: Tensor,
    *,
    exchange: RowExchange,
    rows: Tensor | None = None,
    ticket: Tensor | None = None,
) -> None:
    """Rows may come from any rank of the group, so they have to vary over each axis of it."""
    given = ticket if rows is None else rows
    _sent(spmd.get_local_type(given), exchange.group, (V,), V)
    _like(result, given)


def _on_first_rank(result: Tensor, *, vectors: Tensor, axis: Any) -> None:
    rules.convert(vectors, axis.group, src=I, dst=V, out=result)


def _inject(result: Tensor, *, carrier: Tensor, loss: Tensor) -> None:
    """An auxiliary loss starts its own backward, as the loss does."""
    rules.ignore(loss)
    for axis, kind in spmd.get_local_type(loss).items():
        if kind is R:
            raise spmd.SpmdTypeError(
                f"the auxiliary loss is R along {axis}: every rank would add its whole gradient"
            )
    rules.einsum(f"{'_' * carrier.ndim}->{'_' * result.ndim}", carrier, out=result)


_SENDS: dict[str, Callable[..., Any]] = {
    "all_reduce_small": _reduced,
    "start_all_gather": _gathered,
    "start_all_to_all": _exchanged,
}
"""Collectives of numbers without gradients, which layers of experts start by themselves."""

_RULES: dict[type[torch.autograd.Function], Callable[..., None]] = {
    DualFunction: _dual,
    _CrossEntropy: _cross_entropy,
    _Inject: _inject,
    _LinearCrossEntropy: _linear_cross_entropy,
    Multiply: _multiply,
    _OnFirstRank: _on_first_rank,
    _PiecedAttention: _attend,
    _Receive: _exchange,
    _Send: _exchange,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0: the types fit, 1: they do not, or not all can be checked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("build", help="module:function that takes a mesh, see above")
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "expert_tp")
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=1)
    given = parser.parse_args(arguments)
    module, _, function = given.build.partition(":")
    sys.path.insert(0, "")
    layout = ParallelLayout(**{name: getattr(given, name) for name in names})
    world = layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp * layout.pp
    with init_distributed("fake", world_size=world):
        mesh = layout.build("cpu")
        model, inputs = getattr(importlib.import_module(module), function)(mesh)
        try:
            result = check_types(model, *inputs, mesh=mesh)
        except ParallelTypeError as error:
            print(error, file=sys.stderr)
            return 1
    count = len(list(model.parameters()))
    print(f"{count} parameters and the result {result} fit on {world} ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
