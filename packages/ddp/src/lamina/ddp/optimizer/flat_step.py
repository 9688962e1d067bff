"""An optimizer's step over flat runs of a shard instead of over parameters one by one.

Elementwise optimizers give the same bits whether they see a parameter or a run of neighbouring
parameters, so a step needs as many kernels as there are runs, not parameters. The optimizer
object stays the user's: for the time of a step its groups hold runs, before and after it they
hold the parameters, with state per parameter that is a view of the same flat memory.

Note [Plans of runs]
A run ends where parameter groups, the parameters that have gradients, or step counts differ. To
look at the state of every parameter in every step would cost more than the step's launches, so the
runs of the last step are kept as a plan. A user may change anything between two steps: the groups,
which parameters have gradients, and the state (a load replaces it). So a plan is used again only if
the same parameters have gradients and the state of each holds the very objects that the last step
put there. Objects are compared by identity, which costs no call in Python. Anything else makes a
new plan from the parameters' state. Hyperparameters are no part of a plan: every step reads them.
See docs/decisions/0410.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.group.shown import local_of
from lamina.ddp.optimizer.adopt_parameters import locate_main_parameters
from lamina.ddp.optimizer.borrowed_groups import BorrowedGroups
from lamina.ddp.optimizer.run_kernels import KERNELS
from lamina.ddp.optimizer.whole_step import WholeStep

__all__ = ["COUNTERS", "ELEMENTWISE", "MOMENTS", "FlatStep", "step_over_groups", "unshare_counts"]

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD".split())
)
"""Optimizers whose update of one element reads that element only (and the step count)."""

COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State of those optimizers that is one number per parameter; all else is one per element."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_BORROWED = "_lamina_borrowed_groups"
_NO_STATE: Mapping[str, Any] = {}


def step_over_groups(
    optimizer: Optimizer, groups: Iterable[ParameterGroup], after_step: Callable[[], None]
) -> BorrowedGroups:
    """Make an optimizer step over what lies flat, or whole, and not over sharded parameters.

    Elementwise optimizers step over flat runs (`FlatStep`). Others step over whole tensors where
    these are whole on one rank, and else over parameters as they are (`WholeStep`). An optimizer
    that steps over other modules' groups already steps over these as well.

    `after_step` is called when a step is done. ValueError refuses moments in a dtype of their own
    for another optimizer than Adam and AdamW.
    """
    groups = list(groups)
    for group in groups:
        if group.dtypes.moments is not None and type(optimizer) not in (Adam, AdamW):
            raise ValueError(
                f"moments_dtype={group.dtypes.moments} is for torch.optim.Adam and AdamW, and "
                f"{group.refs[0].name} has {type(optimizer).__name__}: leave it out"
            )
    borrowed: BorrowedGroups | None = optimizer.__dict__.get(_BORROWED)
    if borrowed is None:
        make = FlatStep if type(optimizer) in ELEMENTWISE else WholeStep
        borrowed = optimizer.__dict__[_BORROWED] = make(optimizer)
    borrowed.add(groups, after_step)
    return borrowed


class _Run:
    """Neighbouring parameters of one group that are stepped as one flat parameter.

    `parameter` is the elements `start` to `stop` of the main weights of the group on this rank. The
    state of each of the `mains` is views of `state`. `spread` is what `state` held when they last
    got their part of it, and `left` is what their own states held then. `wrote_weights` says
    whether the newest step has written the weights of the module as well.
    """

    def __init__(self, group: ParameterGroup, indices: list[int]) -> None:
        self.group = group
        self.indices = indices
        self.mains = [group.main_parameters[index] for index in indices]
        spans = [span for index in indices if (span := group.spans[index])[0] < span[1]]
        self.start, self.stop = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        self.parameter = nn.Parameter(group.main_weights.data[self.start : self.stop])
        self.state: dict[str, Any] = {}
        self.spread: tuple[Any, ...] = ()
        self.left: list[tuple[Any, ...]] = [()] * len(indices)
        self.wrote_weights = False
        self._main_grads = group.trained.main
        self._offset = group.main_weights.range[0] - self._main_grads.range[0]

    def show_gradient(self) -> None:
        # Sliced at every step: the memory of main grads may be given back in between.
        start, stop = self._offset + self.start, self._offset + self.stop
        self.parameter.grad = self._main_grads.data[start:stop].to(self.parameter.dtype)

    def is_current(self, states: Mapping[Any, Any]) -> bool:
        """Whether the main parameters' state is what the last step of this run has left."""
        for main, left in zip(self.mains, self.left, strict=True):
            state = states.get(main, _NO_STATE)
            if len(state) != len(left) or not all(map(operator.is_, state.values(), left)):
                return False
        return True


