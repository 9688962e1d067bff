"""An optimizer's step over flat runs of a shard instead of over parameters one by one.

Elementwise optimizers give the same bits whether they see a parameter or a run of neighbouring
parameters, so a step needs as many kernels as there are runs, not parameters. The optimizer
object stays the user's: for the time of a step its groups hold runs (`BorrowedGroups`), before and
after it they hold the parameters, with state per parameter that is a view of the same flat memory
(`FlatStep`). Where a kernel of ours does a step in fewer passes over memory, it steps the run in
place of the optimizer (`KERNELS`).

Note [Steps that raise]
torch calls a step's post-hooks only where the step returns. A step that raised (memory ran out
while it made its state, say) leaves the borrowed parameters in the groups. So whatever comes next
puts the user's parameters back first: another step, `state_dict`, `load_state_dict` or `zero_grad`.
The last of these has no hook, so the optimizer object gets a `zero_grad` of its own.

Note [Zeros that torch does not count]
Writes to gradients that wait for the step's last microbatch are noticed by version counters (see
Note [Zeros that tell zeroing]). On a GPU `zero_grad(set_to_none=False)` of a foreach or fused
optimizer calls `torch._foreach_zero_`, which changes no counter there. So the `zero_grad` that
the optimizer object was given tells the groups that their gradients were written to.

Note [Hooks of the user]
A user's pre-hook comes after ours, as it is registered later. It reads and changes the user's
parameters, and it may raise, after which nothing may have been stepped. So the groups are lent
within the step, when all pre-hooks are done: torch's optimizers call the closure first of all, and
are given one.

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

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.adam import adam

from lamina.ddp.backward.reducer import GradientReducer
from lamina.ddp.group.group import OptimizerAgreement, ParameterGroup
from lamina.ddp.group.shown import local_of
from lamina.ddp.optimizer.adopt_parameters import locate_main_parameters

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD".split())
)
"""Optimizers whose update of one element reads that element only (and the step count)."""

COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State of those optimizers that is one number per parameter, also where the parameter is one
number; all else is one per element."""

BLOCK = 1 << 18
"""Elements: 1 MiB of each of six tensors; temporaries below malloc's own threshold for `mmap`."""

MOMENTS = ("exp_avg", "exp_avg_sq")
_ZERO_GRAD = "zero_grad"
_NO_STATE: Mapping[str, Any] = {}


