"""What ties the engine to modules and optimizers: hooks, and marks on the autograd graph.

Note [Marked outputs]
    torch's own backward hooks of modules fire when gradients of a module's inputs are there, and
    not at all where no input needs one, as of an embedding. A unit's weights are needed before:
    when the first gradient comes to one of its outputs. So outputs carry a hook that announces it,
    and inputs pass through one node of the graph whose backward comes after all of the unit's own.
    A unit without such inputs is closed when the backward of the model ends. A unit may be called
    several times, or run again without being called by autograd (reentrant recomputation), so each
    call leaves a `PendingBackward` on its graph, and the unit is closed when none is left. Leaves
    carry no hook: a user's parameter would keep it for good.

Note [Tensors of the caller]
    A module may write into a tensor that it was given, as an in-place ReLU does, and its caller may
    go on with that tensor. What the module has got is a view of it, with the mark for its backward.
    Autograd lets nobody write into a view that a Function made, so the view is declared a common
    one. A write then goes into the history of the caller's tensor, and past the mark: the unit is
    closed at the end of the backward, and the caller's tensor announces its gradient as outputs do.
    What was cast is a copy, which is copied back. (Under FSDP2 the write itself raises.)

Note [Parameters that are new since wrapping]: PyTorch lets a user put another parameter, or another
submodule, into a model at any time. No buffer has a place for it, so no rank would sum its gradient
and each rank would train its own. A parameter that was replaced would come back at the next
gather. So the outermost module looks before each forward of training, and says which one it is.

Note [Optimizers of other parameters]: an optimizer may hold parameters that never have a gradient,
since theirs are on main parameters: it was made before the model was wrapped, or after a forward
without a backward, while modules hold what they compute with. Its step would leave them out without
a word. So every optimizer is asked before its step, by a hook of torch's for all of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lamina.ddp.backward.reducer import BACKWARD
from lamina.ddp.compat import COMMON_VIEW, creation_meta, function_transform, set_creation_meta
from lamina.ddp.execution.engine import Engine
from lamina.ddp.execution.unit import PendingBackward, UnavailableError, Unit
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.tensor_trees import Loan, map_tensors, tensors_in

_FLAT = frozenset((torch.Tensor, nn.Parameter, type(None), bool, int, float, str))
"""Types of what most modules take and give: there is nothing to look for inside."""

_HOOKS = "_lamina_unit_hooks"


class _AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs whose backward runs when the unit's own has ended."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        unit: Unit,
        pending: PendingBackward,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Hand the inputs on, and remember whose they are."""
        ctx.engine, ctx.unit, ctx.pending = engine, unit, pending
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Pass their gradients on, once the engine knows that all of them are there."""
        ctx.engine.after_backward(ctx.unit, ctx.pending)
        return (None, None, None, *gradients)


class Lent(NamedTuple):
    """What a module was given for a tensor of its caller, and what shows that it was written to."""

    own: torch.Tensor
    instead: torch.Tensor
    node: Node | None
    version: int | None


def lend(own: torch.Tensor, instead: torch.Tensor) -> Lent:
    """Remember what a module is given, a view or a cast copy, for a tensor of its caller."""
    # An inference tensor counts no writes.
    version = None if instead.is_inference() else instead._version
    return Lent(own, instead, instead.grad_fn, version)


def bring_back(lent: Iterable[Lent]) -> list[torch.Tensor]:
    """Let the caller's tensors have what a module has written into those that it was lent.

    The tensors through which gradients come to these writes come back.
    """
    written = []
    for own, instead, node, version in lent:
        if own.dtype != instead.dtype:
            if version is not None and instead._version != version:
                own.copy_(instead)
                written.append(instead)
        elif instead.grad_fn is not node:  # autograd makes nodes of views anew after any write
            written.append(own)
    return written


class UnitHooks:
    """What happens before and after a unit computes, whichever of its methods computes.

    It must not hold the module: the module holds it. `member` is which of the unit's modules this
    is. Floating inputs and outputs are cast to the dtypes; if `inner`, inputs only where the unit
    is called by itself, and not by the root.
    """

    def __init__(
        self,
        unit: Unit,
        member: int,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        inner: bool,
    ) -> None:
        self.unit = unit
        self.member = member
        self._input_dtype = input_dtype
        self._output_dtype = output_dtype
        self._inner = inner
        self.methods: list[str] = []
        """Names of the registered methods of the module."""
        self._in_method = False
        """Inside a registered method: calls of `forward` from there find the unit gathered, and
        must not release it under the method's feet."""
        self._calls: list[tuple[Loan | None, list[Lent]]] = []
        """What was lent to calls that are going on, the innermost last: a module may call itself.
        There is a loan where the caller's tensors lie in containers."""
        # An attribute, and no look at `__dict__`: of that `torch.compile` makes no guard, so what
        # it compiled before the first call would be taken in all later ones.
        self.started = False
        """Whether the unit has an engine."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: who copies this copies one module of a sharded model, and not the whole."""
        raise UnavailableError(
            f"copy.deepcopy of {self.unit.title}, a unit of a sharded model: the copy would hold "
            "this rank's shards, and its hooks would run those of the model. Copy the whole model "
            "(copy.deepcopy(model), on all ranks), or build the module anew and load its part of "
            "lamina.ddp.full_parameters(model)"
        )

    def start(self, engine: Engine) -> None:
        """The unit is one of this engine's from now on."""
        self.engine, self.started = engine, True

    @functools.cached_property  # `start` stores the engine, and then this is called no more
    def engine(self) -> Engine:
        """The model's engine; RuntimeError if there is none yet."""
        raise RuntimeError(
            f"{self.unit.module_class} was called before the sharded module around it: call the "
            "outermost module, which knows all that shard_module was applied to"
        )

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Gather, and mark the inputs that gradients will come back through."""
        if self._in_method:
            return None
        # Tensors and numbers are handed on as a new tuple. What holds tensors is the caller's, and
        # only lent others.
        given = (*args, *kwargs.values())
        loan = None if _FLAT.issuperset(map(type, given)) else Loan()
        lent: list[Lent] = []
        self._calls.append((loan, lent))
        engine, unit = self.engine, self.unit
        # A transform would take views of weights along that a release takes the memory from.
        if unit.gathered and function_transform() is not None:
            raise UnavailableError(
                f"{unit.title} was called inside torch.vmap or another transform of torch.func, "
                "whose backward would read its weights after they are released: use "
                "zero_dp_strategy=2 (or less), or apply the transform inside a module's forward"
            )
        if unit is engine.root:
            engine.look(module)
        dtype = self._input_dtype
        if dtype is not None and self._inner and engine.computes:
            dtype = None  # the root has cast its own
        engine.before_forward(unit)
        # From here on modules hold the compute parameters: those that were DTensors become ones.
        if unit.dress is not None:
            unit.dress.show()
        given = _mark_inputs(engine, unit, given, dtype, loan, lent)
        if loan is not None:
            loan.begin()
        return given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))

    def after(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Watch for gradients of the outputs, and release."""
        if self._in_method:
            return None
        engine, unit = self.engine, self.unit
        training, (loan, lent) = torch.is_grad_enabled(), self._calls[-1]
        # What the module has written into is an output of it, like what it returns.
        written = bring_back(lent)
        if written and training and engine.reducer.phase is not BACKWARD:
            unit.calls.expect_unseen()  # see Note [Tensors of the caller]
        if loan is not None:
            written += loan.written()
        marked = training and mark_outputs(engine, unit, self.member, output, written)
        # A recomputation inside a backward adds no backward to wait for.
        if training and engine.reducer.phase is not BACKWARD:
            if marked and unit.calls.members > 1:  # each member has one
                unit.calls.expect_member(self.member)
            elif not marked and (
                any(group.wants_gradients for group in unit.groups)
                # A backward through a frozen unit reads its weights too.
                or unit.calls.hands_gradients_on
                or next(tensors_in(output), None) is None  # its results are somewhere else
            ):
                unit.calls.expect_unannounced()
        if unit.dress is not None:
            unit.dress.hide()
        engine.after_forward(unit, self.member, marked=marked)
        if (dtype := self._output_dtype) is None:
            return output
        return map_tensors(output, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def give_back(self, *_: Any) -> None:
        """The call is over, also if it raised: the caller's containers are the caller's again."""
        if not self._in_method and self._calls and (loan := self._calls.pop()[0]) is not None:
            loan.end()

    def call(self, module: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of the unit's module as if it was `forward`."""
        if not self.started:
            _ = module.sharding_engine  # `shard_module`: the first call of the outermost makes it
        with self.engine.guards.reads():
            try:
                args, kwargs = self.before(module, args, kwargs) or (args, kwargs)
                entered, self._in_method = self._in_method, True
                try:
                    output = method(module, *args, **kwargs)
                finally:
                    self._in_method = entered
                return output if entered else self.after(module, args, output)
            finally:
                self.give_back()


def attach_hooks(
    modules: Sequence[nn.Module],
    unit: Unit,
    *,
    input_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    inner: bool = False,
) -> list[UnitHooks]:
    """Let a unit's modules tell the engine when they run, as soon as there is one.

    See `UnitHooks` for the dtypes and `inner`.
    """
    made = [
        UnitHooks(unit, member, input_dtype, output_dtype, inner) for member in range(len(modules))
    ]
    for module, hooks in zip(modules, made, strict=True):
        module.__dict__[_HOOKS] = hooks
        steps: tuple[Any, ...] = hooks.before, hooks.after, hooks.give_back
        before, after, give_back = map(torch.compiler.disable, steps)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)
        module.register_forward_hook(give_back, always_call=True)
    _settle_for_state_dicts(modules, made[0])
    return made


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks of a unit's module; None for a module that is no unit's."""
    hooks: UnitHooks | None = module.__dict__.get(_HOOKS)
    return hooks


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose module this is; None for a module that is no unit's."""
    hooks = hooks_of(module)
    return None if hooks is None else hooks.unit


def _settle_for_state_dicts(modules: Sequence[nn.Module], hooks: UnitHooks) -> None:
    """Let modules hold what the optimizer updates when their state is saved or loaded.

    A forward without a backward, or one that raised, leaves compute weights in them. After a load
    these are made anew, whether or not version counters show it: a module's own
    `_load_from_state_dict` may write through `.data`. This goes for each part of the model that is
    saved or loaded by itself (`model.head.load_state_dict`): modules that hold some of the unit's
    parameters have the same hooks, and containers of them hold nothing.
    """
    holders: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {module: [] for module in modules}
    for group in hooks.unit.groups:
        for ref, main in zip(group.refs, group.main_parameters, strict=True):
            for reference, attribute in ref.owners:
                if (owner := reference()) is not None:
                    holders.setdefault(owner, []).append((attribute, main))
    for module, mains in holders.items():
        _hook_state_dicts(module, hooks, None if module in modules else mains)


def _hook_state_dicts(
    module: nn.Module, hooks: UnitHooks, mains: list[tuple[str, nn.Parameter]] | None
) -> None:
    """The hooks of one module; `mains` are its main parameters where it is not the unit's own."""
    unit = hooks.unit

    def settle(module: nn.Module, *, loading: bool) -> None:
        """Put units at rest: of the root all, of part of a unit those that it disturbs."""
        if not hooks.started:
            unit.reshard()
            return
        units: Sequence[Unit] = (unit,)
        if mains is not None:  # mostly the unit around it is at rest already
            units = () if all(module._parameters.get(n) is p for n, p in mains) else units
        elif unit is hooks.engine.root:
            units = hooks.engine.units
        hooks.engine.put_at_rest(units, loading=loading)

    def before_save(module: nn.Module, *_: Any) -> None:
        """What is saved is what the optimizer updates."""
        settle(module, loading=False)

    def before_load(
        module: nn.Module, _: Any, prefix: str, metadata: dict[str, Any], *__: Any
    ) -> None:
        """What is loaded goes there too; ValueError: it would replace parameters."""
        if metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"load_state_dict(assign=True) of {prefix[:-1] or type(module).__name__} replaces "
                "parameters, and the shards hold the ones that were sharded: leave assign out, "
                "which copies"
            )
        settle(module, loading=True)

    def after_load(*_: Any) -> None:
        """Whole weights are old now."""
        for group in unit.groups:
            group.weights.mark_changed()

    module.register_state_dict_pre_hook(before_save)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(before_load)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method other than `forward` gather its unit's parameters, and be trained through.

    Without it, a method that is called from outside (`model.encode(x)`, a `generate` that uses
    weights between forwards) finds this rank's shards. Calling `forward` inside the method is fine.

    Args:
        module: the root of a sharded model, or the module of one of its units.
        name: the method's name.

    Raises:
        AttributeError: if the module has no such method.
        ValueError: if the module is not a unit's.

    Examples:
        >>> model = fully_shard(torch.nn.Linear(8, 1))
        >>> register_forward_method(model, "extra_repr")
    """
    hooks = hooks_of(module)
    if hooks is None:
        raise ValueError(
            f"{type(module).__name__} is not a unit of a sharded model, so nothing is gathered for "
            f"{name}(): register the method of the unit around it (or of the root), after "
            "fully_shard or shard_module; see lamina.fsdp.plan_units for what the units are"
        )
    method = getattr(type(module), name, None)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__} has no method {name!r} to register")
    owner = weakref.ref(module)

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        """Call the method with its unit gathered."""
        return hooks.call(owner(), method, args, kwargs)

    module.__dict__[name] = gathered
    hooks.methods.append(name)


def _mark_inputs(
    engine: Engine,
    unit: Unit,
    given: tuple[Any, ...],
    dtype: torch.dtype | None,
    loan: Loan | None,
    lent: list[Lent],
) -> tuple[Any, ...]:
    """The inputs: floating ones cast to a dtype, and those that need gradients marked.

    What takes the place of others is added to `lent`. `loan` is None where they hold no tensors
    inside, see `_FLAT`.
    """
    tensors: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        """Remember a tensor, and leave it as it is."""
        return tensors.setdefault(id(tensor), tensor)

    if loan is None:
        tensors = {id(value): value for value in given if isinstance(value, torch.Tensor)}
    else:
        map_tensors(given, note, loan)
    changed = {}
    if dtype is not None:
        changed = {key: t.to(dtype) for key, t in tensors.items() if t.is_floating_point()}
    if torch.is_grad_enabled():
        marked = {key: t for key, t in (tensors | changed).items() if t.requires_grad}
        if marked:  # without any, the end of the backward closes this unit
            # One node for all of them: its backward runs when the last of their gradients is there.
            outputs = _AfterBackward.apply(  # type: ignore[no-untyped-call]
                engine, unit, unit.calls.expect(), *marked.values()
            )
            for view, own in zip(outputs, marked.values(), strict=True):
                if view._is_view():
                    # One of several views that one operator made may be written to by nobody.
                    meta = creation_meta(own) if own._is_view() else COMMON_VIEW
                    set_creation_meta(view, meta)
            changed.update(zip(marked, outputs, strict=True))
        elif engine.reducer.phase is not BACKWARD:
            unit.calls.expect_unseen()
    lent += [lend(tensors[key], instead) for key, instead in changed.items()]
    if not changed:
        return given
    if loan is None:
        return tuple([changed.get(id(value), value) for value in given])
    return cast(tuple[Any, ...], map_tensors(given, lambda t: changed.get(id(t), t), loan))


def mark_outputs(
    engine: Engine, unit: Unit, member: int, output: Any, further: Iterable[torch.Tensor] = ()
) -> bool:
    """Whether there are outputs, or `further` ones, that gradients may come to.

    From now on these announce their gradients.
    """
    # Where the backward of this forward has to find the unit's weights.
    epochs = () if engine.slots is None else engine.slots.epochs(unit)

    # Each output announces it: nobody knows which of them the loss depends on.
    def announce(_: torch.Tensor) -> None:
        """The first gradient of an output is there."""
        engine.before_backward(unit, epochs, member)

    outputs: Iterable[Any] = output if type(output) is tuple else (output,)
    if not _FLAT.issuperset(map(type, outputs)):
        outputs = tensors_in(output)
    marked = False
    for tensor in chain(outputs, further):
        # A hook on a leaf would stay for good.
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
            tensor.register_hook(announce)  # type: ignore[no-untyped-call]
            marked = True
            # A write into a view takes its node, and the hook, out of the graph. The gradient then
            # comes through the tensor that it is a view of.
            if (base := tensor._base) is not None and base.grad_fn is not None:
                base.register_hook(announce)  # type: ignore[no-untyped-call]
    return marked


class ModuleWatch:
    """Looks at a model, of these groups, before its forwards of training and before any step.

    `wrapper` is what the user called and `remedy` how its optimizers are made, for messages.
    `left_alone` are `id`s of parameters that are in no group, and were to be left out.
    """

    def __init__(
        self,
        groups: Iterable[ParameterGroup],
        wrapper: str,
        remedy: str,
        left_alone: Collection[int] = (),
    ) -> None:
        self._wrapper, self._remedy = wrapper, remedy
        self._left_alone = frozenset(left_alone)
        # By module and attribute: the name of the parameter, and the `id`s it may have there.
        self._expected: dict[tuple[int, str], tuple[str, int, int]] = {}
        self._computed_with: dict[int, str] = {}  # names of parameters whose main one is another
        self._modules: list[weakref.ref[nn.Module]] = []  # whose `id`s are in use while they live
        for group in groups:
            for ref, main in zip(group.refs, group.main_parameters, strict=True):
                for owner, attribute in ref.owners:
                    if (module := owner()) is not None:
                        self._modules.append(owner)
                        ids = (ref.name, id(ref.parameter), id(main))
                        self._expected[id(module), attribute] = ids
                if group.requires_grad and main is not ref.parameter:
                    self._computed_with[id(ref.parameter)] = ref.name
        if self._computed_with:
            _refuse_in_steps(self)

    def look(self, root: nn.Module) -> None:
        """Raise if the model below `root` holds parameters that it was not wrapped with.

        RuntimeError: a parameter is new, gone or another one.
        """
        expected, left_alone = self._expected, self._left_alone
        # Plain loops over dictionaries: this runs before every forward.
        modules, visited = [root], {id(root)}
        for module in modules:
            place = id(module)
            for name, parameter in module._parameters.items():
                known = expected.get((place, name))
                if known is None:
                    if (
                        parameter is not None
                        and parameter.requires_grad
                        and id(parameter) not in left_alone
                    ):
                        raise RuntimeError(self._new(root, parameter))
                elif id(parameter) not in known:
                    raise RuntimeError(self._replaced(known[0], parameter))
            for child in module._modules.values():
                if child is not None and id(child) not in visited:
                    visited.add(id(child))
                    modules.append(child)

    def refuse(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if an optimizer holds parameters that never have a gradient."""
        for settings in optimizer.param_groups:
            ids = list(map(id, settings["params"]))
            # One set operation for all parameters, because this runs in every step. The name is
            # looked for only where there is an error.
            if not self._computed_with.keys().isdisjoint(ids):
                name = next(self._computed_with[key] for key in ids if key in self._computed_with)
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() with {name} as modules compute with it, "
                    "whose gradient is on a main parameter, so no step would change it: the "
                    f"optimizer was made before {self._wrapper} and not given to it, or after a "
                    "forward without a backward, or the parameter was added to it afterwards. "
                    f"{self._remedy}"
                )

    def _new(self, root: nn.Module, parameter: nn.Parameter) -> str:
        name = next((n for n, p in root.named_parameters() if p is parameter), "a parameter")
        return (
            f"{name} was not there when {self._wrapper} was called, so no rank would sum its "
            f"gradient and ranks would diverge. Add parameters before {self._wrapper}, or freeze "
            "this one with requires_grad_(False)"
        )

    def _replaced(self, name: str, parameter: nn.Parameter | None) -> str:
        what = "was removed" if parameter is None else "is another parameter"
        return (
            f"{name} {what} since {self._wrapper} was called, and the buffers hold the one before. "
            "Write values into that one (`with torch.no_grad(): parameter.copy_(value)`), or "
            f"replace, tie and remove parameters before {self._wrapper}"
        )


def _refuse_in_steps(watch: ModuleWatch) -> None:
    """Let a model's watch look at every optimizer before its steps, as long as the model lives."""
    reference = weakref.ref(watch)

    def before_step(optimizer: Optimizer, _: Any, __: Any) -> None:
        """Ask the watch, as long as the model lives."""
        # Torch runs the hook for optimizers of other models too, which may be compiled.
        if not torch.compiler.is_compiling() and (known := reference()) is not None:
            known.refuse(optimizer)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(watch, handle.remove)
