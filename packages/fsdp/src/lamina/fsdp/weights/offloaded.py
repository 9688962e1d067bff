"""What a rank keeps lies in host memory; the device sees it only around a gather and a reduction.

The optimizer's step then runs on the host, over shards there. A gather copies the shard to its
place in the unit's whole weights and gathers in place, so offloading adds no copy that the gather
did not make. A reduction receives into a short-lived buffer on the device, which is copied to the
host's main grads. Both run on streams of their own, beside the compute.

Note [Two streams for all reductions]
    What a reduction allocates on a stream serves that stream alone afterwards. So all units take
    turns on two streams. With streams of their own they reserved their buffers once for each unit.
    They are two, because two reductions may be under way: the first one's copy to the host must not
    wait for what the second one waits for.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from lamina.buffers import FlatBuffer
from lamina.collectives import Handle, all_gather_into
from lamina.collectives.engine import host_device
from lamina.ddp.engine import (
    DataParallelAxes,
    GradientReduction,
    GradientState,
    RankSum,
    UnavailableError,
)
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.weights.sharded import ShardedWeights


def check_offload(settings: ShardingSettings, device: torch.device, axes: DataParallelAxes) -> None:
    """Raise for what excludes shards in host memory.

    ValueError: a strategy that keeps weights whole on the device, or codes beside them.
    UnavailableError: a process group that cannot reach host memory.
    """
    if settings.precision.weight_codec is not None:
        raise ValueError(
            "weight_codec keeps codes on the device beside main weights, and offload_policy keeps "
            "shards on the host: use one of the two"
        )
    if not all(strategy.gathers for strategy in settings.strategies.values()):
        raise ValueError(
            "offload_policy=CPUOffloadPolicy() keeps weights on the host, and this strategy keeps "
            "them whole on the device: use zero_dp_strategy=3"
        )
    # On a CPU shards lie on the host already, and every group reaches them.
    for group in axes.groups("gather") if device.type != "cpu" else ():
        if host_device([group], device).type != "cpu":
            raise UnavailableError(
                f"offload_policy=CPUOffloadPolicy(): shards lie on the host, and group "
                f"'{group.group_desc if group else ''}' serves no CPU tensors, so norms and "
                "full_tensor() could not reach them: start the world with init_distributed(), or "
                'backend="cpu:gloo,cuda:nccl"'
            )


class SideStream:
    """A stream for copies between host and device beside the compute; on a CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """What is run here from now on comes after what was queued on the current stream."""
        if self._device.type != "cuda":
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def use(self) -> AbstractContextManager[object]:
        """Queue work here."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event after what was queued here; None where work is done once it is called."""
        return None if self._stream is None else self._stream.record_event()


class OffloadedWeights(ShardedWeights):
    """Sharded weights whose shard lies on the host."""

    _copied: torch.cuda.Event | None = None
    _side: SideStream | None = None

    def _gather(self) -> Handle | None:
        whole = self.acquire()
        # Replicas alone hold the whole, of which a step may have written this rank's piece only.
        cut = self.local.cuts[1] or self._spreads[1]
        axis, first = self.axes.inner, self.local.range[0]
        size = whole.numel() // (axis.size if cut else 1)
        start = axis.rank * size if cut else 0
        if self._side is None:  # at the first gather: a stream belongs to a device
            self._side = SideStream(whole.device)
        # The place may be one that a unit before has just left: its last use is queued already.
        self._side.follow()
        with self._side.use():
            own = whole[start : start + size]
            own.copy_(self.local.data[start - first :][:size], non_blocking=True)
            self._copied = self._side.mark()
            if cut:
                return all_gather_into(whole, own, axis.sibling("gather"), async_op=True)
        # Nothing travels, so nobody waits for a handle: the compute waits for the copy here.
        if self._copied is not None:
            self._copied.wait()
        return None

    def release(self) -> None:
        """Give the whole weights back, once the host's shard may be written again."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        super().release()


class OffloadedSum(RankSum):
    """Sums on the device, which `make` makes, for main grads on the host.

    What was reduced before is brought to the device first where a reduction adds to it, so the bits
    are those of main grads that never left.
    """

    def __init__(
        self,
        make: Callable[..., RankSum],
        device: torch.device,
        sides: list[SideStream],
        main: FlatBuffer,
        *state: Any,
    ) -> None:
        super().__init__(main, *state)
        self.device = device
        # What the device has of main grads: memory from a reduction's start to its copy's end.
        self._staging = FlatBuffer(
            main.layout, main.placement, main.dtype, device, main.axes, lazy=True
        )
        self._inner = make(self._staging, *state)
        self.adds_to_final = self._inner.adds_to_final
        self.sums_in_main = self._inner.sums_in_main
        self._sides = sides  # all units', see Note [Two streams for all reductions]

    def run(
        self, wire: torch.Tensor, before: GradientState, final: bool, finds: bool
    ) -> Generator[Handle, None, None]:
        """As the sum inside; main grads are on the host when the generator has ended."""
        kept, staging = self.main.data, self._staging.data
        side = self._sides[0]
        self._sides.reverse()
        side.follow()
        with side.use():
            if before is not GradientState.EMPTY:
                staging.copy_(kept, non_blocking=True)
            steps = self._inner.run(wire, before, final, False)
            handle = next(steps, None)
        # Who waits for a handle lets the side stream wait, and what comes next is queued there.
        while handle is not None:
            yield cast(Handle, _Beside(handle, side))
            with side.use():
                handle = next(steps, None)
        with side.use():
            kept.copy_(staging, non_blocking=True)
            done = side.mark()
        # The optimizer steps on the host, which no stream orders: the host itself has to wait.
        if done is not None:
            done.synchronize()
        self._staging.release()

    def skip(self, final: bool) -> None:
        """As the sum inside."""
        self._inner.skip(final)

    def forget(self) -> None:
        """As the sum inside."""
        self._inner.forget()

    def scale_kept(self, factor: float) -> None:
        """As the sum inside."""
        self._inner.scale_kept(factor)


class _Beside:
    """A handle whose `wait` lets the side stream wait, and not the compute."""

    def __init__(self, handle: Handle, side: SideStream) -> None:
        self._handle = handle
        self._side = side

    def wait(self) -> None:
        """Let the side stream wait; neither the host nor the compute does."""
        with self._side.use():
            self._handle.wait()


def two_streams(device: torch.device) -> list[SideStream]:
    """What a model's reductions take turns on. See Note [Two streams for all reductions]."""
    return [SideStream(device), SideStream(device)]


def offloaded(
    reduction: GradientReduction, device: torch.device, sides: list[SideStream]
) -> GradientReduction:
    """The same reduction for main grads on the host, on two streams that all units share."""
    return replace(reduction, make=partial(OffloadedSum, reduction.make, device, sides))
