"""Bytes on the wire as a formula: what a rank sends in a step, inside its host and to others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from lamina.collectives.engine import Cast, Checksums, GradientCodec, Int8Blocks, served_by_gloo
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.inspect.inspection import groups_of
from lamina.ddp.parameters.strategy import Cadence
from lamina.mesh.engine import MeshAxis, host_runs


@dataclass(frozen=True)
class WireBytes:
    """What one rank sends.

    Bytes go to ranks `inside` the own host, or to other hosts (`between`).
    """

    inside: int = 0
    between: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.inside + other.inside, self.between + other.between)

    def __mul__(self, times: int) -> WireBytes:
        return WireBytes(times * self.inside, times * self.between)


@dataclass(frozen=True)
class WirePlan:
    """What one rank sends in a step. A byte counts once for each rank that needs it.

    A few KiB are left out: norms, and flags of used parameters.
    """

    weights: WireBytes
    gradients: WireBytes

    @property
    def total(self) -> WireBytes:
        """Both together."""
        return self.weights + self.gradients

    def __str__(self) -> str:
        rows = (("weights", self.weights), ("gradients", self.gradients), ("a step", self.total))
        return "\n".join(
            f"{label:<12}{sent.inside / 2**20:12.2f} MiB inside the host"
            f"{sent.between / 2**20:12.2f} MiB to other hosts"
            for label, sent in rows
        )


@runtime_checkable
class _GathersAgain(Protocol):
    def gathered_again(self) -> list[ParameterGroup]:
        """The groups whose weights are gathered a second time, for backward."""


def wire_plan(module: nn.Module, microbatches: int = 1) -> WirePlan:
    """What this rank sends in a step of a wrapped module, from layouts and placements alone.

    A step is: each microbatch forward and backward, the last one final, and the optimizer's update
    of all weights. Under strategies that gather, a plan made after a step knows which unit's
    forward comes last; before that it takes the last one that was registered.

    Args:
        module: what `DistributedDataParallel` or `fully_shard` returned.
        microbatches: forwards and backwards in a step.

    Raises:
        TypeError: if the module was not wrapped by Lamina.

    Examples:
        >>> wire_plan(DistributedDataParallel(torch.nn.Linear(256, 256))).total.between
        0
    """
    again = module.gathered_again() if isinstance(module, _GathersAgain) else []
    weights = gradients = WireBytes()
    for group in groups_of(module):
        weights += _installed(group) + _gathered(group, microbatches, again)
        if group.gradients is not None:
            gradients += _reduced(group, microbatches)
    return WirePlan(weights, gradients)


def _installed(group: ParameterGroup) -> WireBytes:
    """Gathers of what the optimizer wrote: along each axis that cuts main weights alone."""
    outer, inner = (
        m and not w for m, w in zip(group.main_weights.cuts, group.weights.local.cuts, strict=True)
    )
    axes, nbytes, sent = group.axes, group.layout.size * group.dtypes.weights.itemsize, WireBytes()
    if outer:
        part = nbytes // (axes.inner.size if group.main_weights.cuts[1] else 1)
        sent += _gather(axes.outer, part, group.device)
    return sent + _gather(axes.inner, nbytes, group.device) if inner else sent


def _gathered(group: ParameterGroup, microbatches: int, again: list[ParameterGroup]) -> WireBytes:
    """Gathers before a forward, and before those backwards that come after a release."""
    if group.weights.local.is_whole:
        return WireBytes()
    times = 1 if group.weights.kept_for_step else microbatches
    times += microbatches * any(group is regathered for regathered in again)
    return _gather(group.axes.inner, group.weights.gathered_nbytes, group.device) * times


def _reduced(group: ParameterGroup, microbatches: int) -> WireBytes:
    name, axes, dtypes = group.settings.reduction.name, group.axes, group.dtypes
    if name == "reproducible":
        return _reproduced(group, microbatches)
    times = microbatches if group.trained.cadence is Cadence.EVERY_MICROBATCH else 1
    # What an axis cuts is left as a scatter, and what it keeps whole comes back in a gather.
    outer, inner = group.trained.main.cuts
    numel, wide = group.layout.size, torch.promote_types(dtypes.wire, torch.float32)
    if axes.outer.size == 1:
        gathered = None if inner else dtypes.grads
        return _sum(axes.inner, numel, name, dtypes.wire, gathered, group.device) * times
    whole = outer and not inner
    sent = _sum(axes.inner, numel, name, dtypes.wire, wide if whole else None, group.device) * times
    part = numel if whole else numel // axes.inner.size
    back = None if outer else dtypes.grads
    sent += _sum(axes.outer, part, name, wide, back, group.device, own=False)
    if not outer and not inner:
        sent += _gather(axes.inner, numel * dtypes.grads.itemsize, group.device)
    return sent


def _reproduced(group: ParameterGroup, microbatches: int) -> WireBytes:
    """Leaves on their way to their owners; at the end gathers along axes that cut no main grads.

    A complete subtree is an ordered sum. Along any other axis all leaves travel as they are.
    """
    axes, (outer, inner) = group.axes, group.trained.main.cuts
    ways = [(axes.inner, 1, inner), (axes.outer, axes.inner.size, outer)]
    sent, gathered, blocks, leaves = WireBytes(), WireBytes(), 1, 1
    numel, dtype = group.layout.size, group.dtypes.wire
    for axis, stride, cut in reversed(ways) if outer and not inner else ways:
        if axis.size == 1:
            continue
        if not cut:
            gathered += _gather(axis, numel * group.dtypes.grads.itemsize, group.device)
        if blocks == 1 and stride == leaves and not axis.size & (axis.size - 1):
            sent += _sum(axis, numel, "ordered", dtype, None, group.device)
            dtype, leaves = torch.promote_types(dtype, torch.float32), leaves * axis.size
        else:
            sent += _to_others(axis, numel // axis.size * dtype.itemsize) * blocks
            blocks *= axis.size
        numel //= axis.size
    return sent * microbatches + gathered


def _gather(axis: MeshAxis, nbytes: int, device: torch.device) -> WireBytes:
    """A gather of a whole of so many bytes: this rank's piece goes to all others.

    Over gloo it goes once to each run of ranks of another host, which pass it on to each other.
    """
    piece = nbytes // axis.size
    sent = _to_others(axis, piece)
    if axis.group is None or device.type != "cpu" or not served_by_gloo(axis.group, device):
        return sent
    between = sent.between // host_runs(axis.group).run
    return WireBytes(sent.inside + sent.between - between, between)


def _to_others(axis: MeshAxis, nbytes: int) -> WireBytes:
    """So many bytes for each other rank."""
    if axis.group is None:
        return WireBytes()
    near = len(host_runs(axis.group).near)
    return WireBytes((near - 1) * nbytes, (axis.size - near) * nbytes)


_WIRES: dict[str, tuple[Callable[[torch.dtype], GradientCodec], ...]] = {
    "ordered": (Cast, Cast),
    "native": (Cast, Cast),
    "int8": (lambda _: Int8Blocks(), Cast),
    "checked": (Checksums, Checksums),
}
"""What a rank's own gradients, and sums that a further axis adds up, travel as. A reduction that is
not here has no formula, and none is made up."""


def codec_of(name: str, wire: torch.dtype, *, own: bool = True) -> GradientCodec:
    """What makes a rank's `own` gradients, or sums of them, travel in a reduction, by its name."""
    gradients, sums = _WIRES[name]
    return gradients(wire) if own else sums(wire)


