"""What the optimizer and the user see of a group: main parameters, and what their `.grad` shows.

The engine keeps gradients in flat buffers. A user knows `.grad` alone: reads it, zeroes it, drops
it, puts a tensor of their own there. So before a backward, a step or a norm, what is held is
brought in line with `.grad` as the user left it (`ShownGradients.follow_user`).

Note [Hooks of users]
    torch calls a leaf's hooks with the gradient of one backward on one rank, before anything is
    summed. What a user wants to see, mask, or step with is the gradient that the optimizer reads.
    So the two dictionaries in which a tensor keeps its hooks are replaced by tables. Python code
    registers and removes hooks in a table as in any dictionary; torch's C code reads the memory of
    the dictionary itself, which stays empty, and calls nothing. The engine calls the hooks when the
    last reduction of their group is done, in the middle of the backward if it is done there. Both
    leaves of a parameter share them, and they are kept by the group: what they refer to (the model,
    its optimizers) never hangs on an autograd node that the engine holds. See docs/decisions/0412.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from lamina.buffers import FlatBuffer, ShardedTensor
from lamina.buffers.engine import SpanSpec
from lamina.collectives.engine import SpanGroups
from lamina.ddp.gradients.group_gradients import GroupGradients, Squares
from lamina.ddp.gradients.states import FINAL, GradientState
from lamina.ddp.group.weights import shares_storage
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.parameters import ParameterRef
from lamina.mesh.engine import copy_role


class MainParameters:
    """The parameters that an optimizer updates, and where they lie in the flat main weights.

    They are the compute parameters themselves where main weights are the whole model weights.
    """

    def __init__(
        self,
        refs: Sequence[ParameterRef],
        main: FlatBuffer,
        axes: DataParallelAxes,
        full: torch.Tensor,
        trained: bool,
    ) -> None:
        self.buffer = main
        self.spans = [(span.offset, span.offset + span.stop - span.start) for span in main.spans]
        """Elements (start, stop) of the flat main weights of each parameter; equal for none."""
        both = zip(main.cuts, (axes.outer, axes.inner), strict=True)
        cut = [axis for is_cut, axis in both if is_cut]
        self._specs: list[SpanSpec] = []  # where each lies in its whole; empty where none is cut
        if cut:
            reach = SpanGroups([axis.sibling("gather") for axis in cut])
            self._specs = [
                replace(main.as_sharded(index, reach).spec, beyond=axes.beyond(ref.role))
                for index, ref in enumerate(refs)
            ]
        self.parameters = [ref.parameter for ref in refs]
        if cut or not shares_storage(main.data, full):
            self.parameters = [
                self._make(ref, index, trained=trained) for index, ref in enumerate(refs)
            ]

    @property
    def are_cut(self) -> bool:
        """Whether each rank has a span of them only."""
        return bool(self._specs)

    def _make(self, ref: ParameterRef, index: int, *, trained: bool) -> nn.Parameter:
        parameter = nn.Parameter(self.view(self.buffer.data, index), requires_grad=trained)
        # Users' own marks, such as "no_decay", come along.
        parameter.__dict__.update(ref.parameter.__dict__)
        copy_role(ref.parameter, parameter)
        return parameter

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's elements of a flat tensor laid out like main weights.

        The view has the type of the main parameter: a `ShardedTensor` where main weights are cut.
        """
        start, stop = self.spans[index]
        if self._specs:
            return ShardedTensor.from_spec(flat[start:stop], self._specs[index])
        return flat[start:stop].view(self.buffer.layout.specs[index].shape)

    def views(self, other: FlatBuffer) -> list[torch.Tensor]:
        """`view` of all parameters, of a buffer that holds the same elements."""
        if self._specs:
            return list(other.sharded_at(self._specs))
        return [self.view(other.data, index) for index in range(len(self.spans))]

    def part_of(self, other: FlatBuffer) -> FlatBuffer:
        """The part of another buffer of the group that holds the same elements."""
        main = self.buffer
        if other.placement == main.placement:
            return other
        # Whole main grads over cut main weights: the optimizer of this rank reads a part of them.
        storage = other.piece(main.placement)
        return FlatBuffer(
            other.layout, main.placement, other.dtype, other.device, other.axes, storage=storage
        )


