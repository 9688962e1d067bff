"""A group of parameters: one layout, and the three states (weights, main weights, main grads)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.buffers import BufferLayout, FlatBuffer, Granularity, Replicate
from lamina.buffers.engine import Placement, ScratchBuffers
from lamina.collectives.engine import Agreement, broadcast, describe, open_window
from lamina.ddp.gradients.group_gradients import GroupGradients
from lamina.ddp.gradients.reduction import ORDERED, GradientReduction
from lamina.ddp.group.shown import MainParameters, ShownGradients
from lamina.ddp.group.weights import IN_USE, Weights, WholeWeights, Writes
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.dtypes import GroupDtypes
from lamina.ddp.parameters.facts import optimizer_facts
from lamina.ddp.parameters.parameters import ParameterRef, read_parameters, spec_of
from lamina.ddp.parameters.strategy import Cadence, Strategy

WeightsFactory = Callable[[FlatBuffer, DataParallelAxes], Weights]
"""Makes the weights of a group from the buffer that a rank keeps, and the axes."""


_PLAIN = (float, int, bool, str, type(None))


@dataclass(frozen=True)
class GroupSettings:
    """What the groups of one model have in common.

    Attributes:
        strategy: placements and cadence.
        alignment: start of every tensor, in elements.
        granularity: what a shard boundary may not cut, unless a parameter's role says.
        scale: factor of gradients after the outermost sum; None for sums (per-token loss).
        broadcast: start from the first data-parallel rank's values, as torch's DDP does, so that
            ranks seeded differently do not train a mixture.
        shard_multiple: shard sizes are a multiple of this many elements (2^16 for NCCL's best bus
            bandwidth).
        reduction: how gradients are summed over ranks; see `resolve_reduction`.
        device: where whole weights and gradients are computed with; None is the parameters' own.
        kept_on: where what a rank keeps lies (its weights, main weights, main grads, and so the
            optimizer's state); None is `device`. Host memory needs weights and a reduction that
            bring it to the device and back.
        pinned: whether that is page-locked memory.
        casts_in_gathers: where main weights are cut as the model weights are, a rank keeps the main
            weights alone, and each gather casts them. See Note [Gathers cast main weights] in
            `lamina.fsdp.weights.sharded`.
        release_gradients: give the memory of zeroed main grads back until the next reduction, as
            autograd does with `.grad`; otherwise it is kept, which saves the page faults of new
            memory on a CPU.
        exact_norm: add the squares of gradients as integers. See Note [Squares by exponents] in
            `lamina.ddp.norm.exact_squares`.
    """

    strategy: Strategy
    alignment: int = 128
    granularity: Granularity | None = None
    scale: float | None = None
    broadcast: bool = True
    shard_multiple: int = 1
    reduction: GradientReduction = ORDERED
    device: torch.device | None = None
    kept_on: torch.device | None = None
    pinned: bool = False
    casts_in_gathers: bool = False
    release_gradients: bool = False
    exact_norm: bool = False

    @property
    def cadence(self) -> Cadence:
        """The strategy's, unless the reduction needs one of its own."""
        return self.reduction.cadence or self.strategy.cadence


def plan_layout(
    refs: Sequence[ParameterRef], axes: DataParallelAxes, settings: GroupSettings
) -> BufferLayout:
    """Where each parameter of a group will lie; refs may be on the meta device."""
    return BufferLayout.plan(
        [spec_of(ref, settings.granularity) for ref in refs],
        axes.size,
        settings.alignment,
        settings.shard_multiple,
    )


class OptimizerAgreement:
    """What ranks' optimizers must have in common in a step: hyperparameters, and steps so far.

    Note [Described when it changes]
        Ranks compare this at the end of each step's last backward, and in each norm's message. To
        describe and hash all hyperparameters so often would take longer than the message. So they
        are described when their stamp has changed, which is the numbers themselves. The number of
        steps changes at each step, and is added to the digest that there is.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._title = f"steps of {type(optimizer).__name__}"
        self._stamp: list[object] = []
        self._settings = Agreement(())
        self._steps = 0

    def stepped(self) -> None:
        """A step was made."""
        self._steps += 1

    def now(self) -> Agreement | None:
        """As it is at this moment; None where the optimizer is gone."""
        if (optimizer := self._optimizer()) is None:
            return None
        stamp: list[object] = []
        for settings in optimizer.param_groups:
            stamp.append(len(settings["params"]))
            for name, value in settings.items():
                if name != "params":
                    # What may be written in place is described, as its identity says nothing.
                    stamp.append((name, value if type(value) in _PLAIN else describe(value)))
        if stamp != self._stamp:
            self._stamp, self._settings = stamp, Agreement(optimizer_facts(optimizer, {}))
        return self._settings.with_facts((self._title, str(self._steps)))


class ParameterGroup:
    """Parameters that share a buffer, from what the user made to what the optimizer updates.

    The user's `nn.Parameter` objects stay and become views of the whole weights ("compute
    parameters"). `main_parameters` are what the optimizer updates: the same objects where main
    weights are the whole model weights, else new parameters over this rank's span.

    `refs` are materialised, on one device, in order of registration. `factory` makes the weights
    (whole, or gathered by units). Three objects hold what changes: `weights` where the whole
    weights are, `gradients` what was accumulated and summed, `shown` what `.grad` shows of it.
    """

    @torch.inference_mode(False)  # what is made under that mode could not be trained
    def __init__(
        self,
        refs: Sequence[ParameterRef],
        axes: DataParallelAxes,
        dtypes: GroupDtypes,
        settings: GroupSettings,
        scratch: ScratchBuffers,
        factory: WeightsFactory = WholeWeights,
    ) -> None:
        self.refs = list(refs)
        self.axes = axes.ranks_inside()
        self.dtypes = dtypes
        self.settings = settings
        self.layout = plan_layout(self.refs, axes, settings)
        self.optimizers: list[OptimizerAgreement] = []
        """What the optimizers of the main parameters must have in common on all ranks."""
        states = _States(self.layout, axes, dtypes, settings, self.refs)
        # All ranks start from equal values, in the main dtype, and each cuts its part out of them.
        whole = states.read(self.refs)
        local = states.buffer(states.weights_at, states.kept_dtype, whole)
        main = states.main_of(local, whole) if states.trained else local
        # What the parameters were made in goes before their place in the weights comes: a model
        # that starts on the meta device must never need two whole units at once.
        del whole
        for parameter in self.compute_parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        # The weights know where the whole is; the optimizer will write to `main`.
        self.weights = factory(local, self.axes)
        if states.trained:
            self.weights.attach(main)
        self.gradients: GroupGradients | None = None
        if states.trained:
            grads = states.buffer(states.grads_at, dtypes.grads, lazy=settings.release_gradients)
            self.gradients = GroupGradients(
                self.layout,
                settings.reduction.make(grads, self.axes, settings.scale, scratch),
                dtypes,
                settings.cadence,
                all_stepped=grads.placement == main.placement,
            )
        states.open_windows()
        self._point_parameters_at_weights()
        self.weights.belongs_to(self.refs)
        mains = MainParameters(self.refs, main, self.axes, self.weights.full, states.trained)
        self.mains = mains
        self.main_weights, self.main_parameters, self.spans = main, mains.parameters, mains.spans
        self.mains_are_separate = mains.parameters[0] is not self.refs[0].parameter
        """Whether main parameters are other objects than the module's parameters in forward."""
        computes, is_whole = self.compute_parameters, isinstance(self.weights, WholeWeights)
        fixed = [computes] if is_whole and states.trained else []
        if states.trained and self.mains_are_separate and not mains.are_cut:
            fixed.append(mains.parameters)
        uncut = is_whole and not any(main.cuts)
        self.writes = Writes(mains.parameters, computes, whole=uncut, fixed=fixed)
        self.shown = ShownGradients(self.refs, mains, self.gradients)
        if states.trained and dtypes.grads != dtypes.main:
            for parameter in self.main_parameters:
                parameter.grad_dtype = dtypes.grads  # torch takes no other dtype in `.grad`

    @property
    def requires_grad(self) -> bool:
        """Whether the parameters wanted gradients when the group was made."""
        return self.gradients is not None

    @property
    def wants_gradients(self) -> bool:
        """Whether any of the parameters wants a gradient at present: they may have been frozen."""
        return self.requires_grad and any(main.requires_grad for main in self.main_parameters)

    @property
    def device(self) -> torch.device:
        """Where whole weights and gradients are computed with."""
        return self.weights.full.device

    @property
    def compute_parameters(self) -> list[nn.Parameter]:
        """The user's parameters: views of the whole weights."""
        return [ref.parameter for ref in self.refs]

    @property
    def trained(self) -> GroupGradients:
        """The gradients of a group that has some.

        ValueError: it is frozen.
        """
        if self.gradients is None:
            raise ValueError(
                f"{self.refs[0].name} and the {len(self.refs) - 1} others of its group are frozen: "
                "they have no gradients"
            )
        return self.gradients

    @property
    def ranks_of_spans(self) -> int:
        """How many ranks main weights are cut over."""
        both = zip(self.main_weights.cuts, (self.axes.outer, self.axes.inner), strict=True)
        return math.prod(axis.size for cut, axis in both if cut)

    def view_like_main(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's elements of a flat tensor laid out like `main_weights`.

        The view has the type of the main parameter: a `ShardedTensor` where main weights are cut.
        """
        return self.mains.view(flat, index)

    @property
    def gradients_to_step(self) -> FlatBuffer:
        """Main grads of the elements that main weights hold: what the optimizer reads.

        Where main grads are whole and main weights cut, every rank has reduced gradients that
        other ranks' optimizers read. Users see and write their own rank's only, so norms and
        inspection read these. Raises ValueError if the group is frozen.
        """
        return self.mains.part_of(self.trained.main)

    def rename(self, names: Sequence[str]) -> None:
        """Give the parameters the names that they have in another module around them."""
        pairs = zip(self.refs, names, strict=True)
        self.refs[:] = [replace(ref, name=name) for ref, name in pairs]
        self.weights.belongs_to(self.refs)

    # -- what modules hold --------------------------------------------------------------------

    def install_compute_parameters(self) -> None:
        """Make the module hold the compute parameters (before its forward).

        They take over `requires_grad` from main parameters. Raises like `refuse_changed`.
        """
        # Modules may hold them already, as of a unit that stays whole between two forwards.
        if self.weights.state not in IN_USE:
            for ref, main in zip(self.refs, self.main_parameters, strict=True):
                if (parameter := ref.parameter) is main:
                    break  # modules always hold these
                if parameter.requires_grad is not main.requires_grad:
                    parameter.requires_grad_(main.requires_grad)
                # Not setattr: nn.Module's checks cost more than the swap, at every forward.
                for owner, attribute in ref.owners:
                    if (module := owner()) is not None:
                        module._parameters[attribute] = parameter
            if self.mains_are_separate:
                self.writes.begin_use()
            self.weights.begin_use()
        refuse_changed(self)

    def install_main_parameters(self) -> None:
        """Make the module hold what the optimizer updates (at rest).

        It takes over what the module has written to compute parameters in place (a codebook, a norm
        that is enforced), for their storage goes. All ranks write the same, as in any replica.
        """
        if self.mains_are_separate:
            used = self.weights.state in IN_USE
            # Their values are in storage that goes: main weights take them over first.
            if used and self.writes.end_use():
                self._adopt_compute_parameters()
            for ref, main in zip(self.refs, self.main_parameters, strict=True):
                if used and ref.parameter.requires_grad is not main.requires_grad:
                    main.requires_grad_(ref.parameter.requires_grad)  # changed in the module
                for owner, attribute in ref.owners:
                    if (module := owner()) is not None:
                        module._parameters[attribute] = main
        self.weights.end_use()

    @torch.no_grad()
    def _adopt_compute_parameters(self) -> None:
        if not self.weights.ready:
            raise RuntimeError(
                f"{self.refs[0].name} or a neighbour was written in place while its weights were "
                "on their way or given back: write inside the forward of its module, or write to "
                "the parameter that model.parameters() gives between steps"
            )
        # Only where they are no longer the main weight, rounded: the others keep their precision.
        main = self.main_weights.data
        model = self.weights.full[slice(*self.main_weights.range)].to(main.device)
        main.copy_(torch.where(main.to(model.dtype) == model, main, model.to(main.dtype)))
        self.weights.mark_changed()

    # -- what was written since ---------------------------------------------------------------

    def begin_forward(self) -> bool:
        """A forward of the model begins: follow what was done to main parameters since the last.

        Whether something was written that has to be installed.
        """
        # What the user has dropped since the last step must not be seen by this one's backward.
        if self.shown.mirrored:
            self.shown.follow_mains()
        written = self.follow_main_weights()
        # Between steps gradients take no memory. `zero_grad` itself tells nobody, so it goes here.
        self.release_zeroed_gradients()
        return written

    def release_zeroed_gradients(self) -> None:
        """Give main grads' memory back if the user has zeroed them (before a step's forward)."""
        if self.settings.release_gradients and self.gradients is not None:
            self.shown.release_zeroed()

    def follow_main_weights(self) -> bool:
        """Before whole weights are used: whether something was written that has to be installed.

        Optimizers that step over flat memory tell of it, and are not counted.
        """
        self.look_for_writes()
        news = self.writes.news
        if not news:
            return False
        # Only now is the write followed: until somebody computes, it may be overwritten or undone.
        self.writes.clear_news()
        if self.mains_are_separate:
            self.weights.mark_changed(written=[self.refs[index].name for index in sorted(news)])
        return self.mains_are_separate

    def look_for_writes(self) -> None:
        """Note what somebody has written to parameters since the last look."""
        self.writes.look(has_optimizer=bool(self.optimizers))

    def call_user_hooks(self, called: set[int]) -> None:
        """Call users' hooks with final gradients. What they write is a step, and is not compared.

        A rank without a gradient calls them later in the backward than others.
        """
        # What was written before the hooks is compared; what the hooks write is a step.
        self.look_for_writes()
        self.shown.hooks.call(self.refs, self.main_parameters, called)
        self.writes.look(has_optimizer=False, compared=False)

    def discard_gradients(self) -> None:
        """Forget all gradients, reduced or not."""
        if self.gradients is not None:
            self.gradients.discard()
        self.shown.hide()

    def _point_parameters_at_weights(self) -> None:
        """Make the user's parameters views of the whole weights, wherever those will be.

        Modules hold them for now, until somebody puts the group to rest (a wrapper may never do).
        """
        # Views are made while the storage is there: torch makes none beyond what a storage holds.
        self.weights.start()
        self.weights.wait()
        self.weights.begin_use()
        for parameter, view in zip(
            self.compute_parameters, self.layout.views(self.weights.full), strict=True
        ):
            parameter.grad = None
            parameter.data = view
        self.weights.release()


def step_agreement(groups: Iterable[ParameterGroup]) -> Agreement:
    """Steps and hyperparameters of the optimizers that update some groups."""
    optimizers = dict.fromkeys(each for group in groups for each in group.optimizers)
    known = [agreement for each in optimizers if (agreement := each.now()) is not None]
    return known[0] if len(known) == 1 else Agreement.of_several(known)


class StepFacts:
    """What ranks must have in common between two backwards."""

    def __init__(self) -> None:
        self._versions: int | None = None

    def of(self, groups: Sequence[ParameterGroup]) -> Agreement:
        """`step_agreement`, and of optimizers Lamina does not know, whether they have stepped."""
        unknown = [group for group in groups if group.requires_grad and not group.optimizers]
        before, self._versions = self._versions, sum(group.writes.count for group in unknown)
        agreement = step_agreement(groups)
        if unknown and before is not None:
            stepped = "made" if self._versions != before else "not made"
            fact = "the step of an optimizer that Lamina does not know", stepped
            agreement = agreement.with_facts(fact)
        return agreement


class _States:
    """Where the three states of a group lie, and the buffers for them."""

    def __init__(
        self,
        layout: BufferLayout,
        axes: DataParallelAxes,
        dtypes: GroupDtypes,
        settings: GroupSettings,
        refs: Sequence[ParameterRef],
    ) -> None:
        self._layout, self._dtypes, self._settings = layout, dtypes, settings
        self._axes = axes.ranks_inside()
        self.trained = refs[0].parameter.requires_grad
        self._device = settings.device or refs[0].parameter.device
        if settings.reduction.name == "checked" and self._device.type == "cuda":
            raise ValueError(
                f"reduction='checked' on {self._device}: the host looks at each checksum, and "
                "would wait for the device; use reduction='ordered', or train on a CPU"
            )
        placed = []
        states = settings.strategy.placements
        for outer, inner in (states.model_weights, states.main_grads, states.optimizer_state):
            # Where only the outer axis has ranks, it became the inner one, with its placement.
            only_outer = axes is not self._axes
            pair = (Replicate(), outer) if only_outer else (outer, inner)
            placed.append(self._axes.effective(pair))  # axes of one rank are replicated
        self.weights_at, self.grads_at, self.optimizer_at = placed

    def read(self, refs: Sequence[ParameterRef]) -> torch.Tensor:
        """All parameters as one flat tensor in the main dtype, equal on all ranks."""
        whole = read_parameters(refs, self._layout, self._dtypes.main, self._device)
        if self._settings.broadcast:
            for group in self._axes.groups("gather"):
                broadcast(whole, group, src=0).wait()
        return whole

    @property
    def kept_dtype(self) -> torch.dtype:
        """What a rank keeps its model weights in."""
        main_is_all = self.weights_at == self.optimizer_at and self.trained
        is_cut = any(placement.cuts for placement in self.weights_at)
        casts = self._settings.casts_in_gathers and main_is_all and is_cut
        return self._dtypes.main if casts else self._dtypes.weights

    def main_of(self, local: FlatBuffer, whole: torch.Tensor) -> FlatBuffer:
        """Main weights: part of the model weights' storage where the dtypes agree."""
        if self._dtypes.main != local.dtype:
            return self.buffer(self.optimizer_at, self._dtypes.main, whole)
        storage = local.piece(self.optimizer_at)
        return self.buffer(self.optimizer_at, self._dtypes.main, storage=storage)

    def buffer(
        self,
        placements: tuple[Placement, ...],
        dtype: torch.dtype,
        whole: torch.Tensor | None = None,
        storage: torch.Tensor | None = None,
        lazy: bool = False,
    ) -> FlatBuffer:
        """A buffer in given storage, or filled from its part of `whole`."""
        axes = (self._axes.outer, self._axes.inner)
        device = self._settings.kept_on or self._device
        buffer = FlatBuffer(
            self._layout, placements, dtype, device, axes, storage=storage, lazy=lazy
        )
        # `pin_memory` returns a copy, and the buffer is made again around that one.
        if storage is None and self._settings.pinned:
            locked = buffer.data.pin_memory()
            buffer = FlatBuffer(self._layout, placements, dtype, device, axes, storage=locked)
        if whole is not None:
            start, stop = buffer.range
            buffer.data.copy_(whole[start:stop])
        return buffer

    def open_windows(self) -> None:
        """Let GPUs of one host read each other's memory: all ranks make their groups in one order.

        A collective could not do it, because two ranks may begin those of two groups in any order.
        """
        if self._device.type == "cuda":
            cut = any(placement.cuts for placement in (*self.weights_at, *self.optimizer_at))
            wanted = {"gather": cut, "reduce": self.trained}
            for purpose in (name for name, used in wanted.items() if used):
                for group in self._axes.groups(purpose):
                    open_window(group, self._device)


def refuse_changed(group: ParameterGroup) -> None:
    """Raise if somebody has converted, moved or unfrozen a group's parameters since it was made.

    RuntimeError: after `.half()` or `.to()`, which took them out of their buffers. ValueError: the
    group has no gradients, and a parameter wants some by now.
    """
    ref, main, buffer = group.refs[0], group.main_parameters[0], group.main_weights.data
    # The first parameter stands for all: `.half()` and `.to()` change a whole module, and this is
    # asked in every step.
    for parameter, dtype, device in (
        (ref.parameter, group.dtypes.weights, group.weights.full.device),
        (main, buffer.dtype, buffer.device),
    ):
        if parameter.dtype != dtype or parameter.device != device:
            raise RuntimeError(
                f"{ref.name} is {parameter.dtype} on {parameter.device}, and was {dtype} on "
                f"{device} in its buffer, which nobody would update now: convert or move a model "
                "before it is wrapped or sharded"
            )
    for ref in group.refs if group.gradients is None else ():
        if ref.parameter.requires_grad:
            raise ValueError(
                f"{ref.name} was frozen when the model was wrapped and requires_grad now: it "
                "has no gradient buffer, so no rank would sum its gradient. Wrap the model "
                "with requires_grad=True and freeze parameters afterwards"
            )
