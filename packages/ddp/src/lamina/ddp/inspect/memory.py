"""Memory as a formula: what a wrapped model holds at rest and at its peak, from its layouts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from lamina.collectives.engine import bytes_received, window_bytes
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.inspect.inspection import InspectsItself, groups_of
from lamina.ddp.inspect.wire import codec_of
from lamina.ddp.parameters.strategy import Cadence


@dataclass(frozen=True)
class MemoryBudgets:
    """Limits in bytes per rank that a wrapper keeps; None where it keeps another.

    `gathers` are whole weights that are live, `reductions` gradients on the wire. Without that,
    `buffers` is how many gradient buffers are held at once, filled or on the wire, and `receives`
    how many of them receive at once; None: all. With `keeps_buffers` those of a step stay with the
    wrapper until the next one.
    """

    gathers: int | None = None
    reductions: int | None = None
    buffers: int = 2
    receives: int | None = None
    keeps_buffers: bool = False


@runtime_checkable
class _HasBudgets(Protocol):
    @property
    def memory_budgets(self) -> MemoryBudgets:
        """Bytes per rank that the wrapper keeps at most."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank of one wrapped model, without activations and optimizer state.

    Attributes:
        weights: model weights at rest; the main weights where gathers cast those.
        main_weights: main weights that do not share the model weights' memory.
        main_grads: reduced gradients (kept, or from the first reduction until the forward after
            they were zeroed: `GroupSettings.release_gradients`).
        local_grads: gradients of a whole step before their reduction (strategies 0 and 1 where
            they can't share the main grads' memory), and sums over the inner axis that wait for the
            outer one (strategies 2 and 3). At most: a step of one microbatch keeps them in the wire
            dtype. Without the partial sums of `reproducible=True`.
        gathered: whole weights of the two largest units, for strategies that gather, and of all
            units that stay gathered for a step (pipeline schedules use them every microbatch).
            With a budget, that many bytes instead of two units.
        in_flight: gradient buffers of the two largest units (of three, where a sum goes over two
            axes or to the host; of the largest buckets, as many as may be held at once), and what
            their reduction receives, by the transport at hand (with offloading, its sum on the
            device as well); with a budget, that many bytes, what comes of them, and the largest
            buffer being filled.
        padding: the part of `weights` that belongs to no parameter.
        losses: what an int8 wire has lost of this rank's gradients (`reduction="int8"`).
        windows: GPU memory in which the GPUs of a host read what others reduce and gather, 64 MiB
            for each process group that has a window, whatever the model's size.
        kept_buffers: gradient buffers of a step that are kept for the next one, at most
            (`DistributedDataParallel` on a CPU); part of what `local_grads` and `in_flight` count.
    """

    weights: int
    main_weights: int
    main_grads: int
    local_grads: int
    gathered: int
    in_flight: int
    padding: int
    kept_buffers: int = 0
    losses: int = 0
    windows: int = 0

    @property
    def resident(self) -> int:
        """Bytes held between steps."""
        states = self.weights + self.main_weights + self.main_grads
        return states + self.losses + self.kept_buffers + self.windows

    @property
    def peak(self) -> int:
        """Bytes held at most during a step, without activations and optimizer state."""
        used = self.resident - self.kept_buffers + self.gathered
        return used + max(self.kept_buffers, self.local_grads + self.in_flight)

    def __str__(self) -> str:
        rows = [
            ("model weights", self.weights),
            ("main weights", self.main_weights),
            ("main grads", self.main_grads),
            ("rounding kept for int8 wire", self.losses),
            ("buffers kept", self.kept_buffers),
            ("windows for GPUs of the host", self.windows),
            ("at rest", self.resident),
            ("local gradients of a step", self.local_grads),
            ("gathered units", self.gathered),
            ("reductions in flight", self.in_flight),
            ("peak", self.peak),
            ("padding, part of at rest", self.padding),
        ]
        return "\n".join(f"{label:<28}{size / 2**20:12.2f} MiB" for label, size in rows)


def memory_plan(module: nn.Module) -> MemoryPlan:
    """The plan of a wrapped module, from layouts and placements alone (no measuring).

    Raises:
        TypeError: if the module was not wrapped by Lamina.

    Examples:
        >>> plan = memory_plan(DistributedDataParallel(torch.nn.Linear(256, 256)))
        >>> plan.weights + plan.padding >= 4 * 256 * 257
        True
    """
    if isinstance(module, InspectsItself):
        plan: MemoryPlan = module.memory_plan()
        return plan
    groups = groups_of(module)
    trained = [group for group in groups if group.gradients is not None]
    gathering = [group for group in groups if not group.weights.local.is_whole]
    # Whole weights that stay for a step add up. Of those that come and go, two units' are there at
    # once: the one that computes and the next.
    kept = [group for group in gathering if group.weights.kept_for_step]
    coming = [group for group in gathering if not group.weights.kept_for_step]
    budgets = module.memory_budgets if isinstance(module, _HasBudgets) else MemoryBudgets()
    local = sum(_local(group) for group in trained)
    sent = _largest([_sent(group) for group in trained], budgets.buffers)
    receives = budgets.buffers if budgets.receives is None else budgets.receives
    received = _largest([_received(group) for group in trained], receives)
    sizes = [_bytes(g, g.layout.size, "weights") for g in coming]
    live = _largest(sizes, 2) if budgets.gathers is None else min(budgets.gathers, sum(sizes))
    return MemoryPlan(
        weights=sum(group.weights.local.data.nbytes for group in groups),
        main_weights=sum(
            group.main_weights.data.nbytes
            for group in trained
            if group.main_weights.dtype != group.weights.local.dtype
        ),
        main_grads=sum(_bytes(g, g.trained.main.numel, "grads") for g in trained),
        local_grads=local,
        gathered=live + sum(_bytes(g, g.layout.size, "weights") for g in kept),
        in_flight=sent + received
        if budgets.reductions is None
        else _within(trained, budgets.reductions),
        padding=sum(_padding(group) for group in groups),
        kept_buffers=local + sent if budgets.keeps_buffers else 0,
        losses=sum(
            group.layout.size * torch.float32.itemsize
            for group in trained
            if group.settings.reduction.keeps_losses and group.axes.size > 1
        ),
        windows=_windows(groups),
    )


def _windows(groups: Iterable[ParameterGroup]) -> int:
    on_gpus = [group for group in groups if group.device.type == "cuda"]
    pairs = {
        (each, group.device)
        for group in on_gpus
        for purpose in ("gather", "reduce")
        for each in group.axes.groups(purpose)
    }
    return sum(window_bytes(each, device) for each, device in pairs)


def _bytes(group: ParameterGroup, numel: int, copy: str) -> int:
    return int(numel * getattr(group.dtypes, copy).itemsize)


def _local(group: ParameterGroup) -> int:
    """Gradients that a rank holds from a step's first backward to its last reduction."""
    gradients, dtypes = group.trained, group.dtypes
    if gradients.cadence is Cadence.EVERY_MICROBATCH:
        return _inner_sums(group)
    if not gradients.accumulates_in_main:
        return _bytes(group, group.layout.size, "grads")
    narrow = dtypes.wire.itemsize < dtypes.grads.itemsize
    return _bytes(group, group.layout.size, "wire") if narrow else 0


