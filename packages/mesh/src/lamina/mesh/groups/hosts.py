"""Which ranks of the running job share a host, and the groups over and inside hosts.

Note [Ranks of a host are an aligned run]
All ranks have to agree on where hosts begin, or they would wait for each other in different
exchanges. `init_distributed` finds it out once, over the store where the ranks have met: ranks
r and s share a host if r // n == s // n, and n is the greatest common divisor of all places where
the host changes. So n is the size of equal hosts, less where hosts differ, and 1 where ranks are
dealt out to the hosts in turn. Sums have the same bits for any n (see
docs/decisions/0314-sums-know-hosts.md), so a wrong one costs time alone.

Note [No collective makes a group]
To make a group waits for all of its members. If the first sum of a group made the groups over
hosts, two ranks that begin the sums of two groups in different orders would wait for each other.
So `make_host_groups` is called where a group is made, which all members do in one order, and
`host_groups` only looks them up. See docs/decisions/0315-host-groups-come-with-their-group.md.
"""

import math
import socket
from collections.abc import Sequence
from itertools import compress, pairwise

import torch.distributed as dist

from lamina.mesh.errors import EnvironmentVariableError
from lamina.mesh.groups.process_groups import (
    GroupRef,
    HostRuns,
    current_world,
    default_store,
    group_of,
    ranks_of,
)
from lamina.mesh.launching.variables import environment
from lamina.mesh.watching.host_watch import host_words


def _host_name(rank: int) -> str:
    """A text that is the same on all ranks of this host: LAMINA_RANKS_PER_HOST says otherwise."""
    asked = _asked(dist.get_world_size())
    if asked is not None:
        return str(rank // asked)
    try:
        return str(host_words()[:2])  # containers of one host may differ in their processes
    except OSError:
        return socket.gethostname()


def _asked(world_size: int) -> int | None:
    asked = environment().ranks_per_host if world_size > 1 else None  # one rank needs no hosts
    if asked is not None and world_size % asked:
        raise EnvironmentVariableError(
            f"LAMINA_RANKS_PER_HOST={asked} does not divide the {world_size} ranks of the job: "
            "give a divisor, or unset it, so that the hosts are found."
        )
    return asked


def _equal_run(hosts: Sequence[object]) -> int:
    """The largest n such that each aligned run of n ranks is on one host, given each rank's."""
    changes = (place for place, (a, b) in enumerate(pairwise(hosts), 1) if a != b)
    return math.gcd(len(hosts), *changes)


def agree_on_hosts() -> None:
    """Find out which ranks share a host. Collective over all ranks of the job.

    EnvironmentVariableError says that LAMINA_RANKS_PER_HOST does not divide the number of ranks.
    """
    # Over the store and without a group: groups are made by what this finds out.
    world, rank, size = current_world(), dist.get_rank(), dist.get_world_size()
    if size == 1 or world.ranks_per_host is not None:
        return
    store, key = default_store(), f"lamina:hosts:{size}"
    store.set(f"{key}:{rank}", _host_name(rank))
    if rank == 0:
        names = store.multi_get([f"{key}:{each}" for each in range(size)])
        store.set(key, str(_equal_run(names)))
    world.ranks_per_host = int(store.get(key))
    world.host_runs.clear()


def ranks_per_host() -> int:
    """Ranks r and s of the job share a host if r // n == s // n, for this n.

    A job that `init_distributed` has not started is taken to be on one host, unless
    LAMINA_RANKS_PER_HOST says otherwise.
    """
    size = dist.get_world_size()
    return current_world().ranks_per_host or _asked(size) or size


def split_over_hosts(ranks: Sequence[int], rank: int, per_host: int) -> HostRuns:
    """Where the ranks of a group are, as rank number `rank` of it sees it.

    The global `ranks` are in any order (torch's `new_group` has `sort_ranks=False`).
    """
    hosts = [each // per_host for each in ranks]
    near = tuple(compress(range(len(hosts)), [host == hosts[rank] for host in hosts]))
    run = _equal_run(hosts)
    return HostRuns(near, run if run == len(hosts) else run & -run)


def host_runs(group: dist.ProcessGroup) -> HostRuns:
    """Where the ranks of `group` are: on one host, if torch.distributed has not made the group."""
    ranks = ranks_of(group)
    if ranks is None:
        return HostRuns(tuple(range(group.size())), group.size())
    known = current_world().host_runs
    runs = known.get(group)
    if runs is None:
        runs = known[group] = split_over_hosts(ranks, group.rank(), ranks_per_host())
    return runs


def host_groups(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """The groups inside this host and over the hosts that `make_host_groups` made of `group`.

    This never communicates. See Note [No collective makes a group]. Where none were made (None),
    sums of `group` are one exchange, with the same bits.
    """
    refs = current_world().host_groups.get(group)
    return None if refs is None else (refs[0].group, refs[1].group)


def make_host_groups(group: dist.ProcessGroup) -> None:
    """Make two groups whose product is `group`: one inside this host, and one over the hosts.

    The first has the aligned run of ranks around this one (see `HostRuns.run`), the second the
    ranks at the same place of all runs. Nothing is made where there is nothing to gain: no two
    neighbours share a host, or all ranks do. Collective over the ranks of `group` at the first
    call: ranks that share several groups make this call for each in one order.

    The groups of a `ParallelMesh` and `MeshAxis.sibling("reduce")` come with theirs. Call this for
    a group of your own that spans hosts, right after `new_group`.

    Raises:
        GroupCreationError: a member did not come in time, or the backend refused.

    Examples:
        >>> group = torch.distributed.new_group()
        >>> make_host_groups(group)  # one host has them all: nothing to make
    """
    known = current_world().host_groups
    run, size, rank = host_runs(group).run, group.size(), group.rank()
    if group in known or run in (1, size):
        return
    ranks, place = dist.get_process_group_ranks(group), rank % run
    begin = rank - place
    # Named after the group, because groups over the same ranks are used in orders of their own.
    inside = group_of(group.group_name, ranks[begin : begin + run], "inside hosts", group)
    between = group_of(group.group_name, ranks[place::run], "between hosts", group)
    known[group] = GroupRef(inside), GroupRef(between)