class BorrowedGroups(ABC):
    """Hooks of an optimizer that put other parameters into its groups while it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._for_state = False  # steps are made for their state alone, see `for_state_alone`
        self._agreement = OptimizerAgreement(optimizer)
        self.trained: list[ParameterGroup] = []
        """The groups that have gradients."""
        self._reducers: list[GradientReducer] = []
        self._after_step: list[Callable[[], None]] = []
        self._users: list[list[nn.Parameter]] = []  # parameters, while the groups hold others
        self._replace_zero_grad(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(self.restore)
        optimizer.register_load_state_dict_pre_hook(lambda own, _: self.restore(own))

    def add(
        self,
        groups: Sequence[ParameterGroup],
        after_step: Callable[[], None],
        reducer: GradientReducer | None = None,
    ) -> None:
        """Step over these groups as well, and call `after_step` after each step.

        The `reducer` of their gradients is finished before steps, if it is given.
        """
        self._after_step.append(after_step)
        if reducer is not None:
            self._reducers.append(reducer)
        for group in groups:
            group.look_for_writes()  # nobody was to tell of those before
            group.optimizers.append(self._agreement)
            if group.requires_grad:
                self.trained.append(group)
        self._prepare(groups)

    def _replace_zero_grad(self, optimizer: Optimizer) -> None:
        inner, reference = optimizer.__dict__.get(_ZERO_GRAD), weakref.ref(optimizer)

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            """Zero the user's gradients: a step that raised has left others in the groups."""
            if (own := reference()) is None:
                return
            self.restore(own)
            (inner or partial(type(own).zero_grad, own))(*args, **kwargs)
            if not kwargs.get("set_to_none", args[0] if args else True):
                for group in self.trained:  # see Note [Zeros that torch does not count]
                    group.shown.note_uncounted_write()

        # Libraries look for `set_to_none` there (Accelerate). A bound signature holds no optimizer.
        zero_grad.__signature__ = inspect.signature(optimizer.zero_grad)  # type: ignore[attr-defined]
        optimizer.__dict__[_ZERO_GRAD] = zero_grad

    @contextmanager
    def for_state_alone(self) -> Iterator[None]:
        """Steps within make state: gradients are read from `.grad`, and nobody is told of them."""
        self._for_state = True
        try:
            yield
        finally:
            self._for_state = False

    def restore(self, optimizer: Optimizer) -> None:
        """Put the user's parameters back after a step that raised; do nothing after any other."""
        if self._users:
            self._take_back(optimizer, stepped=False)

    def finish_gradients(self) -> None:
        """Sum gradients over ranks that no backward was told to be the last for (collective)."""
        for reducer in self._reducers:
            if not reducer.is_final:
                reducer.finish()

    @abstractmethod
    def _prepare(self, groups: Sequence[ParameterGroup]) -> None:
        """These groups were added."""

    @abstractmethod
    def _lend(
        self, number: int, settings: dict[str, Any], optimizer: Optimizer
    ) -> list[nn.Parameter]:
        """What one of the groups holds for a step in place of the user's; gradients are there."""

    @abstractmethod
    def _collect(self, optimizer: Optimizer, *, stepped: bool) -> None:
        """Take the state that the step has left (not all of it, if it raised)."""

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.restore(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and not all(reducer.is_final for reducer in self._reducers):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(closure) where no backward is the step's last "
                "(sync_model_each_microbatch=False, or inside no_sync()): the gradients that the "
                "closure computes would never be summed over ranks. Call "
                "model.set_model_auto_sync(True) first, or step() without a closure"
            )
        # This hook is older than any that reads or clips gradients.
        self.finish_gradients()
        if closure is None and not type(optimizer).__module__.startswith("torch.optim."):
            self._begin(optimizer)  # its step may take no closure
            return None

        def first() -> Any:
            """The step's closure: the user's, on the user's parameters, and then the loan."""
            # The closure computes the gradients, and may zero those there were: both concern the
            # user's parameters.
            self.restore(optimizer)
            loss = None if closure is None else closure()
            self._begin(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], first, *args[2:]), kwargs  # args[0] is the optimizer itself
        return args, {**kwargs, "closure": first}

    @torch.no_grad()
    def _begin(self, optimizer: Optimizer) -> None:
        if self._users:  # somebody has wrapped the class's step, and torch calls hooks for both
            return
        if not self._for_state:
            for group in self.trained:
                group.look_for_writes()
                group.shown.refuse_unsummed(f"{type(optimizer).__name__}.step()")
                if group.writes.addresses:
                    group.writes.refuse_assigned(group.refs)
        # The lists are copied: a user may hold the very list that a group was made with.
        self._users = [list(settings["params"]) for settings in optimizer.param_groups]
        for number, settings in enumerate(optimizer.param_groups):
            settings["params"] = self._lend(number, settings, optimizer)

    def _take_back(self, optimizer: Optimizer, *, stepped: bool) -> None:
        users, self._users = self._users, []
        for settings, parameters in zip(optimizer.param_groups, users, strict=False):
            settings["params"] = parameters
        self._collect(optimizer, stepped=stepped)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._take_back(optimizer, stepped=True)
        if not self._for_state:
            for group in self.trained:
                group.writes.forget()
            self._agreement.stepped()
            for tell in self._after_step:
                tell()


