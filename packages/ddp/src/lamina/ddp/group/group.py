"""A group of parameters: one layout, and the three states (weights, main weights, main grads)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lamina.buffers import BufferLayout, FlatBuffer, Granularity, Replicate, ShardedTensor
from lamina.buffers.engine import Placement, SpanSpec
from lamina.collectives.engine import SpanGroups, broadcast, open_window
from lamina.ddp.gradients.group_gradients import GroupGradients
from lamina.ddp.gradients.reduction import ORDERED, Reduction
from lamina.ddp.gradients.scratch import ScratchBuffers
from lamina.ddp.gradients.sums import Squares
from lamina.ddp.group.user_hooks import UserHooks
from lamina.ddp.group.weights import Weights, WholeWeights, Writes, shares_storage
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.dtypes import GroupDtypes
from lamina.ddp.parameters.facts import OptimizerAgreement
from lamina.ddp.parameters.parameters import ParameterRef, read_parameters, spec_of
from lamina.ddp.parameters.strategy import Cadence, Strategy
from lamina.mesh.engine import copy_role

__all__ = [
    "GroupSettings",
    "ParameterGroup",
    "plan_layout",
    "refuse_changed",
]

_ADDRESS = torch.Tensor.data_ptr

WeightsFactory = Callable[[FlatBuffer, DataParallelAxes], Weights]
"""Makes the weights of a group from the buffer that a rank keeps, and the axes."""


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
    """

    strategy: Strategy
    alignment: int = 128
    granularity: Granularity | None = None
    scale: float | None = None
    broadcast: bool = True
    shard_multiple: int = 1
    reduction: Reduction = ORDERED
    device: torch.device | None = None
    kept_on: torch.device | None = None
    pinned: bool = False
    casts_in_gathers: bool = False
    release_gradients: bool = False

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


