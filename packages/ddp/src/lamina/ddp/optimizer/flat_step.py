"""An optimizer's step over flat runs of a shard instead of over parameters one by one.

Elementwise optimizers give the same bits whether they see a parameter or a run of neighbouring
parameters, so a step needs as many kernels as there are runs, not parameters. The optimizer
object stays the user's: for the time of a step its groups hold runs, before and after it they
hold the parameters, with state per parameter that is a view of the same flat memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.ddp.backward.grad_attribute import refuse_unsummed
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.optimizer import adam_cpu as blocked_adam
from lamina.ddp.optimizer import one_pass
from lamina.ddp.optimizer.borrowed_groups import StandIns
from lamina.ddp.optimizer.whole_step import WholeStep

__all__ = ["COUNTERS", "ELEMENTWISE", "FlatStep"]

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD".split())
)
"""Optimizers whose update of one element reads that element only (and the step count)."""

COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State of those optimizers that is one number per parameter; all else is one per element."""

_STEP = "_lamina_flat_step"


@dataclass
class _Run:
    """Neighbouring parameters of one group that are stepped as one flat parameter."""

    group: ParameterGroup
    indices: list[int]
    start: int
    stop: int
    parameter: nn.Parameter
    done: bool = False
    """Stepped already, by one of the steps written here."""
    wrote_weights: bool = False
    """That step has written the module's weights as well."""

    @property
    def mains(self) -> list[nn.Parameter]:
        return [self.group.main_parameters[index] for index in self.indices]


