"""The process groups of the running job: each made once, by its members alone.

Note [A group is made by its members]
Every rank calls `torch.distributed.new_group` for every group, so a mesh of 65,536 ranks with five
axes would cost each rank a hundred thousand calls. Here a rank makes only the groups it is in.
torch offers `use_local_synchronization=True` for that, but then it names a group after the number
of groups that the process has made so far. Members with different pasts (only the first and the
last pipeline stage make an embedding group) would wait for each other under different names
until the timeout. So groups are made by the function beneath `new_group`, with a name made of axis
and ranks (docs/decisions/0102-groups-made-by-their-members.md).

Note [Nothing of ours holds a group]
The threads of a gloo group end when the last reference to the group goes. If one is alive when the
interpreter ends, and drops the last reference to a tensor, it wants the interpreter's lock, cannot
have it, and the process aborts. So whatever outlives a call keeps a `GroupRef`, which is weak:
torch holds the groups of a job until `destroy_process_group`, and nobody else does. What is not
ours and holds groups (a `DeviceMesh`, torch's FSDP2) lets go of them when the job ends: see
`ends_with_groups`. See docs/decisions/0109-groups-end-when-they-are-destroyed.md.
"""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo as one_graph_break
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from lamina.mesh.errors import GroupCreationError
from lamina.mesh.watching.watchdog import Watchdog

Group: TypeAlias = dist.ProcessGroup
T = TypeVar("T")

PATIENCE = 8.0
"""Seconds: for a saver without progress, and for the groups after an error."""


class GroupRef:
    """A group for those that outlive it. See Note [Nothing of ours holds a group].

    References to one group are equal. `weak()` is the group, or None once it is destroyed.
    """

    # A field, and no base class: torch.compile looks through a plain `ref`, and not through a kind
    # of it.
    __slots__ = ("_title", "weak")

    def __init__(self, group: Group) -> None:
        self.weak = ref(group)
        self._title = str(group.group_desc)
        # The hash is that of the group, which can be asked only while there is one. The compiler of
        # torch 2.11 cannot trace it; a reference that is made in a graph is no key.
        if not torch.compiler.is_compiling():
            hash(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupRef) and self.weak == other.weak

    def __hash__(self) -> int:
        return hash(self.weak)

    @property
    def group(self) -> Group:
        """The group; RuntimeError if it is destroyed."""
        if (group := self.weak()) is None:
            raise RuntimeError(
                f"process group '{self._title}' is destroyed: destroy_process_group() has been "
                "called. Start the job anew, and make what communicates (mesh, wrapper, optimizer) "
                "after that."
            )
        return group


def group_ref(group: Group | None) -> GroupRef | None:
    """A reference that holds no group; None stands for a group of one, as everywhere."""
    return None if group is None else GroupRef(group)


def live_group(ref: GroupRef | None) -> Group | None:
    """The group that `group_ref` was given; RuntimeError if it is destroyed."""
    return None if ref is None else ref.weak() or ref.group  # which says so


def default_store() -> c10d.Store:
    """Return the store where the ranks of the running job have met."""
    return c10d._get_default_store()


def fake_store() -> c10d.Store:
    """Return the store of a simulated job, and register the backend `fake` on the way."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # torch sends messages in batches by the backend of their device; plans are made on meta.
    devices = dist.Backend.backend_capability["fake"]
    if "meta" not in devices:
        devices.append("meta")
    return FakeStore()


@dataclass(frozen=True)
class HostRuns:
    """Where the ranks of a group are.

    `near` has those on the host of this rank, this one among them. `run` is the number of all ranks
    if they are on one host; else the largest power of two that divides it, such that every aligned
    run of so many ranks is on one host.
    """

    near: tuple[int, ...]
    run: int


class Saver(Protocol):
    """What works in the background over process groups, and is to end before they do."""

    def finish(self, patience: float) -> bool:
        """Wait as long as the work goes on; give up after `patience` seconds without progress.

        True says that nothing is left. What the work raised is not raised here.
        """
        ...


class _JobEnd:
    """What `destroy_process_group()` calls first of all, before a group ends.

    Torch finishes the communicators in its table so, and this is one that does not communicate. A
    torch without that table (2.11 has it) drops this object on the way, which then is the sign.
    """

    def __init__(self, world: "World") -> None:
        self._world: World | None = world
        table: Any = c10d._world
        if hasattr(table, "comms"):
            table.comms.append(self)
        else:
            table.pg_coalesce_state[self] = []

    def finalize(self) -> None:
        """The groups of the job end."""
        world, self._world = self._world, None
        if world is not None:
            world.end()

    __del__ = finalize


@dataclass
class World:
    """What Lamina knows of one default process group: its timeout, what was made in it.

    Groups are by description and ranks. `host_groups` are those inside and between hosts that were
    made of a group. `ranks_per_host` is None until `init_distributed` has found it out. `holders`
    are what lets go of the groups when they end, by its address and what is called with it.
    """

    timeout: timedelta | None = None
    savers: WeakSet[Saver] = field(default_factory=WeakSet)
    holders: WeakValueDictionary[tuple[int, Callable[..., None]], Any] = field(
        default_factory=WeakValueDictionary
    )
    watchdog: Watchdog | None = None
    meshes: int = 0
    ranks_per_host: int | None = None
    groups: WeakValueDictionary[tuple[str, tuple[int, ...]], Group] = field(
        default_factory=WeakValueDictionary
    )
    host_runs: WeakKeyDictionary[Group, HostRuns] = field(default_factory=WeakKeyDictionary)
    host_groups: WeakKeyDictionary[Group, tuple[GroupRef, GroupRef]] = field(
        default_factory=WeakKeyDictionary
    )

    def finish_savers(self, patience: float) -> None:
        """Wait for the savers, each until it makes no progress for `patience` seconds."""
        for saver in list(self.savers):
            saver.finish(patience)

    def end(self) -> None:
        """The groups end now. What works over them ends first, and what holds them lets go."""
        self.finish_savers(PATIENCE)
        for (_, let_go), holder in list(self.holders.items()):
            let_go(holder)
        if self.watchdog is not None:
            self.watchdog.close()
            self.watchdog.join()


# Communicators belong to a started job, not to a mesh: equal meshes must share them, and torch
# keeps them alive until the job ends anyway. Keyed weakly by the job's default group, so that
# nothing survives destroy_process_group(); no mesh and no model is referred to from here.
_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def current_world() -> World:
    """The running job's record; RuntimeError if torch.distributed has not been started."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has not been started: call lamina.mesh.init_distributed() first "
            "(without torchrun it starts a world of one)."
        )
    default = dist.group.WORLD
    if default is None:  # pragma: no cover - is_initialized() says otherwise
        raise RuntimeError("torch.distributed says it is started but has no default group.")
    if (world := _worlds.get(default)) is None:
        world = _worlds[default] = World()
        _JobEnd(world)
    return world


