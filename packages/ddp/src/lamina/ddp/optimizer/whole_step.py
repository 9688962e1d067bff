"""How an optimizer steps over groups: over whole tensors, if it looks at several elements at once.

Where the layout may cut no tensor, each lies whole on one rank. That rank steps a plain parameter
over it; the others have nothing to do. State stays under the main parameter, on the owner.

Note [Whole by chance]
A tensor also lies whole on one rank where no boundary happens to cut it. If an optimizer got plain
parameters there, a norm over all its parameters would be the norm of those on this rank. Over
`ShardedTensor`s such a norm is that of all ranks, and what needs a tensor whole is refused. So
tensors are lent plain only if somebody has said that the optimizer looks at one tensor at a time:
torch's classes in `_WHOLE` do, and so does `keep_tensors_whole`, whose layout cuts no tensor.

The same holds for the parts into which tp has cut a parameter. A rank may have a part whole, as a
plain parameter of its module, and a norm of that part is not the parameter's. So it is lent as a
`ShardedTensor`, whose reductions go over tp.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lamina.buffers import ShardedTensor
from lamina.buffers.engine import PlainAxis, SpanSpec
from lamina.collectives.engine import SpanGroups
from lamina.ddp.finalize.finalize import warn_of_unfinished_steps
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.optimizer.adopt_parameters import adopt_main_parameters, require_same_optimizer
from lamina.ddp.optimizer.flat_step import ELEMENTWISE, BorrowedGroups, FlatStep
from lamina.ddp.optimizer.muon import ELEMENTWISE_STATE, MATRIX_OPTIMIZERS, MatrixStep

_BORROWED = "_lamina_borrowed_groups"
_WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
"""Torch's optimizers whose update of an element reads others of its tensor, and their heirs."""


def needs_whole_tensors(optimizer: Optimizer | None) -> frozenset[int]:
    """`id`s of the parameters that an optimizer has to see whole."""
    if not isinstance(optimizer, _WHOLE) or type(optimizer) in MATRIX_OPTIMIZERS:
        return frozenset()
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def refuse_cut_tensors(optimizer: Optimizer, groups: Iterable[ParameterGroup], remedy: str) -> None:
    """Raise ValueError if an optimizer looks at whole tensors that ranks have cut.

    One of an unknown class does if the layout keeps tensors whole for it.
    """
    wanted, known = needs_whole_tensors(optimizer), type(optimizer) in ELEMENTWISE_STATE
    for group in () if known else groups:
        for index, (ref, main) in enumerate(zip(group.refs, group.main_parameters, strict=True)):
            looks = wanted & {id(main), id(ref.parameter)}
            if (looks or _is_kept(group, index)) and group.axes.beyond(ref.role):
                raise ValueError(
                    f"{type(optimizer).__name__} looks at whole tensors, and {ref.name} is cut "
                    f"over tensor-parallel ranks ({group.axes.at}): give it an optimizer that "
                    "works element by element, and no keep_tensors_whole"
                )
            if not looks or not isinstance(main, ShardedTensor):
                continue
            # From the layout, and not from this rank's piece: all ranks must agree.
            extents = group.main_weights.as_sharded(index).extents()
            if all(stop - start < main.numel() for start, stop in extents):
                raise ValueError(
                    f"{type(optimizer).__name__} looks at whole tensors, and {ref.name} is cut "
                    f"over data-parallel ranks ({group.axes.describe()}): {remedy}"
                )