class _Run:
    """Neighbouring parameters of one group that are stepped as one flat parameter.

    `parameter` is the elements `start` to `stop` of the main weights of the group on this rank. The
    state of each of the `mains` is views of `state`. `wrote_weights` says whether the newest step
    has written the weights of the module as well.
    """

    def __init__(self, group: ParameterGroup, indices: list[int]) -> None:
        self.group = group
        self.indices = indices
        self.mains = [group.main_parameters[index] for index in indices]
        spans = [span for index in indices if (span := group.spans[index])[0] < span[1]]
        self.start, self.stop = (spans[0][0], spans[-1][1]) if spans else (0, 0)
        self.parameter = nn.Parameter(group.main_weights.data[self.start : self.stop])
        self.state: dict[str, Any] = {}
        # What `state` held when the mains last got their part, and what their own states held then.
        self._spread: tuple[Any, ...] = ()
        self._left: list[tuple[Any, ...]] = [()] * len(indices)
        self.wrote_weights = False
        self._main_grads = group.trained.main
        self._offset = group.main_weights.range[0] - self._main_grads.range[0]

    def is_current(self, states: Mapping[Any, Any]) -> bool:
        """Whether the main parameters' state is what the last step of this run has left."""
        for main, left in zip(self.mains, self._left, strict=True):
            state = states.get(main, _NO_STATE)
            if len(state) != len(left) or not all(map(is_, state.values(), left)):
                return False
        return True

    @property
    def is_spread(self) -> bool:
        """Whether the main parameters have got their parts of the state as it is."""
        values = self.state.values()
        return len(values) == len(self._spread) and all(map(is_, values, self._spread))

    def remember_spread(self, left: list[tuple[Any, ...]]) -> None:
        """They have got them: `left` is what each one's own state holds since then."""
        self._spread, self._left = tuple(self.state.values()), left

    def step(self, optimizer: Optimizer, settings: dict[str, Any]) -> bool:
        """Step it with a kernel, if one does it; otherwise leave it ready for the optimizer."""
        # Sliced at every step: the memory of main grads may be given back in between.
        start, stop = self._offset + self.start, self._offset + self.stop
        self.parameter.grad = self._main_grads.data[start:stop].to(self.parameter.dtype)
        kernel, weights = KERNELS.get(self.parameter.device.type), None
        if kernel is not None and kernel.writes_weights:
            whole = self.group.weights.main_slice
            weights = None if whole is None else whole[self.start : self.stop]
        done = kernel is not None and kernel.step(
            optimizer, settings, self.parameter, self.state, weights
        )
        self.wrote_weights = done and weights is not None
        if not done:
            if self.group.dtypes.moments is not None:
                raise RuntimeError(
                    f"moments_dtype={self.group.dtypes.moments} is for Adam and AdamW with "
                    "hyperparameters that are numbers, without amsgrad, capturable and "
                    f"differentiable: change the settings of {type(optimizer).__name__}, or leave "
                    "moments_dtype out"
                )
            optimizer.state[self.parameter] = self.state
        return done