def _sum(
    axis: MeshAxis,
    numel: int,
    name: str,
    wire: torch.dtype,
    gathered: torch.dtype | None,
    device: torch.device,
    *,
    own: bool = True,
) -> WireBytes:
    """A reduction of `numel` elements; the sums are gathered in a dtype, or None for a scatter."""
    codec = codec_of(name, wire, own=own)
    piece = -(-numel // axis.size)
    side = 0 if codec.side_dtype is None else codec.side_dtype.itemsize
    terms = -(-piece // codec.block) * (codec.block * codec.dtype.itemsize + side)
    back = 0 if gathered is None else piece * gathered.itemsize
    hosts = None if axis.group is None else host_runs(axis.group)
    if name == "native":
        return _to_others(axis, terms + (terms if back else 0))
    if hosts is None or hosts.run in (1, axis.size) or piece % codec.block:
        return _to_others(axis, terms) + _gather(axis, back * axis.size, device)
    # Terms go to the run of ranks around this one, and partial sums in fp32 to the other runs.
    partial = piece * torch.promote_types(wire, torch.float32).itemsize + back
    runs, near = axis.size // hosts.run, len(hosts.near) // hosts.run
    inside = (hosts.run - 1) * runs * (terms + back)
    return WireBytes(inside + (near - 1) * partial, (runs - near) * partial)