def adopt_optimizer(
    what: str,
    optimizer: Optimizer,
    groups: Sequence[ParameterGroup],
    module: nn.Module,
    remedy: str,
) -> BorrowedGroups:
    """Let an optimizer update groups of a module: it gets their main parameters (collective).

    The optimizer object, its groups and their hyperparameters stay. From then on elementwise
    optimizers step over flat runs (`FlatStep`), Muon over whole matrices on their owners
    (`MatrixStep`). Others step over whole tensors where these are
    whole on one rank, and else over parameters as they are (`WholeStep`). The caller tells the
    result, with `add`, which groups are stepped, and what comes before and after a step. An
    optimizer of several modules has one for all of them.

    `what` the optimizer is given to, and the `remedy` where ranks have cut tensors that it looks at
    as a whole, are for messages. DisagreementError: ranks differ in its class, groups or
    hyperparameters. ValueError: it holds none of the parameters, keeps a list of its own, looks at
    tensors that are cut, or is to keep moments in a dtype of their own and is not Adam or AdamW.
    """
    # All refusals first: an optimizer that is refused is the user's, as it was.
    require_same_optimizer(what, optimizer, groups)
    refuse_cut_tensors(optimizer, groups, remedy)
    for group in groups:
        if group.dtypes.moments is not None and type(optimizer) not in (Adam, AdamW):
            raise ValueError(
                f"moments_dtype={group.dtypes.moments} is for torch.optim.Adam and AdamW, and "
                f"{group.refs[0].name} has {type(optimizer).__name__}: leave it out"
            )
    adopt_main_parameters(optimizer, groups)
    warn_of_unfinished_steps(optimizer, module)
    borrowed: BorrowedGroups | None = optimizer.__dict__.get(_BORROWED)
    if borrowed is None:
        make: type[BorrowedGroups] = WholeStep
        if type(optimizer) in ELEMENTWISE_STATE:
            make = FlatStep if type(optimizer) in ELEMENTWISE else MatrixStep
        borrowed = optimizer.__dict__[_BORROWED] = make(optimizer)
    return borrowed


def _is_kept(group: ParameterGroup, index: int) -> bool:
    """Whether the layout was asked to cut this tensor nowhere (`keep_tensors_whole`).

    Blocks that are as large as their tensor (`block_rows`) are there for another reason.
    """
    return group.layout.specs[index].granularity.kind == "tensor"


