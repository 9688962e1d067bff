"""When the weights of whole-weight buckets come back after a step, and who waits for which.

All ranks begin the gathers in one order, the order of registration, whatever modules each of them
runs: a gather that is needed begins those before it too.

A parameter is waited for by the module that owns it. But a module may read the weights of a child
that it never calls (torch's `MultiheadAttention` reads `out_proj`), so those of modules that nobody
has called in training yet are waited for by the nearest module around them that was called.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lamina.collectives import RegistrationError, register_pool
from lamina.collectives.engine import RegisteredPool, broadcast, registration_problem
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.axes import DataParallelAxes

__all__ = ["ParamGathers", "adopt_model_weights", "registered_pool", "registration_refusal"]

_AHEAD = 4
"""Buckets whose weights are on their way while one is waited for: one alone would leave the wire
idle from its arrival to the next bucket's use. They are gathered in place, so more cost nothing."""


class ParamGathers:
    """The gathers of one wrapped module.

    `groups` are in order of first use. With `aligned` all gathers begin when the forward begins.
    With `hooks` weights are waited for where they are used; otherwise `finish` is called before.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[ParameterGroup], *, aligned: bool, hooks: bool
    ) -> None:
        self._groups = tuple(groups)
        self._begun = len(self._groups)  # groups before this place have been begun
        self._aligned = aligned
        self._hooked = hooks
        self._learning = False
        numbers = {inner: number for number, inner in enumerate(module.modules())}
        self._called = [False] * len(numbers)
        self._parents: list[list[int]] = [[] for _ in numbers]
        self._own: list[list[int]] = [[] for _ in numbers]
        self._waits: list[list[int]] | None = None
        for inner, number in numbers.items():
            for child in inner.children():
                self._parents[numbers[child]].append(number)
        for place, group in enumerate(self._groups):
            for owner, _ in (one for ref in group.refs for one in ref.owners):
                if (found := owner()) is not None and place not in self._own[numbers[found]]:
                    self._own[numbers[found]].append(place)
        self._handles: set[int] = set()
        for inner, number in numbers.items() if hooks else ():
            if any(True for _ in inner.parameters()):
                hook = _before_forward(weakref.ref(self), number)
                self._handles.add(inner.register_forward_pre_hook(hook, prepend=True).id)

    def leave(self, module: nn.Module) -> None:
        """Take the hooks, which were copied with it, out of a copy of the wrapped module."""
        for inner in module.modules():
            for handle in self._handles & inner._forward_pre_hooks.keys():
                del inner._forward_pre_hooks[handle]

    def changed(self) -> None:
        """Main weights were written: whole weights have to come back (on all ranks)."""
        if 0 < self._begun < len(self._groups):
            self._begin(len(self._groups))  # peers may have begun all of the last ones
        for group in self._groups:
            group.weights.mark_changed()
        self._begun = 0

    def begin(self, *, overlapped: bool) -> None:
        """The forward begins: bring the first weights on their way, or all of them in.

        `overlapped` says that this is a forward as those that were learnt from. Others (in
        evaluation the encoder layers of torch read all weights and call nobody) wait here.
        """
        self._learning = overlapped and self._hooked
        if not self._learning:
            self.finish()
            return
        self._begin(len(self._groups) if self._aligned else _AHEAD)

    def begin_all(self) -> None:
        """Bring all weights on their way."""
        self._begin(len(self._groups))

    def finish(self) -> None:
        """Wait until all weights are there (collective, if they are not)."""
        self.begin_all()
        for group in self._groups:
            group.weights.wait()

    def before_module(self, number: int) -> None:
        """A module is about to run."""
        if self._learning and not self._called[number]:
            self._called[number] = True
            self._waits = None
        if self._waits is None:
            self._waits = self._who_waits()
        for place in self._waits[number]:
            weights = self._groups[place].weights
            if not weights.ready:
                self._begin(place + _AHEAD)
                weights.wait()

    def _begin(self, stop: int) -> None:
        while self._begun < min(stop, len(self._groups)):
            self._groups[self._begun].weights.start()
            self._begun += 1

    def _who_waits(self) -> list[list[int]]:
        """For every module, the places of the groups it waits for."""
        waits: list[list[int]] = [[] for _ in self._own]
        for owner, places in enumerate(self._own):
            around = [owner]
            while around and places:
                one = around.pop()
                if self._called[one] or not self._parents[one]:
                    waits[one] += [place for place in places if place not in waits[one]]
                else:
                    around += self._parents[one]
        return [sorted(places) for places in waits]


def _before_forward(gathers: weakref.ref[ParamGathers], number: int) -> Callable[..., None]:
    """A pre-forward hook. Its reference is weak: groups hold the module's parameters."""

    def hook(*_: Any) -> None:
        if (found := gathers()) is not None:
            found.before_module(number)

    disabled: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def adopt_model_weights(group: ParameterGroup, indices: Iterable[int] | None = None) -> None:
    """Main weights take what the (whole) model weights hold: somebody wrote those.

    Args:
        group: the group; nothing has to be done where its main weights are part of the model's.
        indices: the parameters that were written; None means every element that no longer is its
            main weight, rounded, and on all ranks the first one's main weights (collective over
            axes along which they are whole).
    """
    if not group.requires_grad or group.dtypes.main == group.dtypes.weights:
        return
    main = group.main_weights.data
    model = group.weights.local.piece(group.main_weights.placement)
    if indices is not None:
        for start, stop in (group.spans[index] for index in indices):
            main[start:stop].copy_(model[start:stop])
        return
    main.copy_(torch.where(main.to(model.dtype) == model, main, model.to(main.dtype)))
    axes = (group.axes.outer, group.axes.inner)
    for cut, axis in zip(group.main_weights.cuts, axes, strict=True):
        if not cut:
            broadcast(main, axis.sibling("gather"), src=0).wait()


def registered_pool(
    axes: tuple[DataParallelAxes | None, ...], device: torch.device
) -> RegisteredPool:
    """A pool that the communicators of all data-parallel axes may use in place.

    RegistrationError says why hardware, build or backend lack it.
    """
    found = [
        group
        for kind in axes
        if kind is not None
        for purpose in ("gather", "reduce")
        for group in kind.groups(purpose)
    ]
    refusal = registration_refusal(found, device)
    if refusal is not None:
        raise RegistrationError(refusal)
    return register_pool(list({id(one): one for one in found if one is not None}.values()), device)


def registration_refusal(
    groups: Iterable[ProcessGroup | None], device: torch.device, *, symmetric: bool = True
) -> str | None:
    """Why `nccl_ub` cannot be had, for an error; None if it can.

    `groups` are to use it; None is an axis of one rank. `symmetric` is for symmetric windows.
    """
    where = device if device.type == "cuda" else None
    several: list[ProcessGroup | None] = [one for one in groups if one is not None]
    for group in several or [None]:
        problem = registration_problem(group, where, symmetric=symmetric)
        if problem is None and device.type != "cuda":
            problem = f"the model is on {device}, and NCCL registers only CUDA memory"
        if problem is not None:
            return f"nccl_ub=True: {problem}; leave it out here"
    return None