@dataclass(frozen=True)
class _Plan:
    """How the parameters of one of the optimizer's groups are stepped. See Note [Plans of runs].

    `key` are `id`s of the parameters that have gradients, in order. `runs` lie in groups of a
    wrapped module, and `others` are stepped as they are.
    """

    key: list[int]
    runs: list[_Run]
    others: list[nn.Parameter]

    def is_current(self, key: list[int], states: Mapping[Any, Any]) -> bool:
        """Whether a step over parameters with this key, and this state, is one over these runs."""
        return self.key == key and all(run.is_current(states) for run in self.runs)


class FlatStep(BorrowedGroups):
    """Makes an optimizer of `ELEMENTWISE` step over flat runs."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        optimizer.register_state_dict_pre_hook(unshare_counts)
        self._located: dict[int, tuple[ParameterGroup, int]] = {}
        self._plans: dict[int, _Plan] = {}  # by the index of the optimizer's group
        self._runs: list[_Run] = []  # of the step at hand
        self._flat: dict[tuple[ParameterGroup, str], torch.Tensor] = {}
        self._members: dict[tuple[ParameterGroup, str, int], torch.Tensor] = {}

    def add(self, groups: Iterable[ParameterGroup], after_step: Callable[[], None]) -> None:
        """Step over these groups as well, and call `after_step` after each step."""
        super().add(groups, after_step)
        self._located = locate_main_parameters(self._trained)
        self._plans.clear()

    def _lend(self, optimizer: Optimizer) -> None:
        if self.paused:
            unshare_counts(optimizer)
            return
        self._borrow(optimizer)
        for number, settings in enumerate(optimizer.param_groups):
            plan = self._plan(number, settings["params"], optimizer)
            self._runs += plan.runs
            for run in plan.runs:
                if run.group.dtypes.moments is not None and not run.state:
                    self._begin_state(run, run.group.dtypes.moments, settings)
            left = [
                run.parameter for run in plan.runs if not _step_at_once(run, optimizer, settings)
            ]
            settings["params"] = left + plan.others

    def _take_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        self._release(optimizer)
        runs, self._runs = self._runs, []
        plans, self._plans = self._plans, {}
        try:
            for run in runs:
                # State that a step which raised has begun to make is made anew: it may not be all
                # there, and to spread it takes memory that may have run out.
                if stepped or optimizer.state.get(run.mains[0]):
                    self._spread_state(run, optimizer)
        finally:
            for run in runs:
                optimizer.state.pop(run.parameter, None)
                run.parameter.grad = None
        wrote: dict[ParameterGroup, bool] = {}
        for run in runs:
            wrote[run.group] = wrote.get(run.group, stepped) and run.wrote_weights
        for group, everything in wrote.items():
            group.weights.written_through(everything)
        if stepped:
            self._plans = plans

    # -- runs ---------------------------------------------------------------------------------

    def _plan(self, number: int, parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> _Plan:
        """Cut the parameters that have gradients into runs; the last step's, if they still hold."""
        stepped = [parameter for parameter in parameters if parameter.grad is not None]
        key = list(map(id, stepped))
        plan = self._plans.get(number)
        if plan is None or not plan.is_current(key, optimizer.state):
            ours = [self._located[one] for one in key if one in self._located]
            others = [p for p in stepped if id(p) not in self._located]
            plan = self._plans[number] = _Plan(key, self._cut_runs(ours, optimizer), others)
        return plan

    def _cut_runs(
        self, members: Iterable[tuple[ParameterGroup, int]], optimizer: Optimizer
    ) -> list[_Run]:
        by_group: dict[ParameterGroup, list[int]] = {}
        for group, index in members:
            by_group.setdefault(group, []).append(index)
        runs = []
        for group, indices in by_group.items():
            # Neighbours in memory: a layout that cuts no tensor may have put them in another order.
            offsets = group.layout.offsets
            order = sorted(range(len(offsets)), key=offsets.__getitem__)
            before = dict(zip(order[1:], order, strict=False))
            pieces: list[list[int]] = []
            for index in (i for i in order if i in indices):
                last = pieces[-1][-1] if pieces else None
                if (
                    last is not None
                    and last == before.get(index)
                    and _same_history(group, last, index, optimizer)
                ):
                    pieces[-1].append(index)
                else:
                    pieces.append([index])
            runs += [_Run(group, piece) for piece in pieces]
        for run in runs:
            self._gather_state(run, optimizer)
        return runs

    # -- state --------------------------------------------------------------------------------

    def _gather_state(self, run: _Run, optimizer: Optimizer) -> None:
        """The run's state from its parameters': views of the flat state, brought up to date."""
        for name, value in optimizer.state.get(run.mains[0], _NO_STATE).items():
            if name in COUNTERS or not isinstance(value, torch.Tensor):
                # A copy: it is counted up in place, and parameters that this run leaves out may
                # hold the same tensor from a run that they were part of.
                run.state[name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            flat = self._flat_state(run.group, name, local_of(value).dtype)
            for index, main in zip(run.indices, run.mains, strict=True):
                held = optimizer.state[main][name]
                if held is self._members.get((run.group, name, index)):
                    continue
                start, stop = run.group.spans[index]
                local = local_of(held).reshape(-1)
                if local.numel() and local.data_ptr() != flat[start:stop].data_ptr():
                    flat[start:stop].copy_(local)  # loaded, or made before the first flat step
            run.state[name] = flat[run.start : run.stop]

    def _begin_state(self, run: _Run, dtype: torch.dtype, settings: Mapping[str, Any]) -> None:
        """Moments of a chosen dtype, for the first step: torch would make them in the weights'."""
        where = run.parameter.device if settings["fused"] else torch.device("cpu")
        run.state["step"] = torch.zeros((), dtype=torch.float32, device=where)
        for name in MOMENTS:
            flat = self._flat_state(run.group, name, dtype)
            run.state[name] = flat[run.start : run.stop].zero_()

    def _spread_state(self, run: _Run, optimizer: Optimizer) -> None:
        """Give every main parameter its part of the run's state, where it has not got that yet."""
        values = run.state.values()
        if len(values) == len(run.spread) and all(map(operator.is_, values, run.spread)):
            return
        # All memory first: a parameter must never be left with a part of its state.
        flats = {
            name: self._flat_state(run.group, name, value.dtype)
            for name, value in run.state.items()
            if name not in COUNTERS and isinstance(value, torch.Tensor)
        }
        for name, flat in flats.items():
            made, run.state[name] = run.state[name], flat[run.start : run.stop]
            if made.numel() and made.data_ptr() != run.state[name].data_ptr():
                run.state[name].copy_(made)
        run.spread, run.left = tuple(run.state.values()), []
        for index, main in zip(run.indices, run.mains, strict=True):
            state = optimizer.state[main]
            for name, value in run.state.items():
                is_flat = name in flats
                state[name] = self._member(run.group, name, index) if is_flat else value
            run.left.append(tuple(state.values()))

    def _member(self, group: ParameterGroup, name: str, index: int) -> torch.Tensor:
        """One parameter's part of flat state: the same object at every call."""
        key = (group, name, index)
        if key not in self._members:
            self._members[key] = group.view_like_main(self._flat[group, name], index)
        return self._members[key]

    def _flat_state(self, group: ParameterGroup, name: str, dtype: torch.dtype) -> torch.Tensor:
        key = (group, name)
        if key not in self._flat:
            dtype = group.dtypes.moments or dtype
            self._flat[key] = torch.zeros_like(group.main_weights.data, dtype=dtype)
        return self._flat[key]


def _step_at_once(run: _Run, optimizer: Optimizer, settings: dict[str, Any]) -> bool:
    """Step a run with a kernel, if one does it; otherwise leave it ready for the optimizer."""
    run.show_gradient()
    kernel, weights = KERNELS.get(run.parameter.device.type), None
    if kernel is not None and kernel.writes_weights:
        whole = run.group.weights.main_slice
        weights = None if whole is None else whole[run.start : run.stop]
    done = kernel is not None and kernel.step(
        optimizer, settings, run.parameter, run.state, weights
    )
    run.wrote_weights = done and weights is not None
    if not done and run.group.dtypes.moments is not None:
        raise RuntimeError(
            f"moments_dtype={run.group.dtypes.moments} is for Adam and AdamW with hyperparameters "
            "that are numbers, without amsgrad, capturable and differentiable: change the settings "
            f"of {type(optimizer).__name__}, or leave moments_dtype out"
        )
    if not done:
        optimizer.state[run.parameter] = run.state
    return done


def unshare_counts(optimizer: Optimizer) -> None:
    """Give each parameter counters of its own, which those of one run share.

    They are stepped one by one next, or somebody looks at the state, and a loader that writes in
    place (torch.distributed.checkpoint) would give all of a run what it reads last. The next step
    makes a new plan.
    """
    shared: set[int] = set()
    for state in optimizer.state.values():
        for name in COUNTERS & state.keys():
            if isinstance(state[name], torch.Tensor):
                if id(state[name]) in shared:
                    state[name] = state[name].clone()
                shared.add(id(state[name]))


def _same_history(group: ParameterGroup, first: int, second: int, optimizer: Optimizer) -> bool:
    """Whether two parameters were stepped equally often (their bias corrections agree)."""
    one, other = (optimizer.state.get(group.main_parameters[i], _NO_STATE) for i in (first, second))
    if one.keys() != other.keys():
        return False
    steps = one.get("step"), other.get("step")
    return steps[0] is steps[1] or bool(steps[0] == steps[1])
