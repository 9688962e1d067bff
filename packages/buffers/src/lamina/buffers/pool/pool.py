"""`StoragePool`: memory that unsharded units are gathered into and that is given back after use.

By default a key has a block of its own, whose bytes come and go while its tensor and views stay
(`resize`): always right, at the price of an allocation each time. With `mode="slots"` the pool has
`Slots` as well: fixed memory that keys share which are never live at the same time.

Note [Saved views of released memory]
Autograd saves views of a unit's weights in forward and reads them in backward; in between the unit
is released and gathered again. Such a view is right once its key is back in the same block with the
same content, which nothing in torch checks. So each key counts the times that it was acquired
(`generation`) and the blocks that it has had (`epoch`), and `acquire(epoch=...)` and
`SavedTensorGuard` compare them.
A gather brings back values that autograd has seen, and a version counter would take that for a
modification of what was saved. So a gather writes through `destination(key)`, another tensor
over the same memory, of which autograd saves nothing.
See docs/decisions/0207-gathers-write-through-another-tensor.md.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NoReturn, TypeAlias

import torch

from lamina.buffers.layout.layout import BufferLayout
from lamina.buffers.pool.slots import ConflictGraph, SlotPlan, color_slots
from lamina.buffers.storage_access import access_of

Key: TypeAlias = Hashable
Mode: TypeAlias = Literal["resize", "slots"]

_WASTE = 1.25
"""A free scratch buffer serves a request that is at most this much smaller."""


class StaleStorageError(RuntimeError):
    """A view of pooled storage is used while its memory does not hold its key's content."""


class MemoryBlock:
    """A piece of memory: one key's own, or a slot (`fixed`) that several keys share.

    The keys' tensors view its `storage`, of `nbytes` bytes, or of none while an own block is
    released. A block in which nobody lives (`owner`) refuses access. Whoever reads it through a
    tensor that was kept gets the error `released`, and not a crash or what another key has left
    there. With `poison`, released bytes become 0xFF and are kept, instead of being given back or
    refused.
    """

    def __init__(
        self, device: torch.device, nbytes: int, released: str, *, fixed: bool, poison: bool
    ) -> None:
        made = torch.empty(nbytes if fixed else 0, dtype=torch.uint8, device=device)
        self.storage = made.untyped_storage()
        self.nbytes, self.fixed, self.poison = nbytes, fixed, poison
        self.owner: Key | None = None
        self.access = access_of(self.storage, released)
        self.release()

    def grow(self) -> None:
        """Take the bytes. What they hold is undefined (0xFF under poison)."""
        self.access.allow()  # first, as torch would refuse to resize it, too
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)
            if self.poison:
                self._fill()

    def release(self) -> None:
        """Nobody lives here any longer: give an own block's bytes back, keep a slot's."""
        self.owner = None
        if self.poison:
            self._fill()
            return
        if not self.fixed:
            self.storage.resize_(0)
        self.access.refuse()

    def empty(self) -> None:
        """Give back the bytes, under poison too."""
        self.access.allow()
        self.storage.resize_(0)
        self.access.refuse()

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor over the block, with a version counter of its own."""
        # Autograd could never save an inference tensor for backward.
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=dtype, device=self.storage.device)
            nbytes = self.storage.nbytes()
            self.access.allow()
            made.set_(self.storage, 0, (numel,), (1,))
            if self.storage.nbytes() != nbytes:
                self.storage.resize_(nbytes)  # set_ gives a storage that is too small its bytes
            if self.owner is None and not self.poison:
                self.access.refuse()
        return made

    def _fill(self) -> None:
        if self.storage.nbytes():
            self.view(self.nbytes, torch.uint8).fill_(0xFF)


class Slots:
    """The slots of one pool, and which of its keys were seen live together.

    `make` makes one, from its bytes and the message for reads of it while it is empty. `context` is
    entered once around the allocation of all new slots of a plan.
    """

    def __init__(
        self,
        make: Callable[[int, str], MemoryBlock],
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.blocks: list[MemoryBlock] = []
        """The slots that there are."""
        self._make = make
        self._context = context
        self._conflicts: ConflictGraph = {}
        self._homes: dict[Key, MemoryBlock] = {}
        self._observing = True

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(block.nbytes for block in self.blocks)

    def observe(self, key: Key, live: Iterable[Key]) -> None:
        """A key comes to life beside those that live."""
        for other in live if self._observing else ():
            self._conflicts.setdefault(key, set()).add(other)
            self._conflicts.setdefault(other, set()).add(key)

    @contextmanager
    def not_observing(self) -> Iterator[None]:
        """Keys may be live together in here as in no step."""
        before, self._observing = self._observing, False
        try:
            yield
        finally:
            self._observing = before

    def forget(self, key: Key) -> None:
        """A key is no longer the pool's."""
        self._conflicts.pop(key, None)
        self._homes.pop(key, None)
        for others in self._conflicts.values():
            others.discard(key)

    def plan(
        self,
        sizes: Mapping[Key, int],
        conflicts: Mapping[Key, Iterable[Key]],
        released: Mapping[Key, str],
        *,
        dedicated: bool,
    ) -> dict[Key, MemoryBlock]:
        """Make slots for keys of these sizes, in bytes: the slot of each key that has one.

        Conflicts that were observed count beside those given. A slot whose size and keys are
        unchanged stays as it is. `released` are messages for reads of an empty slot.
        """
        graph = {key: set(others) for key, others in self._conflicts.items()}
        for key, others in conflicts.items():
            graph.setdefault(key, set()).update(others)
        plans = color_slots(sizes, graph, dedicated=dedicated)
        # A slot that stays keeps its address, its tensors and what autograd saved of them.
        kept = [(plan, self._slot_like(plan)) for plan in plans]
        unchanged = [block for _, block in kept if block is not None]
        for block in self.blocks:
            if block not in unchanged:
                block.empty()
        self.blocks, self._homes = [], {}
        # Memory that goes is given back before new is taken: a new plan needs no room for both.
        with nullcontext() if all(block for _, block in kept) else self._context():
            for plan, same in kept:
                block = same or self._make(plan.nbytes, released[plan.keys[0]])
                self.blocks.append(block)
                self._homes.update(dict.fromkeys(plan.keys, block))
        return self._homes

    def _slot_like(self, plan: SlotPlan) -> MemoryBlock | None:
        """The slot there is for just these keys, if its size is right."""
        block = self._homes.get(plan.keys[0])
        if block is None or block.nbytes != plan.nbytes:
            return None
        keys = {key for key, home in self._homes.items() if home is block}
        return block if keys == set(plan.keys) else None