def _sent(group: ParameterGroup) -> int:
    """What a reduction sends from, along either axis, where it is none of those of `_local`."""
    gradients, dtypes = group.trained, group.dtypes
    wire = _bytes(group, group.layout.size, "wire")
    if gradients.cadence is Cadence.EVERY_MICROBATCH:
        return wire
    shared = dtypes.wire == dtypes.grads or gradients.accumulates_in_main
    return (0 if shared else wire) + _inner_sums(group)


def _inner_sums(group: ParameterGroup) -> int:
    """Sums over the inner axis that the outer one adds up, in fp32."""
    if group.axes.outer.size == 1 or group.settings.reduction.cadence is not None:
        return 0
    outer, inner = group.trained.main.cuts
    whole = outer and not inner
    numel = group.layout.size // (1 if whole else group.axes.inner.size)
    return numel * torch.promote_types(group.dtypes.wire, torch.float32).itemsize


def _received(group: ParameterGroup) -> int:
    """The pieces that a reduction receives, and their sum where main grads are kept elsewhere."""
    reduction, axis = group.settings.reduction, group.axes.inner
    numel, wire, device = group.layout.size, group.dtypes.wire, group.device
    if reduction.name not in ("native", "reproducible"):
        received = bytes_received(
            axis.sibling("reduce"),
            numel,
            wire,
            device,
            reduction.message_bytes,
            scatter=group.trained.main.cuts[1],
            codec=None if reduction.name == "ordered" else codec_of(reduction.name, wire),
        )
    else:
        received = (numel - numel // max(1, axis.size)) * wire.itemsize
    return received + _staged(group)


def _staged(group: ParameterGroup) -> int:
    """The sum that a reduction makes on the device, where main grads are kept elsewhere."""
    away = group.settings.kept_on is not None
    return _bytes(group, group.trained.main.numel, "grads") if away else 0


def _padding(group: ParameterGroup) -> int:
    """Bytes of padding in an average shard."""
    local_nbytes = group.weights.local.data.nbytes
    return local_nbytes * group.layout.padding // max(1, group.layout.size)


def _within(groups: list[ParameterGroup], budget: int) -> int:
    """Bytes on the wire, what they bring, their sums elsewhere, and one buffer being filled."""
    sizes = [group.trained.wire_bytes for group in groups]
    ranks = max((group.axes.inner.size for group in groups), default=1)
    sent = min(budget, sum(sizes))
    # Which groups share the wire is not known: as if all staged what the one with the most does.
    staged = max((sent * _staged(g) // max(1, g.trained.wire_bytes) for g in groups), default=0)
    return sent + sent * (ranks - 1) // ranks + staged + max(sizes, default=0)


def _largest(sizes: list[int], count: int) -> int:
    return sum(sorted(sizes, reverse=True)[:count])