class UserHooks:
    """Hooks of the parameters of one group."""

    def __init__(self) -> None:
        self.on_gradient: dict[int, dict[int, Callable[[torch.Tensor], torch.Tensor | None]]] = {}
        """By parameter and by handle, those of `register_hook`."""
        self.on_parameter: dict[int, dict[int, Callable[[torch.Tensor], None]]] = {}
        """Those of `register_post_accumulate_grad_hook`."""

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return bool(self.on_gradient or self.on_parameter)

    def take(self, leaf: torch.Tensor, index: int) -> None:
        """Keep the hooks of a leaf of one parameter: those there are, and those to come."""
        for attribute, kind in (
            ("_backward_hooks", "on_gradient"),
            ("_post_accumulate_grad_hooks", "on_parameter"),
        ):
            table = _Table(self, kind, index)
            # Registered before the model was wrapped: they move, under the handles that users hold.
            for handle, hook in (getattr(leaf, attribute) or {}).items():
                table[handle] = hook
            setattr(leaf, attribute, table)

    @torch.no_grad()
    def call(
        self, refs: Sequence[ParameterRef], mains: Sequence[nn.Parameter], called: set[int]
    ) -> None:
        """Call the hooks of parameters that show a final gradient, unless they have been called.

        `refs` name the parameters of the group. `called` are those whose hooks were called in this
        step; those of now are added.
        """
        for index in sorted({*self.on_gradient, *self.on_parameter} - called):
            main = mains[index]
            if (shown := main.grad) is None:
                continue
            called.add(index)
            gradient = shown
            # A copy of the table: a hook may remove itself, as those that are called once do.
            for hook in list(self.on_gradient.get(index, {}).values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if gradient is not shown:
                # Into the flat memory, which is what the optimizer reads.
                shown.copy_(gradient)
            for after in list(self.on_parameter.get(index, {}).values()):
                try:
                    after(main)
                except KeyError as error:
                    key = error.args[0] if error.args else None
                    if key is not main and not (isinstance(key, int) and key == id(main)):
                        raise
                    raise RuntimeError(
                        f"a hook of {refs[index].name} looked the parameter up in a table that "
                        "does not hold it: hooks get the parameter that the optimizer updates, "
                        "which model.parameters() gives after wrapping. Make tables of parameters, "
                        "and optimizers that step in backward, after wrapping"
                    ) from error


class _Table(OrderedDict[int, Any]):
    """Where `register_hook` and its handles find a leaf's hooks (see the Note)."""

    def __init__(self, hooks: UserHooks, kind: str, index: int) -> None:
        super().__init__()
        self._hooks = weakref.ref(hooks)
        self._kind = kind
        self._index = index

    def _kept(self) -> dict[int, dict[int, Any]]:
        hooks = self._hooks()
        return {} if hooks is None else getattr(hooks, self._kind)

    def __setitem__(self, handle: int, hook: Any) -> None:
        self._kept().setdefault(self._index, {})[handle] = hook

    def __contains__(self, handle: object) -> bool:
        return handle in self._kept().get(self._index, ())

    def __delitem__(self, handle: int) -> None:
        kept = self._kept()
        del kept[self._index][handle]
        if not kept[self._index]:
            del kept[self._index]


class ShownGradients:
    """`.grad` of the parameters of one group.

    Of a frozen group nothing but `hide` is called.
    """

    def __init__(
        self, refs: Sequence[ParameterRef], mains: MainParameters, gradients: GroupGradients | None
    ) -> None:
        self._refs, self._mains = refs, mains
        self._gradients = cast(GroupGradients, gradients)
        self.hooks = UserHooks()
        self.has_optimizer = False
        """Whether somebody steps the main parameters, as far as this package knows."""
        self.untold = set(map(id, mains.parameters if gradients is not None else ()))
        """`id`s of those that somebody may write without telling of it."""
        self.mirrored = False
        """Whether compute parameters show final gradients too, now."""
        self._mirrors = False
        self._known: tuple[int, int] | None = None
        self._views: list[torch.Tensor] = []

    def expect_optimizer(self, telling: Iterable[int] = ()) -> None:
        """Somebody steps the main parameters, and tells of those with the `id`s `telling`."""
        self.has_optimizer = True
        self.untold.difference_update(telling)

    # -- what is shown ------------------------------------------------------------------------

    @property
    def views(self) -> list[torch.Tensor]:
        """Main grads of each parameter, typed like its main parameter.

        They are the same objects until the memory of main grads is released.
        """
        if not self._views:
            self._views = self._mains.views(self._mains.part_of(self._gradients.main))
        return self._views

    @property
    def any(self) -> bool:
        """Whether any main parameter has a `.grad`."""
        for main in self._mains.parameters:  # noqa: SIM110 - a generator is a call for each
            if main.grad is not None:
                return True
        return False

    def show(self, *, final: bool = True) -> None:
        """Set `.grad` of the main parameters: the gradient, or a placeholder until it is final.

        The placeholder is shown early so that a `zero_grad` between microbatches is noticed.
        """
        gradients = self._gradients
        shown: Sequence[bool] = gradients.produced_gradient
        if not final:
            # From here on a write tells: the placeholder holds what nobody else writes.
            gradients.clear_placeholders()
            shown = [not gradients.is_empty] * len(self._refs)
        self._show_where(shown)
        if self._mirrors:
            self.mirror(final and self.has_optimizer)

    def show_one(self, index: int) -> None:
        """Set `.grad` of one main parameter to its place in main grads."""
        self._mains.parameters[index].grad = self.views[index]

    def _show_where(self, shown: Sequence[bool]) -> None:
        """Set `.grad` of main parameters that have one to their place in main grads, else None."""
        if any(shown):
            mains = self._mains.parameters
            for main, view, has_gradient in zip(mains, self.views, shown, strict=True):
                main.grad = view if has_gradient else None
        else:
            for main in self._mains.parameters:
                main.grad = None

    def hide(self) -> None:
        """No parameter has a `.grad` any longer."""
        for main in self._mains.parameters:
            main.grad = None
        if self._mirrors:
            self.mirror(False)

    # -- compute parameters show them too, where modules always hold these --------------------

    def mirror_on_compute(self) -> None:
        """Show final gradients on compute parameters too, once somebody steps the main ones."""
        self._mirrors = True

    def mirror(self, shown: bool) -> None:
        """Whether compute parameters show now what main ones do, which is final."""
        self.mirrored = shown
        for ref, main in zip(self._refs, self._mains.parameters, strict=True):
            ref.parameter.grad = main.grad if shown else None

    def follow_mains(self) -> None:
        """What was dropped on main parameters is dropped on compute parameters."""
        if self.mirrored:
            for ref, main in zip(self._refs, self._mains.parameters, strict=True):
                if main.grad is None:
                    ref.parameter.grad = None

    # -- what users do to it ------------------------------------------------------------------

    def follow_user(self) -> None:
        """Bring what is held in line with `.grad` as the user left it.

        RuntimeError says that gradients that are kept apart until the last microbatch would have to
        be changed otherwise than all to zero; or that a backward raised that would have added to
        gradients held before it, and nobody has dropped both.
        """
        gradients, mains = self._gradients, self._mains.parameters
        if self.mirrored:  # who drops one on a compute parameter drops it here
            for ref, main, view in zip(self._refs, mains, self.views, strict=True):
                if main.grad is view and ref.parameter.grad is None:
                    main.grad = None
        # Nothing is shown: the user has dropped all of it, or nothing was held anyway.
        if not self.any:
            if not gradients.is_empty:
                gradients.discard()
            return
        if gradients.at_risk:
            raise RuntimeError(
                f"a backward raised half-way, and the gradient of {self._refs[0].name} held "
                "earlier microbatches: some of the raised one's may be among them. Call "
                "zero_grad_buffer() of the wrapped module and begin the step again (from its first "
                "microbatch)"
            )
        views = self.views
        if gradients.is_empty:
            if all(m.grad is None or m.grad is v for m, v in zip(mains, views, strict=True)):
                return  # nothing was put there since they were zeroed
            gradients.zero_if_empty()
        # Parameter by parameter: what was dropped is taken out, what was put there is taken over.
        for index, main in enumerate(mains):
            if main.grad is None:
                if gradients.is_kept_apart and gradients.state is GradientState.PARTIAL:
                    raise RuntimeError(_unfinished(self._refs[index].name))
                gradients.drop(index)
            elif main.grad is not views[index]:
                self._adopt(index, main.grad)
        if gradients.is_kept_apart and self.written_since:
            self._follow_zeroing()

    def _adopt(self, index: int, given: torch.Tensor) -> None:
        """The user put a tensor of their own in `.grad`: take its values."""
        gradients = self._gradients
        span, local = self._span(index), local_of(given)
        # The same memory under another object, as after `p.grad = p.grad.detach()`, is as it was.
        if local.data_ptr() == span.data_ptr() or not span.numel():
            return
        span.copy_(local.reshape(-1))
        if gradients.state in FINAL:
            gradients.mark_produced(
                [flag or i == index for i, flag in enumerate(gradients.produced_gradient)]
            )
            self.show_one(index)  # further changes reach what is stepped

    def _follow_zeroing(self) -> None:
        """Somebody has written to placeholders: drop the gradients if it was zeros, or refuse it.

        Note [Zeros that tell zeroing]
            Gradients that wait for a step's last microbatch may lie outside main grads. `.grad`
            then shows a placeholder, since a `zero_grad(set_to_none=False)` has to be noticed and a
            torch optimizer has no hook for it. The placeholder is filled with -0.0, which equals
            zero for whoever looks. A version counter tells that somebody has written. If every
            element is +0.0 then, the write was `zero_()`, and the gradients are dropped. Anything
            else (a factor, a clipped norm) would be lost, and is refused. See docs/decisions/0408.
        """
        for index, ref in enumerate(self._refs):
            span = self._span(index)
            if bool(span.ne(0).logical_or_(span.signbit()).any()):
                raise RuntimeError(_unfinished(ref.name))
        self.zero()

    def refuse_unsummed(self, what: str) -> None:
        """Refuse to read gradients that are not summed over ranks, or not all of them.

        `what` reads them. `follow_user` is called first, and raises as it does. RuntimeError says
        that one is waiting in `no_sync`, unless the user has made it zeros.
        """
        self.follow_user()
        if self._gradients.is_waiting and not self.holds_zeros:
            raise RuntimeError(
                f"{what} while the gradient of {self._refs[0].name} waits to be summed over ranks "
                "(its last backward was inside no_sync()): call finish_grad_sync() of the wrapped "
                "module first, or run the step's last backward outside no_sync()"
            )

    @property
    def holds_zeros(self) -> bool:
        """Whether the gradients that are held are zeros (the user's `zero_()`), summed or not."""
        gradients = self._gradients
        if gradients.is_kept_apart or not gradients.main.has_memory:
            return False
        return not any(bool(self._span(index).any()) for index in range(len(self._refs)))

    def zero(self) -> None:
        """Forget all gradients, and leave zeros where some were shown (not None)."""
        gradients = self._gradients
        # Noted first, because to discard is to show nothing: None and zeros are two things to Adam.
        shown = [main.grad is not None for main in self._mains.parameters]
        gradients.discard()
        if any(shown):
            gradients.main.data.zero_()
            gradients.mark_produced(shown)  # the optimizer steps them, as in one process
        self._show_where(shown)

    def release_zeroed(self) -> None:
        """Give main grads' memory back if nothing is shown of it."""
        gradients = self._gradients
        # What is shown is a view of that memory, and a user may hold it: then the memory stays.
        if gradients.main.has_memory and not self.any:
            gradients.discard()
            gradients.main.release()
            self._views = []

    def _span(self, index: int) -> torch.Tensor:
        """What `.grad` of a main parameter shows, flat."""
        start, stop = self._mains.spans[index]
        return self._mains.part_of(self._gradients.main).data[start:stop]

    # -- whether somebody has written to it ---------------------------------------------------

    def note(self) -> None:
        """The gradients are as the engine left them: `squares` holds until they change."""
        self._known = self._versions()

    def note_uncounted_write(self) -> None:
        """Somebody has written to the gradients where no version counter tells it."""
        self._known = (-1, -1)  # no count is negative

    @property
    def written_since(self) -> bool:
        """Whether anything has written to the gradients since `note` (see `squares`)."""
        return self._known != self._versions()

    @property
    def squares(self) -> Squares | None:
        """Sum of squares from the reduction; None once anything has written to the gradients.

        Writes are seen by version counters. `ShardedTensor`s count all of them; plain tensors do
        not count what `GradScaler.unscale_` does, so whole gradients are always measured anew.
        `.grad.data` has a counter of its own and hides writes.
        """
        return self._gradients.squares if self._mains.are_cut and not self.written_since else None

    def _versions(self) -> tuple[int, int]:
        # A ShardedTensor counts writes by itself, and its flat memory does not.
        count = 0
        for main in self._mains.parameters:  # a plain loop: this runs for each group of each step
            if (grad := main.grad) is not None:
                count += grad._version
        main_grads = self._gradients.main
        return main_grads.data._version if main_grads.has_memory else -1, count


def _unfinished(name: str) -> str:
    return (
        f"the gradient of {name} was changed between microbatches, and what it holds then is kept "
        "apart until the last one: only zeroing those of all its neighbours in the buffer can be "
        "followed. Zero with zero_grad() of the wrapped module or of one optimizer over all of "
        "them, scale with scale_gradients(), and unscale or clip after finish_grad_sync()"
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the span of a sharded one, or all of it."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