@dataclass(eq=False)
class _Entry:
    """One key: its memory, two tensors over it, and its history."""

    key: Key
    numel: int
    dtype: torch.dtype
    released: str
    generation: int = 0
    epoch: int = -1
    block: MemoryBlock = field(init=False)
    tensor: torch.Tensor = field(init=False)
    destination: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.numel * self.dtype.itemsize

    @property
    def is_live(self) -> bool:
        """Whether the key lives in its block: the block alone knows who does."""
        return self.block.owner == self.key

    def move(self, block: MemoryBlock) -> None:
        """Give the key a block. Its tensors are new, and views of those before are lost."""
        self.block = block
        self.tensor, self.destination = (block.view(self.numel, self.dtype) for _ in range(2))
        self.epoch += 1


class _Entries(dict[Key, _Entry]):
    """All keys of a pool, in order of registration."""

    def __missing__(self, key: Key) -> NoReturn:
        raise KeyError(f"{key!r} is not registered with this pool ({len(self)} keys)")


class StoragePool:
    """Key-addressed storage for unsharded units.

    A key's tensor exists from `register` on; its bytes exist only between `acquire` and `release`.
    Views are made with `views`, or inside `viewing`. Under `slots`, `plan_slots` moves keys to
    shared fixed memory: the tensors of the keys it returns are new, and the caller makes its views
    again.

    Whoever gathers writes through `destination(key)`. Code that writes through the tensor or its
    views does it under `torch.autograd._unsafe_preserve_version_counter`. On CUDA, acquire and
    release on one stream, and let that stream wait for the last use before `release`. Methods that
    take a key raise KeyError for one that is not registered.

    Args:
        device: where the memory lies.
        mode: `"resize"`, or `"slots"` to allow `plan_slots` (keys that fit no free slot take
            `resize`).
        poison: fill released memory with 0xFF bytes (NaN in fp64, fp32, bf16, fp16, e4m3fn, e5m2)
            and keep it, so that whoever reads it sees NaN instead of old values or a crash.
        slot_context: entered once around the allocation of all slots of a `plan_slots`, for memory
            that is registered as a whole (`lambda: register_pool(groups)`).

    Attributes:
        bytes_resident: bytes of all slots and of live keys with blocks of their own (poison apart).
        bytes_peak: the most that has been.

    Raises:
        ValueError: unknown mode.

    Examples:
        >>> pool = StoragePool()
        >>> whole = pool.register("block", 1024, torch.float32)
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        mode: Mode = "resize",
        *,
        poison: bool = False,
        slot_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        if mode not in ("resize", "slots"):
            raise ValueError(f"StoragePool mode is {mode!r}: use 'resize' or 'slots'")
        self.device = torch.device(device)
        self.mode: Mode = mode
        self.bytes_resident = self.bytes_peak = 0
        self._poison = poison
        self._entries = _Entries()
        # Without slots no order of use has to be watched.
        self._slots: Slots | None = None
        if mode == "slots":
            make = partial(self._block, fixed=True)
            self._slots = Slots(make, slot_context or nullcontext)

    # -- keys -----------------------------------------------------------------------------------

    def register(
        self, key: Key, numel: int, dtype: torch.dtype, *, released: str = ""
    ) -> torch.Tensor:
        """Make a key's flat tensor of `numel` elements, without memory until `acquire`.

        Args:
            key: its name.
            numel: elements of its tensor.
            dtype: of its tensor.
            released: message of the RuntimeError for whoever reads the memory, through whatever
                tensor, while no key lives there. Before torch 2.14 a build without CUDA cannot
                say it.

        Raises:
            ValueError: the key is None or registered already, or `numel` is negative.
        """
        if key is None or key in self._entries or numel < 0:
            raise ValueError(
                f"cannot register {key!r} with {numel} elements: keys are not None, are registered "
                "once (unregister first), and have 0 or more elements"
            )
        released = released or f"the memory of {key!r} is released: acquire the key to read it"
        entry = self._entries[key] = _Entry(key, numel, dtype, released)
        entry.move(self._block(entry.nbytes, released))
        return entry.tensor

    def unregister(self, key: Key) -> None:
        """Forget a key and free its memory. Views of it must not be read again."""
        self.release(key)
        entry = self._entries.pop(key)
        if self._slots is not None:
            self._slots.forget(key)
        if not entry.block.fixed:
            entry.block.empty()

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def keys(self) -> tuple[Key, ...]:
        """All keys, in order of registration."""
        return tuple(self._entries)

    def live_keys(self) -> tuple[Key, ...]:
        """Keys that hold memory now, in order of registration."""
        return tuple(key for key, entry in self._entries.items() if entry.block.owner == key)

    def generation(self, key: Key) -> int:
        """How many times the key has been acquired."""
        return self._entries[key].generation

    def epoch(self, key: Key) -> int:
        """How many times the key's tensor has moved to another block.

        Views must be made again when it changes, and views that autograd saved earlier are lost:
        pass the epoch they were made in to `acquire`.
        """
        return self._entries[key].epoch

    def owner_of(self, tensor: torch.Tensor) -> Key | None:
        """The key that lives in the memory a tensor views; None where it is none of the pool's.

        Raises:
            StaleStorageError: the memory is the pool's and nobody lives in it.
        """
        # By the storage's object: the address of released memory is null for all keys.
        place = tensor.untyped_storage()._cdata
        entries = self._entries.values()
        keys = [entry.key for entry in entries if entry.block.storage._cdata == place]
        if not keys:
            return None
        owner = self._entries[keys[0]].block.owner
        if owner is None:
            raise StaleStorageError(
                f"a view of released storage of {keys} is used: acquire the key and gather into it "
                "first"
            )
        return owner

    def check(self, key: Key) -> None:
        """Raise StaleStorageError unless the key is live."""
        entry = self._entries[key]
        holder = entry.block.owner
        if holder != key:
            raise StaleStorageError(
                f"{key!r} (generation {entry.generation}) is not live"
                + (f": its slot holds {holder!r}" if holder is not None else "")
                + "; acquire it and gather into it before use"
            )

    # -- tensors --------------------------------------------------------------------------------

    def tensor(self, key: Key) -> torch.Tensor:
        """The key's flat tensor, live or not."""
        return self._entries[key].tensor

    def destination(self, key: Key) -> torch.Tensor:
        """The same flat memory with a version counter of its own: what a gather writes into.

        Raises:
            StaleStorageError: the key is not live.
        """
        self.check(key)
        return self._entries[key].destination

    @contextmanager
    def viewing(self, key: Key) -> Iterator[torch.Tensor]:
        """The key's flat tensor with memory behind it for the time of the block.

        torch refuses to slice a tensor whose storage holds no bytes, so views of a released key are
        made in here; they stay valid as objects afterwards. The content is undefined. Not counted
        in `bytes_resident`: nothing is read or written, and on CPU no page is touched.
        """
        entry = self._entries[key]
        block, released = entry.block, not entry.block.storage.nbytes()
        block.grow()
        try:
            yield entry.tensor
        finally:
            # Whoever came to life in here keeps the bytes. A poisoned block that had some has them
            # filled.
            if block.owner is None:
                (block.empty if released else block.release)()

    def views(self, key: Key, layout: BufferLayout) -> dict[str, torch.Tensor]:
        """Every tensor of `layout` with its shape, as views of the key's flat tensor.

        Raises:
            ValueError: the layout has another number of elements than the key.
        """
        entry = self._entries[key]
        if layout.size != entry.numel:
            raise ValueError(f"{key!r} has {entry.numel} elements, the layout {layout.size}")
        with self.viewing(key) as flat, torch.inference_mode(False), torch.no_grad():
            return dict(zip(layout.names(), layout.views(flat), strict=True))

    # -- acquire and release --------------------------------------------------------------------

    def acquire(self, key: Key, *, epoch: int | None = None) -> torch.Tensor:
        """Give the key memory, with undefined content; a live key keeps what it has.

        A key whose slot another live key holds falls back to a block of its own, until the next
        `plan_slots`: its tensor and epoch change.

        Args:
            key: a registered key.
            epoch: the epoch in which autograd saved views of the key, where it did: then the key
                must come back to that block.

        Returns:
            The key's flat tensor.

        Raises:
            StaleStorageError: the key can't come back to where it was in `epoch`.
        """
        entry = self._entries[key]
        if epoch is not None and epoch != entry.epoch:
            raise StaleStorageError(
                f"{key!r}: views were saved in epoch {epoch} and the key has moved since "
                f"(epoch {entry.epoch}): a gather would not reach them. Plan slots with the whole "
                "order of use"
            )
        block = entry.block
        if block.owner != key:
            if self._slots is not None:
                # Who lives now must not share a slot with this key in the next plan.
                self._slots.observe(key, self.live_keys())
                if block.owner is not None:  # the slot is taken: an order that no plan has seen
                    block = self._fall_back(entry, epoch)
            block.grow()
            block.owner = key
            # What autograd saved of the key is right in the generation in which its content is
            # back.
            entry.generation += 1
            if not block.fixed:
                self.bytes_resident += entry.nbytes
                self.bytes_peak = max(self.bytes_peak, self.bytes_resident)
        return entry.tensor

    def release(self, key: Key) -> None:
        """Give the key's memory back; nothing happens where it is not live."""
        entry = self._entries[key]
        block = entry.block
        if block.owner == key:
            block.release()
            if not block.fixed:
                self.bytes_resident -= entry.nbytes

    @contextmanager
    def out_of_turn(self) -> Iterator[None]:
        """Keys may be live together in here as in no step (to look at a whole model).

        The conflict graph does not learn from it, and a key that found its slot taken goes back to
        it at the end, if it was released by then.
        """
        if (slots := self._slots) is None:
            yield
            return
        # Keys whose slot is taken in here fall back to own blocks. They must come back: the next
        # step would otherwise pay for blocks that its plan does not know.
        homes = {key: entry.block for key, entry in self._entries.items() if entry.block.fixed}
        with slots.not_observing():
            yield
        for key, home in homes.items():
            entry = self._entries.get(key)
            away = entry is not None and entry.block is not home and not entry.is_live
            if entry is not None and away and home in slots.blocks:
                self._move(entry, home)

    def _fall_back(self, entry: _Entry, epoch: int | None) -> MemoryBlock:
        if epoch is not None:
            raise StaleStorageError(
                f"{entry.key!r} must come back to its slot, where autograd saved views of it, but "
                f"{entry.block.owner!r} is live there: the order of use differs from the planned "
                "one. Call plan_slots() again between steps, or use mode='resize'"
            )
        self._move(entry, None)
        return entry.block

    def _block(self, nbytes: int, released: str, *, fixed: bool = False) -> MemoryBlock:
        return MemoryBlock(self.device, nbytes, released, fixed=fixed, poison=self._poison)

    def _move(self, entry: _Entry, slot: MemoryBlock | None) -> None:
        """Give a key that is not live another block: a slot, or a new one of its own."""
        # What autograd saved of the old tensors keeps their storage: its bytes go all the same.
        if not entry.block.fixed:
            entry.block.empty()
        entry.move(slot or self._block(entry.nbytes, entry.released))

    # -- slots ----------------------------------------------------------------------------------

    def plan_slots(
        self, conflicts: Mapping[Key, Iterable[Key]] | None = None, *, dedicated: bool = False
    ) -> set[Key]:
        """Give keys that are never live together common fixed memory.

        Conflicts that were observed count beside those given. Live keys stay where they are.

        Args:
            conflicts: who may be live with whom at once; the pool adds what it has observed.
            dedicated: also give a slot to a key that can share with none (fixed addresses).

        Returns:
            The keys whose tensors are new ones: make their views again.

        Raises:
            ValueError: the pool's mode is `"resize"`.
            RuntimeError: a live key holds a slot.
        """
        if (slots := self._slots) is None:
            raise ValueError("this pool's mode is 'resize': make it with mode='slots'")
        # Memory of a live key must not move: its modules compute with views of it.
        live = self.live_keys()
        fixed = [key for key in live if self._entries[key].block.fixed]
        if fixed:
            raise RuntimeError(f"plan_slots while {fixed} are live in slots: release them first")
        sizes = {key: entry.nbytes for key, entry in self._entries.items() if key not in live}
        # Reads of a new slot while it is empty name the first of its keys.
        released = {key: entry.released for key, entry in self._entries.items()}
        self.bytes_resident -= slots.nbytes  # slots count while they are there, live or not
        homes = slots.plan(sizes, conflicts or {}, released, dedicated=dedicated)
        moved = set()
        for key, entry in self._entries.items():
            slot = homes.get(key)
            # A key that had a block of its own, and has no slot in the plan either, stays: its
            # views hold.
            if slot is not entry.block and (slot is not None or entry.block.fixed):
                self._move(entry, slot)
                moved.add(key)
        self.bytes_resident += slots.nbytes
        self.bytes_peak = max(self.bytes_peak, self.bytes_resident)
        return moved

    def describe(self) -> str:
        """A table: slots with their keys, keys with blocks of their own, bytes."""
        lines = [
            f"StoragePool({self.device}, {self.mode}): {self.bytes_resident} bytes resident, peak "
            f"{self.bytes_peak}"
        ]
        for at, block in enumerate(self._slots.blocks if self._slots else ()):
            keys = [key for key, entry in self._entries.items() if entry.block is block]
            lines.append(f"  slot {at}: {block.nbytes} bytes, holds {block.owner!r}, for {keys}")
        for key, entry in self._entries.items():
            if not entry.block.fixed:
                state = "live" if entry.is_live else "released"
                lines.append(f"  own: {key!r} {entry.nbytes} bytes, {state}")
        return "\n".join(lines)


