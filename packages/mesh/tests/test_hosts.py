"""Which ranks share a host: what is found, and the groups that follow from it."""

from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed, make_host_groups
from lamina.mesh.engine import (
    EnvironmentVariableError,
    host_groups,
    host_runs,
    mesh_axis,
    ranks_per_host,
    split_over_hosts,
)
from lamina.mesh.groups import hosts
from lamina_testing import device_type


@pytest.mark.parametrize(
    ("ranks", "per_host", "rank", "near", "run"),
    [
        (range(24), 8, 9, (8, 16), 8),
        (range(12), 6, 9, (6, 12), 2),  # 6 = 2 x 3
        (range(6), 3, 4, (3, 6), 1),
        (range(20), 8, 17, (16, 20), 4),  # the last host is smaller
        (range(0, 32, 2), 8, 5, (4, 8), 4),  # every second rank: tp=2 inside
        (range(0, 64, 8), 8, 5, (5, 6), 1),  # one rank per host
        (range(4, 12), 8, 1, (0, 4), 4),  # from the middle of one host to that of another
        (range(8), 8, 5, (0, 8), 8),
        (range(6), 6, 4, (0, 6), 6),  # one host has them all
        ((3, 2, 1, 0), 2, 0, (0, 2), 2),  # in descending order
        ((0, 2, 1, 3), 2, 2, (0, 4, 2), 1),
        ((0, 2, 3, 1), 2, 1, (1, 3), 1),
    ],
)
def test_runs_are_all_ranks_of_a_host_or_the_largest_powers_of_two_that_one_has(
    ranks, per_host, rank, near, run
):
    places = split_over_hosts(ranks, rank, per_host)
    assert (places.near, places.run) == (tuple(range(*near)), run)
    for begin in range(0, len(ranks), run):
        assert len({each // per_host for each in ranks[begin : begin + run]}) == 1


@pytest.mark.ranks(4, init=False)
@pytest.mark.parametrize(
    ("names", "found"), [("aabb", 2), ("aaab", 1), ("abab", 1), ("aaaa", 4)], ids=str
)
def test_a_job_finds_out_who_shares_a_host(names, found):
    with (
        mock.patch.object(hosts, "_host_name", lambda rank: names[rank]),
        init_distributed(device="cpu", soft_limit=None) as runtime,
    ):
        group = dist.group.WORLD
        assert ranks_per_host() == found
        assert list(host_runs(group).near) == (
            [runtime.rank // found * found + place for place in range(found)]
        )
        assert host_groups(group) is None  # nobody has made them
        make_host_groups(group)
        groups = host_groups(group)
        assert (groups is None) is (found != 2)
        if groups is not None:
            inside, between = map(dist.get_process_group_ranks, groups)
            host, place = divmod(runtime.rank, 2)
            assert (inside, between) == ([2 * host, 2 * host + 1], [place, place + 2])
            make_host_groups(group)
            assert host_groups(group) == groups


def test_a_job_of_one_rank_has_one_host_whatever_the_variable_says(monkeypatch):
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "8")
    with init_distributed(device="cpu"):
        assert ParallelLayout().build("cpu").describe().startswith("1 rank on cpu, this is rank 0")


@pytest.mark.ranks(4, backend="gloo")
def test_groups_over_hosts_have_the_backend_of_their_group(monkeypatch):
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "2")
    group = dist.new_group(backend="cpu:gloo")  # the job's serves CUDA too
    assert dist.get_backend_config(group) != dist.get_backend_config()
    make_host_groups(group)
    for each in host_groups(group):
        assert dist.get_backend_config(each) == dist.get_backend_config(group)


@pytest.mark.ranks(4, reuse=False)  # whether the job's own group has hosts is asked once
def test_groups_of_a_mesh_that_sum_come_with_groups_over_hosts(monkeypatch):
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "2")
    for mesh in (
        ParallelLayout().build(device_type()),
        init_device_mesh(device_type(), (4,), mesh_dim_names=["dp"]),
    ):
        axis = mesh_axis(mesh, "dp")
        assert (host_groups(axis.group) is not None) is isinstance(mesh, ParallelMesh)
        assert host_groups(axis.sibling("reduce")) is not None
        assert host_groups(axis.sibling("gather")) is None  # gathers know no hosts


@pytest.mark.ranks(2)
def test_a_job_that_others_have_started_is_on_one_host_unless_a_variable_says_more(monkeypatch):
    assert ranks_per_host() == 2
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "1")
    assert ranks_per_host() == 1
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "3")
    with pytest.raises(EnvironmentVariableError, match="=3 does not divide the 2 ranks of the job"):
        ranks_per_host()
