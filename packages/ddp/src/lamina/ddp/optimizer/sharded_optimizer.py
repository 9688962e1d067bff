"""`ShardedOptimizer`: any torch optimizer over the main weights of a wrapped module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.buffers import ShardedTensor
from lamina.ddp.compat import local_of_state_call
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.inspect.inspection import groups_of
from lamina.ddp.optimizer.adopt_parameters import cut_state, locate_main_parameters
from lamina.ddp.optimizer.flat_step import COUNTERS, MOMENTS, unshare_counts
from lamina.ddp.optimizer.grad_scaler import answer_scalers
from lamina.ddp.optimizer.muon import ELEMENTWISE_STATE
from lamina.ddp.optimizer.whole_step import adopt_optimizer
from lamina.mesh import ParallelMesh

_MAIN_WEIGHTS = "main_weights"


@runtime_checkable
class _HearsOfSteps(Protocol):
    def weights_written(self) -> None:
        """The optimizer has stepped: new main weights are there."""


class ShardedOptimizer(Optimizer):
    """Steps an optimizer over this rank's main weights, and brings the update to the module.

    Elementwise optimizers step over flat runs of neighbouring parameters; others get one
    `ShardedTensor` (or, under strategy 0, one whole tensor) per parameter. The wrapped optimizer's
    groups and hyperparameters are these ones: a scheduler on either changes both.

    Args:
        optimizer: made over the module's parameters.
        module: what the wrapper returned.
        mesh: the mesh the module was wrapped over; None is the whole world. Where its ranks hold
            other parameters (tp, pp, ep, expert_tp) a plain `GradScaler` is refused, whose ranks
            would decide each for themselves: use `ShardedGradScaler`.

    Raises:
        TypeError: if the module was not wrapped by Lamina.
        ValueError: if the optimizer holds none of its parameters.
        DisagreementError: for another optimizer than other ranks have.

    Examples:
        >>> mesh = ParallelLayout().build("cpu")
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1), mesh=mesh)
        >>> optimizer = ShardedOptimizer(torch.optim.AdamW(model.parameters()), model, mesh)
    """

    def __init__(
        self, optimizer: Optimizer, module: nn.Module, mesh: ParallelMesh | DeviceMesh | None = None
    ) -> None:
        groups = groups_of(module)
        remedy = "wrap the model with keep_tensors_whole=True, or without use_distributed_optimizer"
        name = type(self).__name__
        self._borrowed = adopt_optimizer(name, optimizer, groups, module, remedy)
        self.optimizer = optimizer
        self._groups = groups
        self._located = locate_main_parameters(groups)
        self._names = {
            main: group.refs[index].name for main, (group, index) in self._located.items()
        }
        self._ready = False
        # The same dictionaries, not copies: what one of the two changes, the other reads.
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._ready = True
        whole = mesh.mesh if isinstance(mesh, ParallelMesh) else mesh

        def stepped() -> None:
            """Tell a wrapper whose weights follow steps."""
            if isinstance(module, _HearsOfSteps):
                module.weights_written()

        self._borrowed.add(groups, stepped)
        ranks = dist.get_world_size() if whole is None else whole.size()
        answer_scalers(self, self._borrowed, ranks)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the wrapped optimizer; returns the closure's loss.

        Raises:
            RuntimeError: while gradients wait to be summed over ranks, or if the wrapped optimizer
                was given parameters since.
        """
        if len(self.optimizer.param_groups) != len(self.param_groups):
            raise RuntimeError(
                f"the wrapped {type(self.optimizer).__name__} has "
                f"{len(self.optimizer.param_groups)} groups and had {len(self.param_groups)} when "
                "it was wrapped: add_param_group() before ShardedOptimizer(optimizer, module, mesh)"
            )
        # Torch calls no post-hook of a step that raises: the user's parameters come back here.
        try:
            # A step of the user's may take no closure.
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self._borrowed.restore(self.optimizer)

    def prepare_state(self) -> None:
        """Make the state that a first step would make, for a load to fill.

        A loader that writes in place (torch.distributed.checkpoint) needs tensors to write to.
        Their values mean nothing until then. Weights and gradients stay as they are; parameters
        that have state already keep it.
        """
        mains = [p for group in self.param_groups for p in group["params"]]
        kept = {id(p): (p.grad, p.detach().clone()) for p in mains}
        rates = [group["lr"] for group in self.param_groups]
        # A step at rate 0 over zero gradients: every optimizer makes its state by itself, and only
        # parameters without state take part.
        with torch.no_grad():
            for parameter in mains:
                fresh = not self.state.get(parameter) and parameter.requires_grad
                parameter.grad = torch.zeros_like(parameter) if fresh else None
            for group in self.param_groups:
                group["lr"] = 0.0
            try:
                with self._borrowed.for_state_alone():
                    self.optimizer.step()
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate
            # An optimizer of the user's own may decay weights whatever the rate is.
            for parameter in mains:
                parameter.grad, before = kept[id(parameter)]
                parameter.copy_(before)
                self._narrow_moments(parameter)

    def _narrow_moments(self, parameter: nn.Parameter) -> None:
        """Bring a parameter's moments to the dtype in which they are kept."""
        located, state = self._located.get(id(parameter)), self.state.get(parameter, {})
        dtype = None if located is None else located[0].dtypes.moments
        if dtype is not None:
            state.update({name: state[name].to(dtype) for name in MOMENTS if name in state})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of the main parameters, those not yet summed included.

        Raises:
            RuntimeError: to zero, between microbatches, a part of the parameters that share a
                buffer.
        """
        # Before the optimizer's own, which sees `.grad` alone: gradients may wait elsewhere.
        for group in self._groups:
            if not set_to_none:
                self._zero(group)
        self.optimizer.zero_grad(set_to_none)
        for group in self._groups:
            group.shown.follow_mains()

    def _zero(self, group: ParameterGroup) -> None:
        own = {id(p) for settings in self.param_groups for p in settings["params"]}
        mine = [id(p) in own for p in group.main_parameters]
        if group.gradients is None or not any(mine):
            return
        if all(mine):
            group.shown.zero()
        elif group.gradients.is_waiting:
            other = group.refs[mine.index(False)].name
            raise RuntimeError(
                f"zero_grad(set_to_none=False) between microbatches: {other} is in a buffer with "
                "parameters of this optimizer and not in the optimizer: call zero_grad() of the "
                "wrapped module, which drops all gradients"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after construction: the new parameters would have no buffers.

        Raises:
            RuntimeError: always, once the optimizer is built.
        """
        if self._ready:
            raise RuntimeError(
                "add_param_group: parameters get their buffers when the module is wrapped; give "
                "the optimizer all groups before ShardedOptimizer(optimizer, module, mesh)"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """State by parameter name, and the groups with names in place of parameters.

        Main weights that the model holds in fewer bits are in it, as `main_weights`: the model's
        state_dict has them rounded only.

        Raises:
            NotImplementedError: for `torch.distributed.checkpoint.state_dict`'s functions.
        """
        if local_of_state_call("info") is not None:
            self.refuse_generic_state()
        # Parameters of one run share their counters, and a load in place would write each of them.
        unshare_counts(self.optimizer)
        states: dict[Any, Any] = {}
        for key, state in self.state.items():
            if isinstance(key, torch.Tensor):
                states[self._names.get(id(key), "?")] = dict(state)
            else:  # an optimizer may keep what belongs to no parameter, as torch allows
                states[key] = state
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if self._is_apart(parameter):
                states.setdefault(self._names[id(parameter)], {})[_MAIN_WEIGHTS] = parameter
        return {
            "state": states,
            "param_groups": [
                {**group, "params": [self._names.get(id(p), "?") for p in group["params"]]}
                for group in self.param_groups
            ],
        }

    @staticmethod
    def refuse_generic_state() -> NoReturn:
        """Say what to call in place of torch's generic functions.

        They find state by the parameters of the model. Those are the whole ones, and the
        optimizer's are the main ones.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "torch.distributed.checkpoint.state_dict was given a ShardedOptimizer, whose state has "
            "names: save optimizer.state_dict() itself with torch.distributed.checkpoint.save, "
            "call prepare_state() before a load into it, or use lamina.checkpoint's "
            "CheckpointManager. The functions work for the model alone, and for an optimizer that "
            "lamina.fsdp.fully_shard was given"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state by parameter name; hyperparameters of the groups come along.

        `main_weights` are taken where they are apart from the model's: load the model first, which
        rounds them. A parameter that the state does not name has none from here on, like one that
        was never stepped. Saved groups are told apart by the names in them.

        Raises:
            KeyError: if the state names unknown parameters.
            ValueError: if the parameters were grouped otherwise.
        """
        by_name: dict[str, list[nn.Parameter]] = {}  # two stages may hold a tied one each
        for parameter in [p for g in self.param_groups for p in g["params"]]:
            if (known := self._names.get(id(parameter))) is not None:
                by_name.setdefault(known, []).append(parameter)
        others = {k: v for k, v in state_dict["state"].items() if k not in by_name}
        unknown = sorted(key for key, value in others.items() if isinstance(value, Mapping))
        if unknown:
            raise KeyError(
                f"optimizer state names {unknown[:3]} ({len(unknown)} in all), which this "
                "optimizer does not hold: was it saved from another model?"
            )
        # Hyperparameters come by group, and groups are known by the names in them, in any order.
        own = [
            [name for p in g["params"] if (name := self._names.get(id(p))) is not None]
            for g in self.param_groups
        ]
        saved = [[name for name in g["params"] if name != "?"] for g in state_dict["param_groups"]]
        for group, place in zip(self.param_groups, match_groups(own, saved), strict=True):
            chosen = {} if place is None else state_dict["param_groups"][place]
            group.update({key: value for key, value in chosen.items() if key != "params"})
        # State goes first, and comes back where it is named: a parameter that was never stepped in
        # the saved run has to begin anew here too.
        mine = [p for parameters in by_name.values() for p in parameters]
        before = {id(p): self.state.pop(p, {}) for p in mine}
        self.state.update(others)
        for name, parameters in by_name.items():
            for parameter in parameters if name in state_dict["state"] else ():
                self._take(parameter, state_dict["state"][name], before[id(parameter)])

    def _take(self, parameter: nn.Parameter, values: dict[str, Any], kept: dict[str, Any]) -> None:
        """One parameter's state, and its main weights where they are apart from the model's."""
        if self._is_apart(parameter) and _MAIN_WEIGHTS in values:
            with torch.no_grad():
                parameter.copy_(self._cut(parameter, values[_MAIN_WEIGHTS], elementwise=True))
        # A tensor of the parameter's size is cut like it, if its elements are the parameter's.
        elementwise = type(self.optimizer) in ELEMENTWISE_STATE
        taken = {}
        for key, value in values.items():
            if key != _MAIN_WEIGHTS:
                cut = self._cut(parameter, value, elementwise=elementwise)
                taken[key] = _taken(cut, None if key in COUNTERS else kept.get(key))
        if taken:
            self.state[parameter] = taken

    def _is_apart(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's main weights have more bits than the model's."""
        located = self._located.get(id(parameter))
        group = None if located is None else located[0]
        return (
            group is not None and group.requires_grad and group.dtypes.main != group.dtypes.weights
        )

    def _cut(self, parameter: nn.Parameter, value: Any, *, elementwise: bool) -> Any:
        """This rank's part of a whole tensor (saved by another strategy, or one process)."""
        is_cut = isinstance(parameter, ShardedTensor) and elementwise
        if is_cut and not isinstance(value, ShardedTensor):
            return cut_state(value, *self._located[id(parameter)])
        return value


def _taken(value: Any, before: Any) -> Any:
    """A loaded value, written into the tensor that is there where shapes agree."""
    if isinstance(value, torch.Tensor):
        if isinstance(before, torch.Tensor) and before.shape == value.shape:
            with torch.no_grad():
                if before is not value:
                    before.copy_(value)
            return before
        return value.clone()
    return value


def match_groups(own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[int | None]:
    """For each of an optimizer's groups the place of the saved one with its parameters.

    Both are names of the parameters of each group; the result is None for a group without any.
    ValueError: the parameters are not grouped alike.
    """
    place = {name: at for at, names in enumerate(saved) for name in names}
    taken: dict[int, str] = {}
    matched: list[int | None] = []
    for names in own:
        places = {place[name]: name for name in names if name in place}
        if len(places) > 1:
            (first, name), (second, other) = list(places.items())[:2]
            raise _differ(f"{name} was in group {first} and {other} in group {second}, here in one")
        if not places:
            if names:
                raise _differ(f"no saved group holds {names[0]}")
            matched.append(None)
            continue
        (at, name), *_ = places.items()
        if at in taken:
            raise _differ(f"{taken[at]} and {name} were in one group, here in two")
        taken[at] = name
        matched.append(at)
    for at, names in enumerate(saved):
        if names and at not in taken:
            raise _differ(f"saved group {at} holds {names[0]}, which no group here does")
    return matched


def _differ(how: str) -> ValueError:
    return ValueError(
        f"the saved optimizer groups its parameters otherwise: {how}. Learning rates and weight "
        "decay are kept by group: build the optimizer with the groups it was saved with"
    )