class _Plan(NamedTuple):
    """How the parameters of one of the optimizer's groups are stepped. See Note [Plans of runs].

    `key` are `id`s of the parameters that have gradients, in order. `runs` lie in groups of a
    wrapped module, and `others` are stepped as they are.
    """

    key: list[int]
    runs: list[_Run]
    others: list[nn.Parameter]


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

    def _prepare(self, groups: Sequence[ParameterGroup]) -> None:
        self._located = locate_main_parameters(self.trained)
        self._plans.clear()

    def _lend(
        self, number: int, settings: dict[str, Any], optimizer: Optimizer
    ) -> list[nn.Parameter]:
        if self._for_state:
            unshare_counts(optimizer)
            return list(settings["params"])
        plan = self._plan(number, settings["params"], optimizer)
        self._runs += plan.runs
        # Before any step. Torch would make moments of each run, in the main weights' dtype, and
        # they would be copied: of a model that has just begun to train that is most of its memory.
        for run in plan.runs:
            if not run.state and _makes_two_moments(optimizer, settings):
                self._begin_state(run, settings)
        return [r.parameter for r in plan.runs if not r.step(optimizer, settings)] + plan.others

    def _collect(self, optimizer: Optimizer, *, stepped: bool) -> None:
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
        # A group's weights are written through if every run of it was stepped by such a kernel.
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
        plan, is_current = self._plans.get(number), methodcaller("is_current", optimizer.state)
        if plan is None or plan.key != key or not all(map(is_current, plan.runs)):
            ours = [self._located[i] for i in key if i in self._located]
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
                own = optimizer.state[main][name]
                if own is self._members.get((run.group, name, index)):
                    continue
                start, stop = run.group.spans[index]
                local = local_of(own).reshape(-1)
                if local.numel() and local.data_ptr() != flat[start:stop].data_ptr():
                    flat[start:stop].copy_(local)  # loaded, or made before the first flat step
            run.state[name] = flat[run.start : run.stop]

    def _begin_state(self, run: _Run, settings: Mapping[str, Any]) -> None:
        """State of Adam as torch makes it in a first step, with moments in the group's memory."""
        is_read_there = settings["fused"] or settings["capturable"]
        where = run.parameter.device if is_read_there else torch.device("cpu")
        wide = torch.get_default_dtype() == torch.float64 and not settings["fused"]
        counts = torch.float64 if wide else torch.float32
        run.state["step"] = torch.zeros((), dtype=counts, device=where)
        for name in MOMENTS:
            flat = self._flat_state(run.group, name, run.parameter.dtype)
            run.state[name] = flat[run.start : run.stop].zero_()

    def _spread_state(self, run: _Run, optimizer: Optimizer) -> None:
        """Give every main parameter its part of the run's state, where it has not got that yet."""
        if run.is_spread:
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
        left: list[tuple[Any, ...]] = []
        for index, main in zip(run.indices, run.mains, strict=True):
            state = optimizer.state[main]
            for name, value in run.state.items():
                is_flat = name in flats
                state[name] = self._member(run.group, name, index) if is_flat else value
            left.append(tuple(state.values()))
        run.remember_spread(left)

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


def unshare_counts(optimizer: Optimizer) -> None:
    """Give each parameter counters of its own, which those of one run share.

    They are stepped one by one next, or somebody looks at the state, and a loader that writes in
    place (torch.distributed.checkpoint) would give all of a run what it reads last. The next step
    makes a new plan.
    """
    shared: set[int] = set()
    # What belongs to no parameter may be of any type.
    states = (state for state in optimizer.state.values() if isinstance(state, dict))
    for state in states:
        for name in COUNTERS & state.keys():
            if isinstance(state[name], torch.Tensor):
                if id(state[name]) in shared:
                    state[name] = state[name].clone()
                shared.add(id(state[name]))


def _same_history(group: ParameterGroup, first: int, second: int, optimizer: Optimizer) -> bool:
    """Whether two parameters' counters agree: their bias corrections, and ASGD's rates.

    Of two that were stepped equally often, one may have been stepped before a rate was changed.
    """
    mains = group.main_parameters[first], group.main_parameters[second]
    left, right = (optimizer.state.get(main, _NO_STATE) for main in mains)
    if left.keys() != right.keys():
        return False
    pairs = ((left[name], right[name]) for name in COUNTERS & left.keys())
    return all(own is other or bool(own == other) for own, other in pairs)


# -- kernels that step a run at once. Each is a function of an optimizer, the settings of one of its
# groups, a run with its gradient, the run's state and the module's weights. It steps the run in
# place and returns True; or it leaves all as it was, and returns False, where the optimizer's own
# step would do something else.