class ScratchBuffers:
    """Short-lived flat tensors: those of a gradient live from its first write to its reduction.

    Freed tensors are kept for the next request of about the same size until `clear`: on a CPU a
    fresh allocation costs a page fault every 4 KiB, about as much as summing the buffer. A request
    that none of them fits lets them go, so that none is held beside a new one of another size.

    `keep_on_cpu` keeps free CPU buffers from step to step as well, whatever their sizes. They were
    held at the end of the last backward too, so a step whose peak is there needs no more memory.
    """

    def __init__(self, *, keep_on_cpu: bool = False) -> None:
        self._keep_on_cpu = keep_on_cpu
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.UntypedStorage]] = {}

    def share(self, other: "ScratchBuffers") -> None:
        """Take from, and give to, the same free tensors as `other` from now on."""
        self._free = other._free

    @property
    def nbytes(self) -> int:
        """Bytes of buffers that nobody uses now."""
        return sum(storage.nbytes() for free in self._free.values() for storage in free)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised flat tensor."""
        free, needed = self._free.get((dtype, device), []), numel * dtype.itemsize
        sizes = [(storage.nbytes(), at) for at, storage in enumerate(free)]
        fitting = [size for size in sizes if needed <= size[0] <= _WASTE * needed]
        if not fitting:
            if not (self._keep_on_cpu and device.type == "cpu"):
                free.clear()
            return torch.empty(numel, dtype=dtype, device=device)
        _, smallest = min(fitting)
        # Not a slice: a view would not be told from a part of somebody else's buffer.
        return torch.empty(0, dtype=dtype, device=device).set_(
            free.pop(smallest), 0, (numel,), (1,)
        )

    def give(self, tensor: torch.Tensor) -> None:
        """Give a tensor back; no work on it may be pending on another stream."""
        key = (tensor.dtype, tensor.device)
        self._free.setdefault(key, []).append(tensor.untyped_storage())

    def clear(self) -> None:
        """Return free tensors to the allocator."""
        for key in list(self._free):
            if not (self._keep_on_cpu and key[1].type == "cpu"):
                del self._free[key]