def running_watchdog() -> Watchdog | None:
    """The watchdog of the running job, if it has one."""
    if not dist.is_available() or not dist.is_initialized() or dist.group.WORLD is None:
        return None
    world = _worlds.get(dist.group.WORLD)
    return None if world is None else world.watchdog


def ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """The global ranks of a group; None if torch.distributed has not made it."""
    places = c10d._world.pg_group_ranks.get(group)
    return None if places is None else list(places)


def ends_before_groups(saver: Saver) -> None:
    """Have `Runtime` wait for a saver (held weakly) before it destroys the process groups."""
    if dist.is_available() and dist.is_initialized():
        current_world().savers.add(saver)


def ends_with_groups(holder: T, let_go: Callable[[T], None]) -> None:
    """Call `let_go(holder)` when the job's groups end, unless the holder (held weakly) has gone."""
    if dist.is_available() and dist.is_initialized():
        current_world().holders[id(holder), let_go] = holder


def watch_mesh(mesh: DeviceMesh) -> None:
    """Have a mesh of torch's, which holds its groups (since 2.13), let go when they end."""
    ends_with_groups(mesh, _forget_groups)


def _forget_groups(mesh: DeviceMesh) -> None:
    for each in (mesh, mesh._get_root_mesh()):
        getattr(each, "_pg_registry", {}).clear()  # a copy of what torch also finds by name


def group_of(
    name: str, ranks: Sequence[int], purpose: str = "", like: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """The process group `name` over `ranks`, made at the first call and found again later.

    The first call is collective over `ranks` (and over nobody else): members must make the groups
    that they share in the same order.

    `name` is the axis, which becomes the description of the group (with ":purpose" if given, which
    tells several communicators over the same ranks apart). The group numbers its ranks in their
    order here. `like` is a group whose backend the new one gets; None is that of the job.
    GroupCreationError: a member did not come in time, or the backend refused.
    """
    world = current_world()
    description = f"{name}:{purpose}" if purpose else name
    key = (description, tuple(ranks))
    group = world.groups.get(key)
    if group is None:
        group = world.groups[key] = _make_group(description, key[1], world.timeout, like)
    return group


@one_graph_break  # a compiled block may be what first needs it
def _make_group(
    description: str,
    ranks: tuple[int, ...],
    timeout: timedelta | None,
    like: dist.ProcessGroup | None,
) -> dist.ProcessGroup:
    default = c10d._get_default_group()
    _, store = c10d._world.pg_map[default]
    backend, _ = c10d._world.pg_map[default if like is None else like]
    backend = _serving_hosts(backend)
    places = {rank: place for place, rank in enumerate(ranks)}
    # Equal on all members, whatever they did before: see Note [A group is made by its members].
    digest = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
    limit = timeout if timeout is not None else c10d._get_default_timeout(dist.Backend(backend))
    watchdog = running_watchdog()
    wait = contextlib.nullcontext() if watchdog is None else watchdog.making(description, ranks)
    # Note [No bound device]
    # With a bound device torch makes NCCL groups by splitting the default communicator. Every rank
    # of the job must take part in a split, and only the members come here: the others would be
    # waited for without end. See docs/decisions/0104-no-bound-device.md.
    device, default.bound_device_id = default.bound_device_id, None
    try:
        with wait:
            made, _ = c10d._new_process_group_helper(
                len(ranks),
                places[default.rank()],
                list(ranks),
                backend,
                store,
                cast("c10d.GroupName", f"lamina:{description}:{digest}"),
                timeout=limit,
                group_desc=description,
            )
    except (RuntimeError, ValueError) as error:
        raise GroupCreationError(
            f"rank {default.rank()} couldn't make the process group '{description}' over ranks "
            f"{_shorten(ranks)} (backend {backend}): {error}\n"
            "Making a group waits for all of its members: see whether one of these ranks failed "
            "earlier, asks for its groups in another order, or never asks for this one."
        ) from error
    finally:
        default.bound_device_id = device
    group = cast("dist.ProcessGroup", made)
    c10d._world.pg_group_ranks[group] = places
    return group


def _serving_hosts(backend: str) -> str:
    """Give a group of NCCL alone a backend for the CPU, too.

    Hosts agree on numbers in each backward. Numbers that travel over NCCL lie on the GPU, and to
    read them the host would wait for all that is queued there.
    """
    alone = backend in ("nccl", "cuda:nccl") and dist.is_gloo_available()
    return "cpu:gloo,cuda:nccl" if alone else backend


def _shorten(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 16:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:4]))}, ... {ranks[-1]}] ({len(ranks)} ranks)"