class FlatStep(StandIns):
    """Makes an optimizer step over flat runs, and tells when it has stepped.

    Args:
        optimizer: one of `ELEMENTWISE`; others step over whole tensors where these are whole on
            one rank (`WholeStep`), and else over parameters as they are.
        groups: the groups whose main parameters the optimizer holds.
        after_step: called when the step is done.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Iterable[ParameterGroup],
        after_step: Callable[[], None],
    ) -> None:
        self._whole = None if type(optimizer) in ELEMENTWISE else WholeStep(optimizer, ())
        self.paused = False
        """Steps are made for their state alone: gradients are read from `.grad`, nobody is told."""
        self._place: dict[int, tuple[ParameterGroup, int]] = {}
        self._computes: dict[int, str] = {}
        self._after_step: list[Callable[[], None]] = []
        self._add(list(groups), after_step)
        self._state: dict[tuple[int, str], torch.Tensor] = {}
        self._parameters: dict[tuple[int, int, int], nn.Parameter] = {}
        self._members: dict[tuple[int, str, int], torch.Tensor] = {}
        self._runs: list[_Run] = []
        super().__init__(optimizer)

    @staticmethod
    def join(
        optimizer: Optimizer, groups: Iterable[ParameterGroup], after_step: Callable[[], None]
    ) -> None:
        """Step over these groups as well, where other modules' groups made one of it already.

        Two of them would each put back what the other one had put there for the time of a step.
        """
        held = optimizer.__dict__.get(_STEP)
        if held is None:
            optimizer.__dict__[_STEP] = FlatStep(optimizer, groups, after_step)
        else:
            held._add(list(groups), after_step)

    def restore_all(self, optimizer: Optimizer) -> None:
        """`restore`, and what `WholeStep` has put there (whose own hooks do so before a step)."""
        self.restore(optimizer)
        if self._whole is not None:
            self._whole.restore(optimizer)

    def _add(self, groups: Sequence[ParameterGroup], after_step: Callable[[], None]) -> None:
        if self._whole is not None:
            self._whole.add(groups)
        self._after_step.append(after_step)
        self._place.update(
            (id(main), (group, index))
            for group in groups
            if group.main is not None
            for index, main in enumerate(group.main_parameters)
        )
        self._computes.update(
            (id(ref.parameter), ref.name)
            for group in groups
            for ref, main in zip(group.refs, group.main_parameters, strict=True)
            if main is not ref.parameter
        )

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.restore(optimizer)
        # A closure computes the gradients inside the step: what will have one is not known yet.
        # args[0] is the optimizer itself.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._refuse_compute_parameters(optimizer)
        if not self.paused and closure is None:
            for group in self._trained():
                refuse_unsummed(group, f"{type(optimizer).__name__}.step()")
        if self._whole is not None or self.paused or closure is not None:
            self._unshare_counts(optimizer)
            return
        self._hold(optimizer)
        for settings in optimizer.param_groups:
            runs, rest = self._make_runs(settings["params"], optimizer)
            self._runs.extend(runs)
            for run in runs:
                optimizer.state[run.parameter] = self._gather_state(run, optimizer)
                run.wrote_weights = self._in_one_pass(run, optimizer, settings)
                run.done = run.wrote_weights or _in_blocks(run, optimizer, settings)
            settings["params"] = [run.parameter for run in runs if not run.done] + rest

    def _trained(self) -> Iterable[ParameterGroup]:
        return {id(group): group for group, _ in self._place.values()}.values()

    def _refuse_compute_parameters(self, optimizer: Optimizer) -> None:
        """A parameter that has a main one apart never has a gradient: a step would skip it."""
        for parameter in (p for settings in optimizer.param_groups for p in settings["params"]):
            if (name := self._computes.get(id(parameter))) is not None:
                raise RuntimeError(
                    f"{name} was added to {type(optimizer).__name__} after the "
                    "model was wrapped, and its gradient is on a main parameter, so no step would "
                    "change it: give the optimizer all parameters first"
                )

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._put_back(optimizer, stepped=True)
        if not self.paused:
            for tell in self._after_step:
                tell()

    def _put_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        self._release(optimizer)
        runs, self._runs = self._runs, []
        try:
            for run in runs:
                # What a step that raised has begun to make is made anew: it may not be all there,
                # and to spread it takes memory that may have run out.
                if stepped or optimizer.state.get(run.mains[0]):
                    self._spread_state(run, optimizer)
        finally:
            for run in runs:
                optimizer.state.pop(run.parameter, None)
                run.parameter.grad = None
        for group in {id(run.group): run.group for run in runs}.values():
            through = stepped and all(run.wrote_weights for run in runs if run.group is group)
            group.weights.written_through(through)

    def _in_one_pass(self, run: _Run, optimizer: Optimizer, settings: dict[str, Any]) -> bool:
        """Step a run and write the module's weights at once, where a kernel can."""
        weights, state = run.group.weights.place_of_main(), optimizer.state[run.parameter]
        if weights is None or not one_pass.takes(optimizer, settings, state, run.parameter):
            return False
        gradient = run.parameter.grad
        if gradient is None:
            return False
        place = weights[run.start : run.stop]
        one_pass.launch(optimizer, settings, state, run.parameter.data, gradient, place)
        return True

    # -- runs ---------------------------------------------------------------------------------

    def _make_runs(
        self, parameters: Sequence[nn.Parameter], optimizer: Optimizer
    ) -> tuple[list[_Run], list[nn.Parameter]]:
        """Cut the parameters that have gradients into runs; the rest is stepped as it is."""
        by_group: dict[int, list[int]] = {}
        groups: dict[int, ParameterGroup] = {}
        rest: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            group, index = self._place.get(id(parameter), (None, 0))
            if group is None:
                rest.append(parameter)
                continue
            groups[id(group)] = group
            by_group.setdefault(id(group), []).append(index)
        runs = []
        for key, indices in by_group.items():
            indices.sort()
            piece = [indices[0]]
            for index in indices[1:]:
                if index == piece[-1] + 1 and self._same_history(
                    groups[key], piece[-1], index, optimizer
                ):
                    piece.append(index)
                else:
                    runs.append(self._run(groups[key], piece))
                    piece = [index]
            runs.append(self._run(groups[key], piece))
        return runs, rest

    def _same_history(
        self, group: ParameterGroup, first: int, second: int, optimizer: Optimizer
    ) -> bool:
        """Whether two parameters were stepped equally often (their bias corrections agree)."""
        states = [optimizer.state.get(group.main_parameters[i], {}) for i in (first, second)]
        if states[0].keys() != states[1].keys():
            return False
        one, other = (state.get("step") for state in states)
        return one is other or bool(one == other)

    def _run(self, group: ParameterGroup, indices: list[int]) -> _Run:
        spans = [group.span_in_rest(index) for index in indices]
        held = [span for span in spans if span[0] < span[1]]
        start, stop = (held[0][0], held[-1][1]) if held else (0, 0)
        # Not the place: several runs may have no elements on this rank.
        key = (id(group), indices[0], indices[-1])
        if key not in self._parameters:
            self._parameters[key] = nn.Parameter(group.rest.data[start:stop])
        parameter = self._parameters[key]
        parameter.grad = group.gradients_to_step.data[start:stop].to(parameter.dtype)
        return _Run(group, indices, start, stop, parameter)

    # -- state --------------------------------------------------------------------------------

    def _gather_state(self, run: _Run, optimizer: Optimizer) -> dict[str, Any]:
        """The run's state from its parameters': views of the flat state, brought up to date."""
        first = optimizer.state.get(run.mains[0])
        if not first:
            return {}
        state: dict[str, Any] = {}
        for name, value in first.items():
            if name in COUNTERS or not isinstance(value, torch.Tensor):
                # A copy: it is counted up in place, and parameters that this run leaves out may
                # hold the same tensor from a run that they were part of.
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            flat = self._flat_state(run.group, name, _local(value).dtype)
            for index, main in zip(run.indices, run.mains, strict=True):
                held = optimizer.state[main][name]
                if held is self._members.get((id(run.group), name, index)):
                    continue
                start, stop = run.group.span_in_rest(index)
                local = _local(held).reshape(-1)
                if local.numel() and local.data_ptr() != flat[start:stop].data_ptr():
                    flat[start:stop].copy_(local)  # loaded, or made before the first flat step
            state[name] = flat[run.start : run.stop]
        return state

    def _spread_state(self, run: _Run, optimizer: Optimizer) -> None:
        """Give every parameter of the run its part of the run's state."""
        state = optimizer.state.pop(run.parameter, None)
        if not state:
            return
        # All memory first: a parameter must never be left with a part of its state.
        flats = {
            name: self._flat_state(run.group, name, value.dtype)
            for name, value in state.items()
            if name not in COUNTERS and isinstance(value, torch.Tensor)
        }
        for name, value in state.items():
            if (flat := flats.get(name)) is not None:
                if value.numel() and value.data_ptr() != flat[run.start : run.stop].data_ptr():
                    flat[run.start : run.stop].copy_(value)
                for index, main in zip(run.indices, run.mains, strict=True):
                    key = (id(run.group), name, index)
                    if key not in self._members:
                        self._members[key] = run.group.member_of(flat, index)
                    optimizer.state[main][name] = self._members[key]
            else:
                for main in run.mains:
                    optimizer.state[main][name] = value

    def _flat_state(self, group: ParameterGroup, name: str, dtype: torch.dtype) -> torch.Tensor:
        key = (id(group), name)
        if key not in self._state:
            self._state[key] = torch.zeros_like(group.rest.data, dtype=dtype)
        return self._state[key]

    def _unshare_counts(self, optimizer: Optimizer) -> None:
        """Parameters of a run share their counters; stepped one by one, each needs its own."""
        for state in optimizer.state.values():
            for name in COUNTERS & state.keys():
                if isinstance(state[name], torch.Tensor):
                    state[name] = state[name].clone()


def _in_blocks(run: _Run, optimizer: Optimizer, settings: dict[str, Any]) -> bool:
    """Step a run block by block, where that is the same arithmetic in less time."""
    state, gradient = optimizer.state[run.parameter], run.parameter.grad
    if gradient is None or not blocked_adam.takes(optimizer, settings, state, run.parameter):
        return False
    blocked_adam.launch(optimizer, settings, state, run.parameter.data, gradient)
    return True


def _local(value: torch.Tensor) -> torch.Tensor:
    to_local = getattr(value, "to_local", None)
    return to_local() if to_local is not None else value