class WholeStep(BorrowedGroups):
    """Gives an optimizer plain parameters for the time of a step, where it looks at whole tensors.

    All others are left as `ShardedTensor`s, which do what is right on a span, sum over all ranks,
    and refuse the rest. See Note [Whole by chance].
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._looks_at_whole_tensors = isinstance(optimizer, _WHOLE)
        self._lent: dict[int, _Loan] = {}

    def _prepare(self, groups: Sequence[ParameterGroup]) -> None:
        for group in groups:
            alone = group.layout.num_shards == 1  # what is summed on this rank is the whole sum
            members = zip(group.refs, group.main_parameters, strict=True)
            for index, (ref, main) in enumerate(members):
                beyond = group.axes.beyond(ref.role)
                whole = alone or self._looks_at_whole_tensors or _is_kept(group, index)
                if beyond is not None and not isinstance(main, ShardedTensor):
                    self._lent[id(main)] = _Piece(main, ref.name, group.axes.apart, beyond)
                elif beyond is None and whole and isinstance(main, ShardedTensor):
                    self._lent[id(main)] = _Whole(main)

    def _lend(
        self, number: int, settings: dict[str, Any], optimizer: Optimizer
    ) -> list[nn.Parameter]:
        chosen: list[nn.Parameter] = []
        for main in settings["params"]:
            loan = self._lent.get(id(main))
            chosen += [main] if loan is None else loan.lend(optimizer)
        return chosen

    def _collect(self, optimizer: Optimizer, *, stepped: bool) -> None:
        for main in [p for settings in optimizer.param_groups for p in settings["params"]]:
            if (loan := self._lent.get(id(main))) is not None:
                loan.take_back(optimizer)


class _Loan(ABC):
    """A parameter that stands for a main parameter while the optimizer steps, if this rank has any
    of it.
    """

    def __init__(self, main: nn.Parameter, lent: torch.Tensor | None) -> None:
        self._main = main
        self._parameter: nn.Parameter | None = None
        if lent is not None:
            # Frozen ones may hold integers, which torch lets no parameter train.
            self._parameter = nn.Parameter(lent, main.requires_grad)

    @abstractmethod
    def _shown(self, value: torch.Tensor) -> torch.Tensor:
        """A gradient, or state of the parameter's shape, as the optimizer is to see it."""

    def _kept(self, value: torch.Tensor) -> torch.Tensor:
        """State that a step has left, as the main parameter keeps it."""
        return value

    def lend(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameter to step, with the gradient and the state of the main one; or none."""
        main, lent = self._main, self._parameter
        if lent is None:
            return []
        gradient = main.grad
        lent.grad = None
        if isinstance(main, _Decoupled):
            show_decoupled([lent])
        if gradient is not None:
            if gradient.dtype != lent.dtype:
                lent.grad_dtype = gradient.dtype  # torch takes no other dtype in `.grad`
            lent.grad = self._shown(gradient)
        if main in optimizer.state:
            optimizer.state[lent] = _changed(optimizer.state.pop(main), self._shown)
        return [lent]

    def take_back(self, optimizer: Optimizer) -> None:
        """Put the state under the main parameter."""
        lent = self._parameter
        if lent is not None:
            lent.grad = None
            if lent in optimizer.state:
                optimizer.state[self._main] = _changed(optimizer.state.pop(lent), self._kept)


class _Whole(_Loan):
    """A tensor that lies whole on one rank: a plain parameter there, and none on the others."""

    def __init__(self, main: ShardedTensor) -> None:
        local = main.to_local()
        whole = local.view(main.shape) if local.numel() == main.numel() else None
        super().__init__(cast(nn.Parameter, main), whole)

    def _shown(self, value: torch.Tensor) -> torch.Tensor:
        # A load into an optimizer that had no state has left `ShardedTensor`s.
        local = value.to_local() if isinstance(value, ShardedTensor) else value
        return local.view(value.shape) if local.numel() == value.numel() else value


class _Piece(_Loan):
    """A part into which tp has cut a parameter, and which this rank has whole.

    Reductions go over the ranks with the other parts, `beyond`. `apart` are the axes that have cut
    the model.
    """

    def __init__(
        self, main: nn.Parameter, name: str, apart: tuple[str, ...], beyond: SpanGroups
    ) -> None:
        axis = PlainAxis("whole", 1, 0, apart)
        self._spec = SpanSpec(main.shape, 0, main.numel(), (axis,), None, None, name, beyond)
        super().__init__(main, ShardedTensor.from_spec(main.detach().view(-1), self._spec))

    def _shown(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape != self._spec.shape or isinstance(value, ShardedTensor):
            return value
        return ShardedTensor.from_spec(value.reshape(-1), self._spec)

    def _kept(self, value: torch.Tensor) -> torch.Tensor:
        return value.to_local().view(value.shape) if isinstance(value, ShardedTensor) else value


def _changed(
    state: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """A parameter's state, with its tensors changed in place of the dictionary's."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = change(value)
    return state


class _Decoupled:
    """Mixin of parameters that have a `decoupled_grad`."""

    grad: torch.Tensor | None

    @property
    def decoupled_grad(self) -> torch.Tensor | None:
        """The gradient, for optimizers that read it here (`use_decoupled_grad`)."""
        return self.grad

    @decoupled_grad.setter
    def decoupled_grad(self, value: torch.Tensor | None) -> None:
        self.grad = value


def show_decoupled(parameters: Iterable[torch.Tensor]) -> None:
    """Let parameters have a `decoupled_grad` beside `.grad`."""
    for parameter in parameters:
        if not isinstance(parameter, _Decoupled):
            parameter.__class__ = _decoupled(type(parameter))


@functools.cache
def _decoupled(cls: Any) -> Any:
    return type(cls)(f"Decoupled{cls.__name__}", (_Decoupled, cls), {})
