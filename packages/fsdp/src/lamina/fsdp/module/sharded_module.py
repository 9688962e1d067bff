"""What a sharded module can do beside what its own class can."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lamina.collectives.engine import broadcast
from lamina.ddp import DataParallel
from lamina.ddp.engine import (
    MemoryBudgets,
    ParameterGroup,
    Unit,
    hooks_of,
    register_forward_method,
    unit_of,
)
from lamina.fsdp.module.fsdp2_methods import UnitMethods
from lamina.fsdp.state.state_dicts import prepare_given_optimizers
from lamina.fsdp.units.dtensors import take_form
from lamina.mesh.engine import copy_role

ModuleT = TypeVar("ModuleT", bound="ShardedModule")


class ShardedModule(UnitMethods):
    """Mixin that `fully_shard` adds to the root module's class; `forward` stays the user's."""

    def unit_of(self, module: nn.Module | str) -> Unit:
        """The unit of one of the model's modules, to gather, release or set up by itself.

        It has `unshard()`, `reshard()` and `set_reshard_after_forward(...)`; its `prefetch` holds
        the units to gather when its forward (1) or backward (-1) begins.

        Args:
            module: a unit's module, or its qualified name.

        Raises:
            ValueError: for a module that is no unit's.
        """
        unit = unit_of(self.get_submodule(module) if isinstance(module, str) else module)
        units = self.sharding_engine.units
        if unit is None or unit not in units:
            name = module if isinstance(module, str) else type(module).__name__
            names = ", ".join(unit.title for unit in units)
            raise ValueError(f"{name} is no unit of this model, whose units are {names}")
        return unit

    @property
    def memory_budgets(self) -> MemoryBudgets:
        """Limits in bytes that `memory_plan` reads."""
        engine = self.sharding_engine
        budget = engine.prefetcher.budget
        gathers = None if budget is None else budget.limit
        trained = [group.trained for group in engine.groups if group.requires_grad]
        # Note [Two units' gradients]: a third is filled beside sums that do not end alone.
        buffers = 2 if all(gradients.ends_alone for gradients in trained) else 3
        return MemoryBudgets(gathers, engine.reducer.max_bytes_in_flight, buffers, receives=2)

    def gathered_again(self) -> list[ParameterGroup]:
        """Groups that a backward gathers again: for `wire_plan`."""
        return self.sharding_engine.gathered_again()

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """All groups of parameters, frozen ones included, in the same order on every rank."""
        yield from self.sharding_engine.groups

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last microbatch (gradient accumulation)."""
        return self.sharding_engine.reducer.no_sync()

    def set_model_auto_sync(self, sync: bool = True) -> None:
        """Whether backwards outside `no_sync` end the accumulation (Megatron-FSDP's name).

        With False, `finish_grad_sync` or the optimizer's step ends it.
        """
        self.sharding_engine.reducer.expect_final(sync)

    def gather_once_per_step(self, once: bool = True) -> None:
        """Whether units that were gathered stay whole until `release_units`."""
        for unit in self.sharding_engine.units:
            unit.keep_for_step(once)
        if not once:
            self.release_units()

    def reduce_once_per_step(self, once: bool = True) -> None:
        """Whether gradients are summed over ranks by final backwards only, under any strategy.

        Strategies 2 and 3 otherwise sum every microbatch's, inside `no_sync` too.

        Raises:
            RuntimeError: while gradients are accumulated.
        """
        self.sharding_engine.reducer.reduce_once_per_step(once)

    def release_units(self) -> None:
        """Give whole weights back (the end of a step)."""
        for unit in self.sharding_engine.units:
            unit.reshard(even_if_kept=True)

    def late_gradients(self) -> AbstractContextManager[None]:
        """Gradients that arrive inside belong to backwards that are over (split backwards)."""
        return self.sharding_engine.reducer.late_gradients()

    def start_grad_sync(self) -> None:
        """Begin to sum what was accumulated and not yet summed over ranks."""
        self.sharding_engine.reducer.start()

    def finish_grad_sync(self) -> None:
        """Wait until gradients are summed and visible; harmless when they are."""
        self.sharding_engine.reducer.finish()
        self.sharding_engine.expect_step()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by `factor`, those of microbatches inside `no_sync` included."""
        self.sharding_engine.reducer.scale(factor)

    def broadcast_params(self) -> None:
        """Take the first rank's main weights along the axes that hold copies (collective)."""
        for group in self.parameter_groups():
            axes = (group.axes.outer, group.axes.inner)
            # Along an axis that cuts them ranks hold different spans: there is nothing to take.
            for cut, axis in zip(group.main_weights.cuts, axes, strict=True):
                if not cut:
                    broadcast(group.main_weights.data, axis.sibling("gather"), src=0).wait()
        self.start_param_sync()

    def start_param_sync(self) -> None:
        """Main weights were changed by hand: install them before the next forward."""
        self.sharding_engine.mark_weights_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; after a backward that raised, what it has left goes too."""
        for group in self._groups_inside():
            gradients = group.gradients
            # Zeroed in place, what a raised backward has left would be added to the next one's.
            if gradients is not None and (set_to_none or gradients.at_risk):
                group.discard_gradients()
        super().zero_grad(set_to_none)

    def _groups_inside(self) -> Iterator[ParameterGroup]:
        """Groups of which no other module holds a part (of a unit of several); none before use."""
        if not self._unit_hooks.started:
            return
        inside = set(self.modules())
        for group in self.parameter_groups():
            # A parameter that is tied to one outside is not this module's alone to forget.
            if all(any(owner() in inside for owner, _ in ref.owners) for ref in group.refs):
                yield group

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, those of microbatches inside `no_sync` included."""
        for group in self.parameter_groups():
            group.discard_gradients()

    def unsharded(self) -> AbstractContextManager[None]:
        """Whole parameters for the time being (collective): for generation or inspection.

        What is written to them inside is lost when a unit is released.
        """
        return self.sharding_engine.unsharded()

    def deregister_memory(self) -> None:
        """With `nccl_ub`: deregister, on all ranks, before the process group is destroyed."""
        slots = self.sharding_engine.slots
        if slots is not None:
            slots.close()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module."""
        if not torch.compiler.is_compiling():
            prepare_given_optimizers()
        return super().named_parameters(*args, **kwargs)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Any:
        """As of any module; parameters have memory in their shards already, and keep it.

        Raises:
            ValueError: for another kind of device than they are on.
        """
        kinds = {parameter.device.type for parameter in self.parameters()}
        if device is not None and kinds - {torch.device(device).type}:
            raise ValueError(
                f"to_empty(device={device!r}) of a model whose shards are on {sorted(kinds)}: say "
                "where to compute with device= or the mesh when it is sharded"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that is sharded by itself, over the same ranks (collective).

        Each rank copies what it holds: nothing is gathered. Gradients are not copied, no optimizer
        holds the parameters of the copy, and divide factors and hooks of reductions that were set
        on units stay theirs.

        Raises:
            RuntimeError: while a backward runs.
        """
        if _WITHIN in memo:
            return _plain_copy(self, _class_before(self), memo)
        return copy_sharded(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} is sharded and cannot be pickled: save model.state_dict() "
            "(torch.distributed.checkpoint, or fully_shard(preproc_state_dict_for_dcp_ckpt=False) "
            "and torch.save), and load it into a model built anew"
        )