def blocked_adam(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    run: nn.Parameter,
    state: Mapping[str, Any],
    weights: torch.Tensor | None = None,
) -> bool:
    """Adam and AdamW in blocks: unfused on a CPU, and wherever moments are kept in few bits.

    On a CPU the blocks stay in cache (decision 0406).
    Torch reads and writes whole tensors a dozen times and makes temporaries of their size, whose
    fresh pages cost as much as the arithmetic. Its own function over blocks gives the same bits in
    a third of the time, since the update of an element reads that element only. Moments of fewer
    bits (decision 0425) are widened for a block and rounded after it, so no whole ones exist.
    """
    if not _knows(optimizer, settings, state) or settings["differentiable"]:
        return False
    if settings["fused"] and not _is_narrow(run, state):
        return False
    beta1, beta2 = settings["betas"]
    size = BLOCK if run.device.type == "cpu" else BLOCK << 6
    counted = state["step"] + 1
    with torch.no_grad():
        for start in range(0, run.numel(), size):
            block = slice(start, start + size)
            kept = state["exp_avg"][block], state["exp_avg_sq"][block]
            wide = kept[0].to(run.dtype), kept[1].to(run.dtype)  # the same where the dtype is that
            counted = state["step"].clone()  # counted up by each call
            adam(
                [run.data[block]],
                [run.grad[block]],  # type: ignore[index]
                [wide[0]],
                [wide[1]],
                [],
                [counted],
                foreach=settings["foreach"],
                fused=settings["fused"],
                grad_scale=getattr(optimizer, "grad_scale", None),
                found_inf=getattr(optimizer, "found_inf", None),
                decoupled_weight_decay=settings["decoupled_weight_decay"],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
                eps=settings["eps"],
                maximize=settings["maximize"],
            )
            for moment, values in zip(kept, wide, strict=True):
                if moment is not values:
                    moment.copy_(values)
            if weights is not None:
                weights[block].copy_(run.data[block])
        state["step"].copy_(counted)
    return True


def one_pass_adam(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    run: nn.Parameter,
    state: Mapping[str, Any],
    weights: torch.Tensor | None,
) -> bool:
    """Fused Adam and AdamW on CUDA: one Triton kernel updates and casts, within 1e-6 of torch's.

    Main weights that share the module's weights have nothing to cast. Those are left to torch, as
    are gradients that a scaler left scaled. Moments of fewer bits are stepped in blocks.
    """
    if _is_narrow(run, state):
        return blocked_adam(optimizer, settings, run, state, weights)
    if (
        not _knows(optimizer, settings, state)
        or not settings["fused"]
        or weights is None
        or run.dtype != torch.float32
        or min(settings["betas"]) <= 0
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    ):
        return False
    try:
        from lamina.ddp.optimizer.adamw_cuda import fused_adamw
    except ImportError:  # without Triton, which CUDA builds of torch bring along
        return False
    state["step"].add_(1)
    fused_adamw(
        run.data,
        run.grad,  # type: ignore[arg-type]
        state["exp_avg"],
        state["exp_avg_sq"],
        weights,
        state["step"].to(run.device),
        lr=settings["lr"],
        betas=settings["betas"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        maximize=settings["maximize"],
        decoupled=settings["decoupled_weight_decay"],
    )
    return True


class RunKernel(NamedTuple):
    """What steps the runs on one type of device.

    One that `writes_weights` writes the weights of the module too, so that nobody copies them.
    """

    step: Callable[..., bool]
    writes_weights: bool


KERNELS: dict[str, RunKernel] = {
    "cpu": RunKernel(blocked_adam, writes_weights=False),
    "cuda": RunKernel(one_pass_adam, writes_weights=True),
}
"""By type of device."""


def _makes_two_moments(optimizer: Optimizer, settings: Mapping[str, Any]) -> bool:
    """Whether the state of each parameter will be a count and two moments."""
    return type(optimizer) in (Adam, AdamW) and not settings["amsgrad"]


def _knows(optimizer: Optimizer, settings: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether this is Adam or AdamW in a step that kernels can do.

    Those with amsgrad, tensors as hyperparameters and captured ones are torch's.
    """
    return (
        _makes_two_moments(optimizer, settings)
        and state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        and isinstance(settings["lr"], float)
        and isinstance(settings["betas"][0], float)
        and isinstance(settings["betas"][1], float)
        and not settings["capturable"]
    )


def _is_narrow(run: nn.Parameter, state: Mapping[str, Any]) -> bool:
    """Whether moments are kept in another dtype than the one that steps are made in."""
    return getattr(state.get("exp_avg"), "dtype", run.dtype) != run.dtype