class ParameterGroup:
    """Parameters that share a buffer, from what the user made to what the optimizer updates.

    The user's `nn.Parameter` objects stay and become views of the whole weights ("compute
    parameters"). `main_parameters` are what the optimizer updates: the same objects where main
    weights are the whole model weights, else new parameters over this rank's span.

    `refs` are materialised, on `device`, in order of registration. `factory` makes the weights
    (whole, or gathered by units).
    """

    def __init__(
        self,
        refs: Sequence[ParameterRef],
        axes: DataParallelAxes,
        dtypes: GroupDtypes,
        settings: GroupSettings,
        scratch: ScratchBuffers,
        factory: WeightsFactory = WholeWeights,
    ) -> None:
        self.refs = tuple(refs)
        self.compute_parameters = [ref.parameter for ref in self.refs]
        """The user's parameters: views of the whole weights."""
        self.axes = axes.ranks_inside()
        self.dtypes = dtypes
        self.settings = settings
        self.requires_grad = self.refs[0].parameter.requires_grad
        self.given_dtype = self.refs[0].parameter.dtype
        """Of the parameters as the user made them."""
        self.has_optimizer = False
        """Whether somebody steps the main parameters, as far as this package knows."""
        self.optimizers: list[OptimizerAgreement] = []
        """What the optimizers of the main parameters must have in common on all ranks."""
        self.shows_on_compute = False
        """Whether compute parameters show final gradients too: of modules that always hold them."""
        self._mirrored = False
        self.user_hooks = UserHooks()
        self._reduced: tuple[int, int] | None = None
        self._gradient_views: list[torch.Tensor] = []
        self.device = settings.device or self.refs[0].parameter.device
        if settings.reduction.name == "checked" and self.device.type == "cuda":
            raise ValueError(
                f"reduction='checked' on {self.device}: the host looks at each checksum, and would "
                "wait for the device; use reduction='ordered', or train on a CPU"
            )
        self.layout = plan_layout(self.refs, axes, settings)
        states = settings.strategy.placements
        self._weights_at = self._placed(states.model_weights, axes)
        self._grads_at = self._placed(states.main_grads, axes)
        self._optimizer_at = self._placed(states.optimizer_state, axes)
        whole = self._read_parameters()
        local = self._buffer(self._weights_at, self._kept_dtype, whole)
        main = self._make_main(local, whole) if self.requires_grad else None
        # What the parameters were made in goes before their place in the weights comes: a model
        # that starts on the meta device must never need two whole units at once.
        del whole
        self._let_go_of_parameters()
        self.weights = factory(local, self.axes)
        if main is not None:
            self.weights.attach(main)
        self.main_weights = local if main is None else main
        """What main parameters are spans of; of a frozen group the model weights."""
        self.spans = [
            (span.offset, span.offset + span.stop - span.start) for span in self.main_weights.spans
        ]
        """Elements (start, stop) of `main_weights.data` of each parameter; equal for none."""
        self._span_specs = self._make_span_specs()
        self._steps_all_gradients = self._grads_at == self.main_weights.placement
        self.gradients = self._make_gradients(scratch) if self.requires_grad else None
        self._open_windows()
        self._point_parameters_at_weights()
        self.weights.belongs_to(self.refs)
        self.main_parameters = self._make_main_parameters()
        self.mains_are_separate = self.main_parameters[0] is not self.refs[0].parameter
        """Whether main parameters are other objects than the module's parameters in forward."""
        uncut = not any(self.main_weights.cuts) and isinstance(self.weights, WholeWeights)
        self.writes = Writes(self.main_parameters, self.compute_parameters, uncut)
        self.known_addresses = self._note_addresses() if self.requires_grad else []
        """Whole parameters that stay where they are, and their addresses."""
        if self.requires_grad and self.dtypes.grads != self.dtypes.main:
            for parameter in self.main_parameters:
                parameter.grad_dtype = self.dtypes.grads  # torch takes no other dtype in `.grad`

    @property
    def ranks_of_spans(self) -> int:
        """How many ranks main weights are cut over."""
        both = zip(self.main_weights.cuts, (self.axes.outer, self.axes.inner), strict=True)
        return math.prod(axis.size for cut, axis in both if cut)

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

    def rename(self, names: Sequence[str]) -> None:
        """Give the parameters the names that they have in another module around them."""
        pairs = zip(self.refs, names, strict=True)
        self.refs = tuple(replace(ref, name=name) for ref, name in pairs)
        self.weights.belongs_to(self.refs)

    def install_compute_parameters(self) -> None:
        """Make the module hold the compute parameters (before its forward).

        They take over `requires_grad` from main parameters. Raises like `refuse_changed`.
        """
        if self.mains_are_separate and not self.writes.in_use:
            for ref, main in zip(self.refs, self.main_parameters, strict=True):
                if ref.parameter.requires_grad is not main.requires_grad:
                    ref.parameter.requires_grad_(main.requires_grad)
                ref.install(ref.parameter)
            self.writes.begin_use()
        refuse_changed(self)

    def install_main_parameters(self) -> None:
        """Make the module hold what the optimizer updates (at rest).

        It takes over what the module has written to compute parameters in place (a codebook, a norm
        that is enforced), for their storage goes. All ranks write the same, as in any replica.
        """
        if self.mains_are_separate:
            used = self.writes.in_use
            if used and self.writes.end_use():
                self._adopt_compute_parameters()
            for ref, main in zip(self.refs, self.main_parameters, strict=True):
                if used and ref.parameter.requires_grad is not main.requires_grad:
                    main.requires_grad_(ref.parameter.requires_grad)  # changed in the module
                ref.install(main)

    @torch.no_grad()
    def _adopt_compute_parameters(self) -> None:
        if not self.weights.ready:
            raise RuntimeError(
                f"{self.refs[0].name} or a neighbour was written in place while its weights were "
                "on their way or given back: write inside the forward of its module, or write to "
                "the parameter that model.parameters() gives between steps"
            )
        main = self.main_weights.data
        model = self.weights.full[slice(*self.main_weights.range)].to(main.device)
        main.copy_(torch.where(main.to(model.dtype) == model, main, model.to(main.dtype)))
        self.weights.mark_changed()

    @property
    def mains_written(self) -> list[str]:
        """Main parameters that are apart, and that somebody has written since this was asked last.

        Optimizers that step over flat memory tell of it, and are not counted.
        """
        self.look_for_writes()
        news = self.writes.news()
        return [self.refs[index].name for index in news] if self.mains_are_separate else []

    @property
    def main_version(self) -> int:
        """How often main parameters were written, as far as their version counters tell."""
        return self.writes.count

    def look_for_writes(self) -> None:
        """Note what somebody has written to parameters since the last look."""
        self.writes.look(told=bool(self.optimizers))

    @property
    def has_user_hooks(self) -> bool:
        """Whether users have hooks on parameters of the group."""
        return bool(self.user_hooks.on_gradient or self.user_hooks.on_parameter)

    def call_user_hooks(self, called: set[int]) -> None:
        """Call users' hooks with final gradients. What they write is a step, and is not compared.

        A rank without a gradient calls them later in the backward than others.
        """
        self.look_for_writes()
        self.user_hooks.call(self.refs, self.main_parameters, called)
        self.writes.look(told=False, compared=False)

    def refuse_assigned(self) -> None:
        """Raise if a tensor was assigned to `.data` of a whole parameter, before memory is read.

        Note [Assigned data]: `p.data = x` takes a parameter out of its buffer. Modules and
        optimizers that hold `p` go on with `x`, as in plain PyTorch. A flat step, a gather, and
        whoever reads the buffer would not know of it, and no version counter tells. The address
        does. To copy `x` into the buffer would overwrite what `p.data` was before, which users keep
        to assign it again.
        """
        for parameters, addresses in self.known_addresses:
            now = [*map(_ADDRESS, parameters)]
            if now != addresses:
                pairs = zip(self.refs, now, addresses, strict=True)
                name = next(ref.name for ref, here, was in pairs if here != was)
                raise RuntimeError(
                    f"{name} was taken out of its buffer by assigning .data of the parameter: "
                    "write into it (`with torch.no_grad(): parameter.copy_(value)`), and keep "
                    "copies of values (parameter.detach().clone()) to bring them back"
                )

    # -- what the optimizer works on ----------------------------------------------------------

    def view_like_main(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's elements of a flat tensor laid out like `main_weights`.

        The view has the type of the main parameter: a `ShardedTensor` where main weights are cut.
        """
        start, stop = self.spans[index]
        if self._span_specs:
            return ShardedTensor.from_spec(flat[start:stop], self._span_specs[index])
        return flat[start:stop].view(self.layout.specs[index].shape)

    @property
    def gradients_to_step(self) -> FlatBuffer:
        """Main grads of the elements that main weights hold: what the optimizer reads.

        Where main grads are whole and main weights cut, every rank has reduced gradients that
        other ranks' optimizers read. Users see and write their own rank's only, so norms and
        inspection read these. Raises ValueError if the group is frozen.
        """
        main = self.trained.main
        if self._steps_all_gradients:
            return main
        placement = self.main_weights.placement
        storage = main.piece(placement)
        return FlatBuffer(
            self.layout, placement, main.dtype, main.device, main.axes, storage=storage
        )

    @property
    def gradient_views(self) -> list[torch.Tensor]:
        """Main grads of each parameter, typed like its main parameter.

        They are the same objects until the memory of main grads is released.
        """
        if not self._gradient_views:
            flat, count = self.gradients_to_step.data, len(self.refs)
            self._gradient_views = [self.view_like_main(flat, index) for index in range(count)]
        return self._gradient_views

    def discard_gradients(self) -> None:
        """Forget all gradients, reduced or not."""
        if self.gradients is not None:
            self.gradients.discard()
        for main in self.main_parameters:
            main.grad = None
        self._mirror(shown=False)

    def _mirror(self, *, shown: bool) -> None:
        if self.shows_on_compute:
            self._mirrored = shown
            for ref, main in zip(self.refs, self.main_parameters, strict=True):
                ref.parameter.grad = main.grad if shown else None

    def follow_compute_grads(self) -> None:
        """Where compute parameters show gradients too: who drops one there drops it here."""
        if self._mirrored:
            pairs = zip(self.refs, self.main_parameters, self.gradient_views, strict=True)
            for ref, main, view in pairs:
                if main.grad is view and ref.parameter.grad is None:
                    main.grad = None

    def follow_main_grads(self) -> None:
        """Where compute parameters show gradients too: what was dropped here is dropped there."""
        if self._mirrored:
            for ref, main in zip(self.refs, self.main_parameters, strict=True):
                if main.grad is None:
                    ref.parameter.grad = None

    def begin_forward(self) -> None:
        """A forward of the model begins: follow what was done to main parameters since the last."""
        if self._mirrored:
            self.follow_main_grads()
        if self.known_addresses and self.mains_are_separate:
            self.refuse_assigned()
        self.follow_main_weights()
        self.release_zeroed_gradients()

    def follow_main_weights(self) -> bool:
        """Before whole weights are used: whether something was written that has to be installed."""
        if written := self.mains_written:
            self.weights.mark_changed(written=written)
        return bool(written)

    def release_zeroed_gradients(self) -> None:
        """Give main grads' memory back if the user has zeroed them (before a step's forward)."""
        gradients = self.gradients
        if gradients is None or not self.settings.release_gradients:
            return
        if gradients.main.has_memory and not self.shows_gradients:
            gradients.discard()
            gradients.main.release()
            self._gradient_views = []

    @property
    def shows_gradients(self) -> bool:
        """Whether any main parameter has a `.grad`."""
        for main in self.main_parameters:  # noqa: SIM110 - a generator is a call for each
            if main.grad is not None:
                return True
        return False

    def show_gradients(self, *, final: bool = True) -> None:
        """Set `.grad` of the main parameters: the gradient, or a placeholder until it is final.

        The placeholder is shown early so that a `zero_grad` between microbatches is noticed.
        """
        gradients = self.trained
        shown: Sequence[bool] = gradients.produced_gradient
        if not final:
            gradients.clear_placeholders()
            shown = [not gradients.is_empty] * len(self.refs)
        self.show_where(shown)
        self._mirror(shown=final and self.has_optimizer)

    def show_where(self, shown: Sequence[bool]) -> None:
        """Set `.grad` of main parameters that have one to their place in main grads, else None."""
        if any(shown):
            views = self.gradient_views
            for main, view, has_gradient in zip(self.main_parameters, views, shown, strict=True):
                main.grad = view if has_gradient else None
        else:
            for main in self.main_parameters:
                main.grad = None

    def note_reduced(self) -> None:
        """The gradients are as the engine left them: `squares` holds until they change."""
        self._reduced = self._gradient_versions()

    @property
    def written_since(self) -> bool:
        """Whether anything has written to the gradients since `note_reduced` (see `squares`)."""
        return self._reduced != self._gradient_versions()

    @property
    def squares(self) -> Squares | None:
        """Sum of squares from the reduction; None once anything has written to the gradients.

        Writes are seen by version counters. `ShardedTensor`s count all of them; plain tensors do
        not count what `GradScaler.unscale_` does, so whole gradients are always measured anew.
        `.grad.data` has a counter of its own and hides writes.
        """
        return self.trained.squares if self._span_specs and not self.written_since else None

    def _gradient_versions(self) -> tuple[int, int]:
        # A ShardedTensor counts writes by itself, and its flat memory does not.
        count = 0
        for main in self.main_parameters:
            if (grad := main.grad) is not None:
                count += grad._version
        main_grads = self.trained.main
        return main_grads.data._version if main_grads.has_memory else -1, count

    # -- construction -------------------------------------------------------------------------

    def _read_parameters(self) -> torch.Tensor:
        """All parameters as one flat tensor in the main dtype, equal on all ranks."""
        whole = read_parameters(self.refs, self.layout, self.dtypes.main, self.device)
        if self.settings.broadcast:
            for group in self.axes.groups("gather"):
                broadcast(whole, group, src=0).wait()
        return whole

    def _let_go_of_parameters(self) -> None:
        for ref in self.refs:
            parameter = ref.parameter
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    @property
    def _kept_dtype(self) -> torch.dtype:
        """What a rank keeps its model weights in."""
        main_is_all = self._weights_at == self._optimizer_at and self.requires_grad
        is_cut = any(placement.cuts for placement in self._weights_at)
        casts = self.settings.casts_in_gathers and main_is_all and is_cut
        return self.dtypes.main if casts else self.dtypes.weights

    def _make_main(self, local: FlatBuffer, whole: torch.Tensor) -> FlatBuffer:
        """Main weights: part of the model weights' storage where the dtypes agree."""
        if self.dtypes.main != local.dtype:
            return self._buffer(self._optimizer_at, self.dtypes.main, whole)
        storage = local.piece(self._optimizer_at)
        return self._buffer(self._optimizer_at, self.dtypes.main, storage=storage)

    def _open_windows(self) -> None:
        """Let GPUs of one host read each other's memory: all ranks make their groups in one order.

        A collective could not do it, because two ranks may begin those of two groups in any order.
        """
        if self.device.type == "cuda":
            cut = any(placement.cuts for placement in (*self._weights_at, *self._optimizer_at))
            wanted = {"gather": cut, "reduce": self.requires_grad}
            for purpose in (name for name, used in wanted.items() if used):
                for group in self.axes.groups(purpose):
                    open_window(group, self.device)

    def _make_gradients(self, scratch: ScratchBuffers) -> GroupGradients:
        lazy = self.settings.release_gradients
        main = self._buffer(self._grads_at, self.dtypes.grads, lazy=lazy)
        rank_sum = self.settings.reduction.make(main, self.axes, self.settings.scale, scratch)
        return GroupGradients(
            self.layout,
            rank_sum,
            self.dtypes,
            self.settings.cadence,
            all_stepped=self._steps_all_gradients,
        )

    def _buffer(
        self,
        placements: tuple[Placement, Placement],
        dtype: torch.dtype,
        whole: torch.Tensor | None = None,
        storage: torch.Tensor | None = None,
        lazy: bool = False,
    ) -> FlatBuffer:
        """A buffer in given storage, or filled from its part of `whole`."""
        axes = (self.axes.outer, self.axes.inner)
        device = self.settings.kept_on or self.device
        buffer = FlatBuffer(
            self.layout, placements, dtype, device, axes, storage=storage, lazy=lazy
        )
        if storage is None and self.settings.pinned:
            locked = buffer.data.pin_memory()
            buffer = FlatBuffer(self.layout, placements, dtype, device, axes, storage=locked)
        if whole is not None:
            start, stop = buffer.range
            buffer.data.copy_(whole[start:stop])
        return buffer

    def _placed(
        self, placements: tuple[Placement, ...], given: DataParallelAxes
    ) -> tuple[Placement, Placement]:
        """Placements over (outer, inner), with axes of one rank replicated."""
        outer, inner = placements
        if given is not self.axes:
            # Only the outer axis has ranks, and it became the inner one: its placement goes along.
            outer, inner = Replicate(), outer
        return self.axes.effective((outer, inner))

    def _point_parameters_at_weights(self) -> None:
        """Make the user's parameters views of the whole weights, wherever those will be."""
        self.weights.start()
        self.weights.wait()
        for ref, view in zip(self.refs, self.layout.views(self.weights.full), strict=True):
            ref.parameter.grad = None
            ref.parameter.data = view
        self.weights.release()

    def _note_addresses(self) -> list[tuple[list[nn.Parameter], list[int]]]:
        found = [self.compute_parameters] if isinstance(self.weights, WholeWeights) else []
        if self.mains_are_separate and not self._span_specs:
            found.append(self.main_parameters)
        return [(held, [*map(_ADDRESS, held)]) for held in found]

    def _make_span_specs(self) -> list[SpanSpec]:
        """Where each main parameter lies in its whole; empty where main weights are whole."""
        both = zip(self.main_weights.cuts, (self.axes.outer, self.axes.inner), strict=True)
        axes = [axis for cut, axis in both if cut]
        if not axes:
            return []
        reach = SpanGroups([axis.sibling("gather") for axis in axes])
        return [self.main_weights.as_sharded(i, reach).spec for i in range(len(self.refs))]

    def _make_main_parameters(self) -> list[nn.Parameter]:
        """The compute parameters themselves where they are what the optimizer updates."""
        flat = self.main_weights.data
        if not self._span_specs and shares_storage(flat, self.weights.full):
            return self.compute_parameters
        made = []
        for index, ref in enumerate(self.refs):
            data = self.view_like_main(flat, index)
            parameter = nn.Parameter(data, requires_grad=self.requires_grad)
            # Users' own marks, such as "no_decay", come along.
            parameter.__dict__.update(ref.parameter.__dict__)
            copy_role(ref.parameter, parameter)
            made.append(parameter)
        return made


def refuse_changed(group: ParameterGroup) -> None:
    """Raise if somebody has converted, moved or unfrozen a group's parameters since it was made.

    RuntimeError: after `.half()` or `.to()`, which took them out of their buffers. ValueError: the
    group has no gradients, and a parameter wants some by now.
    """
    ref, main, held = group.refs[0], group.main_parameters[0], group.main_weights.data
    for parameter, dtype, device in (
        (ref.parameter, group.dtypes.weights, group.device),
        (main, held.dtype, held.device),
    ):
        if parameter.dtype != dtype or parameter.device != device:
            raise RuntimeError(
                f"{ref.name} is {parameter.dtype} on {parameter.device}, and was {dtype} on "
                f"{device} in its buffer, which nobody would update now: convert or move a model "
                "before it is wrapped or sharded"
            )
    for ref in () if group.requires_grad else group.refs:
        if ref.parameter.requires_grad:
            raise ValueError(
                f"{ref.name} was frozen when the model was wrapped and requires_grad now: it "
                "has no gradient buffer, so no rank would sum its gradient. Wrap the model "
                "with requires_grad=True and freeze parameters afterwards"
            )
