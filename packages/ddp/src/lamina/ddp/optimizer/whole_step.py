"""How an optimizer steps over groups: over whole tensors, if it looks at several elements at once.

Where the layout may cut no tensor, each lies whole on one rank. That rank steps a plain parameter
over it; the others have nothing to do. State stays under the main parameter, on the owner.

Note [Whole by chance]
A tensor also lies whole on one rank where no boundary happens to cut it. If an optimizer got plain
parameters there, a norm over all its parameters would be the norm of those on this rank. Over
`ShardedTensor`s such a norm is that of all ranks, and what needs a tensor whole is refused. So
tensors are lent plain only if somebody has said that the optimizer looks at one tensor at a time:
torch's classes in `_WHOLE` do, and so does whoever asks for a layout that cuts no tensor.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lamina.buffers import ShardedTensor
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
    """Raise ValueError if an optimizer looks at whole tensors that data-parallel ranks have cut."""
    wanted = needs_whole_tensors(optimizer)
    for group in groups if wanted else ():
        for index, (ref, main) in enumerate(zip(group.refs, group.main_parameters, strict=True)):
            if not wanted & {id(main), id(ref.parameter)} or not isinstance(main, ShardedTensor):
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


class WholeStep(BorrowedGroups):
    """Gives an optimizer plain parameters for the time of a step, where it looks at whole tensors.

    All others are left as `ShardedTensor`s, which do what is right on a span, sum over all ranks,
    and refuse the rest. See Note [Whole by chance].
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._looks_at_whole_tensors = isinstance(optimizer, _WHOLE)
        self._plain: dict[int, nn.Parameter | None] = {}

    def _prepare(self, groups: Sequence[ParameterGroup]) -> None:
        for group in groups:
            self._prepare_group(group)

    def _prepare_group(self, group: ParameterGroup) -> None:
        alone = group.layout.num_shards == 1  # what is summed on this rank is the whole sum
        for spec, main in zip(group.layout.specs, group.main_parameters, strict=True):
            lent = alone or spec.stays_whole or self._looks_at_whole_tensors
            if lent and isinstance(main, ShardedTensor):
                local = main.to_local()
                if local.numel() == main.numel():
                    # Frozen ones may hold integers, which torch lets no parameter train.
                    trains = main.requires_grad
                    self._plain[id(main)] = nn.Parameter(local.view(main.shape), trains)
                elif local.numel() == 0:
                    self._plain[id(main)] = None

    def _lend(
        self, number: int, settings: dict[str, Any], optimizer: Optimizer
    ) -> list[nn.Parameter]:
        chosen = (self._plain_of(main, optimizer) for main in settings["params"])
        return [parameter for parameter in chosen if parameter is not None]

    def _plain_of(self, main: nn.Parameter, optimizer: Optimizer) -> nn.Parameter | None:
        plain = self._plain.get(id(main), main)
        if plain is None or plain is main:
            return plain
        gradient = main.grad
        plain.grad = None
        if isinstance(main, _Decoupled):
            show_decoupled([plain])
        if isinstance(gradient, ShardedTensor):
            if gradient.dtype != plain.dtype:
                plain.grad_dtype = gradient.dtype  # torch takes no other dtype in `.grad`
            plain.grad = gradient.to_local().view(main.shape)
        if main in optimizer.state:
            optimizer.state[plain] = _plain_state(optimizer.state.pop(main))
        return plain

    def _collect(self, optimizer: Optimizer, *, stepped: bool) -> None:
        for main in [p for settings in optimizer.param_groups for p in settings["params"]]:
            plain = self._plain.get(id(main))
            if plain is not None:
                plain.grad = None
                if plain in optimizer.state:
                    optimizer.state[main] = optimizer.state.pop(plain)


def _plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """State without `ShardedTensor`s, which a load into an optimizer that had none has left."""
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            local = value.to_local()
            if local.numel() == value.numel():
                state[name] = local.view(value.shape)
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