_WITHIN: Any = "a sharded module is being copied"
"""In the memo of `copy.deepcopy`, whose other keys are integers."""
_OWN = "_lamina_"
"""What this package's attributes of modules begin with."""
_SHARD_AGAIN = "_lamina_shard_again"
_OWN_HOOKS = ("lamina.fsdp.", "lamina.ddp.execution.")
_HOOK_TABLES = (
    *("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def remember_sharding(modules: list[Any], again: Callable[[list[nn.Module]], object]) -> None:
    """Keep for copies how modules were sharded: the root, or all modules of one unit.

    `again` shards copies of them alike. Their parameters are on the meta device, and what values
    they get does not matter.
    """
    for module in modules:
        module.__dict__[_SHARD_AGAIN] = again


def copy_sharded(module: ShardedModule, memo: dict[int, Any]) -> nn.Module:
    """Copy a sharded module: a plain copy without values is sharded, and gets this one's values.

    Note [Copies of sharded modules]
        Hooks, units and buffers belong to one module, and know it by references that a copy of them
        would share. So none of them is copied. `copy.deepcopy` meets meta tensors in place of
        parameters, what this package has added is taken out of the result, and the same call as
        before shards it. Spans are then copied from group to group, since both have one layout. See
        docs/decisions/0533.
    """
    units = list(module.sharding_units())
    # At rest modules hold main parameters, whose values are those that a copy has to have.
    if module._unit_hooks.started:
        module.sharding_engine.put_at_rest(units)
    # `deepcopy` finds in its memo what stands for a parameter: a meta tensor of the whole shape.
    for unit in units:
        for group in unit.groups:
            for ref, main in zip(group.refs, group.main_parameters, strict=True):
                blank = torch.empty(ref.parameter.shape, dtype=group.dtypes.given, device="meta")
                parameter = nn.Parameter(blank, requires_grad=group.requires_grad)
                copy_role(main, parameter)
                take_form(parameter, ref.parameter)
                memo[id(main)] = memo[id(ref.parameter)] = parameter
    # What this package keeps in modules is not copied, but shared, and taken out of the copy.
    inside = list(module.modules())
    for each in inside:
        own = {n: v for n, v in each.__dict__.items() if n.startswith(_OWN)}
        memo.update({id(value): value for value in own.values()})
    memo[_WITHIN] = True  # sharded modules inside are copied as plain ones
    for each in reversed(inside):
        # `torch.compile(part)` answers for `__deepcopy__` with its part's, which leaves it out.
        if "_orig_mod" in each._modules and not isinstance(each, ShardedModule):
            _plain_copy(each, type(each), memo)
    made = _plain_copy(module, _class_before(module), memo)
    del memo[_WITHIN]
    pairs = list(zip(inside, made.modules(), strict=True))
    _take_out(pairs)
    _shard_again(pairs)
    _copy_values(units, list(cast(ShardedModule, made).sharding_units()))
    return made


def _class_before(module: ShardedModule) -> type[nn.Module]:
    """The class that a module had before it was sharded."""
    return cast(type[nn.Module], type(module).__bases__[1])


def _plain_copy(module: nn.Module, cls: type[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """As `copy.deepcopy` makes one, of this class."""
    made = cls.__new__(cls)
    memo[id(module)] = made
    made.__setstate__(copy.deepcopy(module.__getstate__(), memo))  # type: ignore[no-untyped-call]
    return made


def _take_out(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Remove what belongs to the modules that were copied from their copies."""
    for _, made in pairs:
        for name in [n for n in made.__dict__ if n.startswith(_OWN)]:
            del made.__dict__[name]
        for name in _HOOK_TABLES:
            table: dict[int, Any] = made.__dict__.get(name, {})
            for handle, hook in list(table.items()):
                if getattr(hook, "hook", hook).__module__.startswith(_OWN_HOOKS):
                    del table[handle]


def _shard_again(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Shard copies as the modules were, inner ones first."""
    # A call of `shard_module` may have made one unit of several modules: they come together again.
    calls: dict[int, tuple[Callable[[list[nn.Module]], object], list[nn.Module]]] = {}
    for module, made in pairs:
        if (again := module.__dict__.get(_SHARD_AGAIN)) is not None:
            calls.setdefault(id(again), (again, []))[1].append(made)
    for again, modules in reversed(calls.values()):
        again(modules)
    # A registered method is a closure in the module's own dictionary, over the module copied.
    for module, made in pairs:
        hooks = hooks_of(module)
        for name in () if hooks is None else hooks.methods:
            made.__dict__.pop(name, None)
            register_forward_method(made, name)


def _copy_values(units: list[Unit], copies: list[Unit]) -> None:
    same = dict(zip(units, copies, strict=True))
    for unit, made in same.items():
        made.choose_like(unit, same)
        for group, other in zip(unit.groups, made.groups, strict=True):
            group.writes.refuse_assigned(group.refs)
            other.main_weights.data.copy_(group.main_weights.data)
            other.weights.mark_changed()
            for main, copied in zip(group.main_parameters, other.main_parameters, strict=True):
                copied.requires_grad_(main.requires_grad)  # frozen or trained since it was sharded


class WatchedModule(ShardedModule):
    """Mixin of `fully_shard(check_storage=True)`: reads in forward are watched over."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As for any module."""
        with self.sharding_engine.guards.reads():
            return super().__call__(*args, **kwargs)


# It meets the contract; a base class would bring an abstract forward in front of the user's.
DataParallel.register(ShardedModule)


def adopt(module: nn.Module, mixin: type[ModuleT]) -> ModuleT:
    """Give a module the methods of a mixin.

    Its class keeps its name: transformers writes it into `config.json`, and looks up by it whether
    a loss shifts its labels.
    """
    cls = type(module)
    module.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    return cast(ModuleT, module)
