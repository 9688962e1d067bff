"""Staging: copies of what a rank will write, so that training may go on changing the originals.

Copies lie in buffers that are kept from save to save: making memory anew costs more than copying
into it. On a GPU they are pinned, and the copies are queued on the current stream: work that is
queued there later cannot change what is copied, so nobody waits but the writer.

Of a tensor that several ranks hold (the weights under strategies 0 to 2) only one rank writes
each box. Who does is known once DCP has planned a first save; as long as no rank's plan changes,
the others don't stage it again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

Signature = tuple[tuple[Any, ...], ...]
Offer = tuple[DefaultSavePlanner, SavePlan]


class Staged:
    """One save's copies of the tensors of `plan`, complete once `ready()` has returned."""

    def __init__(
        self,
        plan: SavePlan,
        tensors: dict[MetadataIndex, torch.Tensor],
        copied: Sequence[torch.cuda.Event],
    ) -> None:
        self.plan, self.tensors, self._copied = plan, tensors, copied
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())

    def ready(self) -> None:
        """Wait for copies from GPUs."""
        for copies in self._copied:
            copies.synchronize()


class Stage:
    """The buffers, from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[MetadataIndex, torch.Tensor] = {}
        self._signature: Signature | None = None
        self._assigned: frozenset[MetadataIndex] = frozenset()

    @property
    def bytes(self) -> int:
        """Bytes that the buffers hold."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def plan(self, tensors: dict[str, Any], coordinator: bool) -> Offer:
        """Ask DCP what of a state this rank could write: its planner, and its plan."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(tensors, None, coordinator)
        return planner, planner.create_local_plan()

    def is_known(self, offer: Offer) -> bool:
        """Whether this rank's offer is the one that the last finished save answered."""
        return self._signature == signature(offer[1])

    def copy(self, offer: Offer, *, known: bool) -> Staged:
        """Copy what this rank may have to write.

        `known` means that all ranks offer what they offered before: only what fell to this one is
        copied.
        """
        planner, plan = offer
        if known:
            items = [item for item in plan.items if item.index in self._assigned]
            plan = dataclasses.replace(plan, items=items)
        self._buffers = {item.index: self._buffer(item) for item in plan.items}
        copied: dict[torch.device, torch.cuda.Event] = {}
        for item in plan.items:
            source = planner.resolve_data(item)
            if not isinstance(source, torch.Tensor):
                raise TypeError(f"{item.index.fqn} is no tensor")
            self._buffers[item.index].copy_(source.detach(), non_blocking=True)
            if source.is_cuda and source.device not in copied:
                copied[source.device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for device, event in copied.items():
            event.record(torch.cuda.current_stream(device))
        return Staged(plan, dict(self._buffers), tuple(copied.values()))

    def _buffer(self, item: WriteItem) -> torch.Tensor:
        data = item.tensor_data
        if data is None:
            raise TypeError(f"{item.index.fqn} is no tensor")
        sizes, dtype = data.chunk.sizes, data.properties.dtype
        old = self._buffers.get(item.index)
        if old is not None and old.shape == sizes and old.dtype == dtype:
            return old
        return torch.empty(sizes, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())

    def finished(self, offered: Signature, assigned: frozenset[MetadataIndex]) -> None:
        """Remember what fell to this rank, and let go of buffers for the rest."""
        self._signature, self._assigned = offered, assigned
        self._buffers = {k: v for k, v in self._buffers.items() if k in assigned}

    def release(self) -> None:
        """Let go of all buffers; the next save makes its own."""
        self._buffers = {}


def signature(plan: SavePlan) -> Signature:
    """Return what two plans must agree on to be answered alike."""
    return tuple(
        (item.index, item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype)
        for item in plan.items
        if item.tensor_data is not None
    )


class StagedPlanner(DefaultSavePlanner):
    """Gives DCP a plan that was made before, and the copies in place of the tensors."""

    def __init__(self, staged: Staged) -> None:
        super().__init__()
        self._staged = staged
        self.mappings = staged.plan.planner_data

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep the plan."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return the plan made before, once the copies are complete."""
        self._staged.ready()
        return self._staged.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the copy."""
        return self._staged.tensors[write_item.index]
