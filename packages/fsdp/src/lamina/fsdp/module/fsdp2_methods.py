"""The methods of torch's `FSDPModule`, for sharded modules."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import nn

from lamina.ddp.engine import COMING, Engine, UnavailableError, Unit, UnitHooks, hooks_of, unit_of

_FLAGS = "_lamina_final_flags"


class UnshardHandle:
    """An `unshard(async_op=True)` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Make the whole weights ready; nothing if a call of the module has done so meanwhile."""
        # A call of the module may have waited, computed and given the weights back by now: then
        # there is nothing to wait for, and a second gather would never be given back.
        unit = self._unit
        if unit is not None and (
            unit.in_backward or any(weights.state in COMING for weights in unit.gathered)
        ):
            unit.unshard()
        self._unit = None


class UnitMethods(nn.Module):
    """What torch's FSDP2 offers on its modules, under the same names, and the module's units."""

    @property
    def sharding_engine(self) -> Engine:
        """The engine that gathers, releases and reduces."""
        return self._unit_hooks.engine

    @property
    def _unit_hooks(self) -> UnitHooks:
        return cast(UnitHooks, hooks_of(self))

    @property
    def sharding_unit(self) -> Unit:
        """This module's own unit: of what no other unit holds."""
        return self._unit_hooks.unit

    def sharding_units(self, recurse: bool = True) -> Iterator[Unit]:
        """This module's own unit and (`recurse`) those of modules inside it, as registered."""
        units = map(unit_of, self.modules() if recurse else (self,))
        yield from dict.fromkeys(unit for unit in units if unit is not None)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own whole weights (collective, not recursive).

        Args:
            async_op: begin, and return a handle whose `wait()` (or the module's forward) ends it.
        """
        # As in a forward: what was written by hand since the last one is gathered too.
        self.sharding_unit.follow_main_weights()
        self.sharding_unit.start_unshard()
        handle = UnshardHandle(self.sharding_unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give this module's own whole weights back (not recursive)."""
        self.sharding_unit.reshard()

    def set_requires_gradient_sync(self, requires: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards end the accumulation: `no_sync` as a switch.

        Gradients of a microbatch are summed over the sharding dimension at once either way: no
        rank keeps a whole gradient.

        Raises:
            UnavailableError: for a part of the model: its gradients belong to one step.
        """
        self._set_final("gradient_sync", requires, recurse, "set_requires_gradient_sync")

    def set_requires_all_reduce(self, requires: bool, *, recurse: bool = True) -> None:
        """Whether the next backwards sum over the outer dimension of replicas too (HSDP).

        Raises:
            UnavailableError: for a part of the model.
        """
        self._set_final("all_reduce", requires, recurse, "set_requires_all_reduce")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the step's last one: gradients are final after it.

        Raises:
            UnavailableError: for a part of the model.
        """
        self._set_final("last_backward", is_last_backward, True, "set_is_last_backward")

    def _set_final(self, name: str, value: bool, recurse: bool, asked: str) -> None:
        engine = self.sharding_engine
        whole = self.sharding_unit is engine.root
        if not whole or not (recurse or len(engine.units) == 1):
            raise UnavailableError(
                f"{asked} on {self.sharding_unit.name or 'the root with recurse=False'}: the "
                "gradients of one step become final together; call it on the outermost module "
                "with recurse=True"
            )
        # Each of torch's three switches can hold the end of the accumulation back.
        flags: dict[str, bool] = self.__dict__.setdefault(_FLAGS, {})
        flags[name] = value
        engine.reducer.expect_final(all(flags.values()))

    def set_reshard_after_forward(self, reshard: bool, recurse: bool = True) -> None:
        """Whether whole weights are given back between forward and backward.

        Raises:
            ValueError: if it is not a bool.
        """
        if not isinstance(reshard, bool):
            raise ValueError(f"set_reshard_after_forward({reshard!r}): True or False")
        for unit in self.sharding_units(recurse):
            unit.set_reshard_after_forward(reshard)

    def set_reshard_after_backward(self, reshard: bool, *, recurse: bool = True) -> None:
        """Whole weights are always given back after backward.

        Raises:
            UnavailableError: for False.
        """
        if not reshard:
            raise UnavailableError(
                "set_reshard_after_backward(False): between backwards the module holds what the "
                "optimizer updates; use fully_shard(zero_dp_strategy=2), which keeps weights whole"
            )

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's own summed gradients by `factor` instead of the number of ranks.

        Raises:
            ValueError: if it is not positive.
            RuntimeError: while gradients are accumulated.
        """
        self.sharding_unit.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: None = None
    ) -> None:
        """Call `hook(gradients)` when a step's gradients of this module's own are summed.

        torch calls it after each microbatch's reduction, before the factor; here it comes once per
        step and group of parameters, and sees the gradient as the optimizer will.

        Args:
            hook: changes them in place (flat, this rank's part), and may communicate.
            stream: None; the hook runs on the stream that backward is called on.

        Raises:
            UnavailableError: for another stream.
        """
        if stream is not None:
            raise UnavailableError(
                "set_all_reduce_hook(stream=): the hook runs where backward is called; enter a "
                "stream of your own inside it, and let the current one wait for it"
            )
        self.sharding_unit.set_all_reduce_hook(hook)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this module's own weights are gathered for backward; an embedding's need not be.

        Raises:
            UnavailableError: for False on a module that holds other weights than embeddings', whose
                backward would read released memory.
        """
        self.sharding_unit.set_unshard_in_backward(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these modules' weights when this one's forward begins, instead of the next's."""
        self.sharding_unit.set_prefetch(1, _units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these modules' weights when this one's backward begins, instead of the next's."""
        self.sharding_unit.set_prefetch(-1, _units_of(modules))

    def reset_iter_state(self) -> None:
        """Forget a forward or backward that raised, and all gradients, unsummed ones included.

        Without it the next backward does the same, and raises where earlier microbatches' gradients
        are among them.

        Raises:
            UnavailableError: for a part of the model.
        """
        engine = self.sharding_engine
        if self.sharding_unit is not engine.root:
            raise UnavailableError(
                f"reset_iter_state on {self.sharding_unit.name}: a step is the whole model's; call "
                "it on the outermost module"
            )
        engine.reducer.abandon_if_raised()  # first: it ends what the backward has left open
        for group in engine.groups:
            group.discard_gradients()
        for unit in engine.units:
            unit.reshard(even_if_kept=True)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Torch's old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)


_ORDER = "it would go around the order of summation, the ledger and the slots"
_LAST = "a step ends with its last backward; say set_is_last_backward(False) before the others"
_REFUSED = {
    "set_custom_all_gather": f"{_ORDER}; a communicator of your own: fully_shard(fsdp_group_ag=)",
    "set_custom_reduce_scatter": f"{_ORDER}; the backend's own sum: reduction='native'",
    "set_allocate_memory_from_process_group_for_comm": (
        "memory is registered by fully_shard(nccl_ub=True, fsdp_double_buffer=True)"
    ),
    "set_symm_mem_for_comm": (
        "memory is registered by fully_shard(nccl_ub=True, fsdp_double_buffer=True)"
    ),
    "set_force_sum_reduction_for_comms": "sums are all that is sent; leave the call out",
    "set_separate_reduce_scatter_group": (
        "gathers and reductions always have communicators of their own; leave the call out"
    ),
    "set_reduce_scatter_max_input_buffers": "say fully_shard(reduce_budget=), in bytes",
    "set_reduce_scatter_unused_params": (
        "a parameter without a gradient counts as zero here, and ranks agree on who has one; leave "
        "the call out"
    ),
    "set_post_optim_event": (
        "gathers wait for what was queued on the current stream when they begin; leave the call out"
    ),
    "set_keep_unsharded_storage": (
        "gathered weights keep their addresses with fully_shard(fsdp_double_buffer=True)"
    ),
    "set_manual_backward_finalization": _LAST,
    "finalize_backward": _LAST,
}
"""Methods of torch's that have no meaning here, and what to do instead."""


def _refusing(name: str, reason: str) -> Callable[..., None]:
    def refuse(self: UnitMethods, *args: object, **kwargs: object) -> None:
        """Raise with the reason; the docstring of each method is its own."""
        raise UnavailableError(f"{name}(): {reason}")

    refuse.__name__ = name
    refuse.__doc__ = f"Refused: {reason}."
    return refuse


for _name, _reason in _REFUSED.items():
    setattr(UnitMethods, _name, _refusing(_name, _reason))


def _units_of(modules: Sequence[nn.Module]) -> tuple[Unit, ...]:
    units = []
    for module in modules:
        if (unit := unit_of(module)) is None:
            raise ValueError(
                f"{type(module).__name__} has no weights of its own to prefetch: name units' "
                "modules (those that shard_module was applied to, or that plan_units shows)"
            )
        units.append(unit)
    return tuple(units)
