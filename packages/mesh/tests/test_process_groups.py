"""How long process groups live: as long as their job, and no longer."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lamina.mesh import init_distributed
from lamina.mesh.groups import process_groups
from lamina.mesh.groups.process_groups import (
    GroupRef,
    World,
    ends_with_groups,
    group_of,
    group_ref,
    live_group,
)


@pytest.mark.ranks(2, init=False)
def test_no_group_of_a_job_outlives_it():
    gc.disable()  # other ranks see at once that this one has left its groups, cycles or not
    try:
        with init_distributed(device="cpu"):
            groups = [weakref.ref(dist.group.WORLD), weakref.ref(group_of("second", (0, 1)))]
        assert [group() for group in groups] == [None, None]
    finally:
        gc.enable()


@pytest.mark.ranks(1, init=False, reuse=False)
def test_holders_let_go_before_the_groups_end(ranks):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    holder, seen = Holder(dist.group.WORLD), []
    ends_with_groups(holder, lambda each: seen.append(dist.get_process_group_ranks(each.group)))
    ends_with_groups(holder, Holder.let_go)
    gone = Holder(dist.group.WORLD)
    ends_with_groups(gone, lambda each: seen.append("not held any more"))
    del gone
    ref = GroupRef(dist.group.WORLD)
    assert ref.group is live_group(group_ref(ref.group)) is dist.group.WORLD
    dist.destroy_process_group()
    assert seen == [[0]]
    assert ref.weak() is None
    with pytest.raises(RuntimeError, match=r"group 'default_pg' is destroyed"):
        live_group(ref)
    assert live_group(group_ref(None)) is None


class Holder:
    """Anything that holds a group."""

    def __init__(self, group):
        self.group = group

    def let_go(self):
        self.group = None


@pytest.mark.ranks(1, init=False, reuse=False)
def test_a_torch_without_a_table_of_communicators_tells_the_end_too(ranks, monkeypatch):
    table = SimpleNamespace(pg_coalesce_state={})
    world, ended = World(), []
    monkeypatch.setattr(World, "end", lambda self: ended.append(self))
    with monkeypatch.context() as patch:
        patch.setattr(process_groups, "c10d", SimpleNamespace(_world=table))
        process_groups._JobEnd(world)
    assert len(table.pg_coalesce_state) == 1
    assert not ended
    table.pg_coalesce_state.clear()  # as destroy_process_group() does
    assert ended == [world]
