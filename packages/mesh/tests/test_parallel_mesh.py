"""Meshes over real and simulated ranks: the right groups, made once, by their members alone."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lamina.mesh import AxisError, ParallelLayout, init_distributed
from lamina.mesh.engine import DENSE_AXES, DERIVED_AXES, EXPERT_AXES, GroupCreationError, mesh_axis
from lamina.mesh.groups.process_groups import current_world, group_of
from lamina_testing import device_type
from lamina_testing.parametrization import needs_torch
from lamina_testing.work import executed_by

ALL_AXES = [*dict.fromkeys([*DENSE_AXES, *EXPERT_AXES, *DERIVED_AXES])]
FOUR = [{}, {"tp": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 2, "ep": 2}, {"tp": 2, "ep": 4}]
EIGHT = [
    {"pp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp_replicate": 2, "ep": 2},
    {"pp": 4, "tp": 2, "expert_tp": 2},
    {"dp_replicate": 2, "tp": 2, "ep": 2, "expert_tp": 2},
]


def check_groups_against_numpy(sizes: dict[str, int]) -> None:
    mesh = ParallelLayout(**sizes).build(device_type())
    rank = dist.get_rank()
    for axes, torch_mesh in ((DENSE_AXES, mesh.mesh), (EXPERT_AXES, mesh.expert_mesh)):
        array = np.arange(dist.get_world_size()).reshape(torch_mesh.shape)
        place = [int(found[0]) for found in np.nonzero(array == rank)]
        assert torch_mesh.mesh_dim_names == axes
        assert torch_mesh.get_coordinate() == tuple(place)
        for dim, name in enumerate(axes):
            line = array[tuple(slice(None) if d == dim else p for d, p in enumerate(place))]
            axis = mesh.axis(name)
            assert (axis.ranks, axis.size, axis.rank) == (tuple(line), len(line), place[dim])
            assert mesh.coordinate[name] == axis.rank == torch_mesh.get_local_rank(name)
            assert (axis.group is None) == (len(line) == 1)
    for name in ALL_AXES:
        check_sum(mesh.axis(name), mesh.group(name))
        check_sum(mesh.axis(name), mesh[name].get_group())


def check_sum(axis, group) -> None:
    """Who takes part in a collective is the test that counts."""
    total = torch.tensor([float(2 ** dist.get_rank())])
    if group is not None:
        dist.all_reduce(total, group=group)
        assert dist.get_rank(group) == axis.rank
    assert total.item() == sum(2.0**rank for rank in axis.ranks)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", FOUR, ids=str)
def test_collectives_reach_the_ranks_of_the_axis_on_four(sizes: dict[str, int]) -> None:
    check_groups_against_numpy(sizes)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("sizes", EIGHT, ids=str)
def test_collectives_reach_the_ranks_of_the_axis_on_eight(sizes: dict[str, int]) -> None:
    check_groups_against_numpy(sizes)


@pytest.mark.ranks(2)
def test_a_mesh_can_be_made_while_tensors_are_made_on_another_device() -> None:
    with torch.device("meta"):
        mesh = ParallelLayout(tp=2).build(device_type())
    assert mesh["tp"].mesh.tolist() == [0, 1]
    assert not mesh.mesh.mesh.is_meta


@pytest.mark.ranks(4)
def test_equal_meshes_share_groups_and_siblings() -> None:
    first, second = (ParallelLayout(tp=2, ep=2).build(device_type()) for _ in range(2))
    for name in ALL_AXES:
        assert first.group(name) is second.group(name)
        assert first.axis(name).sibling("gather") is second.axis(name).sibling("gather")
    assert mesh_axis(first.mesh, "tp").sibling("gather") is first.axis("tp").sibling("gather")


@pytest.mark.ranks(4)
def test_axes_over_the_same_ranks_share_one_group_whoever_asks_first() -> None:
    mesh = ParallelLayout(cp=2).build(device_type())
    # Some members know the group by one name first, some by another: they must find each other.
    names = ["expert_dp", "dp_shard_cp", "dp_cp"]
    groups = {mesh.group(name) for name in (names if mesh.rank % 2 else reversed(names))}
    assert len(groups) == 1
    check_sum(mesh.axis("expert_dp"), *groups)
    assert mesh.group("dp") is mesh.group("dp_shard")


@pytest.mark.ranks(2)
def test_a_sibling_is_another_communicator_made_once() -> None:
    axis = ParallelLayout().build(device_type()).axis("dp_shard")
    sibling = axis.sibling("gather")
    assert sibling is not axis.group
    assert sibling is axis.sibling("gather")
    assert sibling is not axis.sibling("reduce")
    assert sibling.group_desc == "dp_shard:gather"
    assert axis.group.group_desc == "dp_shard"
    check_sum(axis, sibling)
    with pytest.raises(ValueError, match="name what the second communicator is"):
        axis.sibling("")


@pytest.mark.ranks(4)
def test_groups_can_be_made_by_members_with_different_pasts() -> None:
    # The embedding group exists on stages 0 and 3 only. What all stages make afterwards must
    # still be found, though some have made more groups than others.
    mesh = ParallelLayout(pp=4).build(device_type())
    embedding = mesh.embedding_group
    assert (embedding is None) == (mesh.coordinate["pp"] in (1, 2))
    if embedding is not None:
        check_sum(mesh.embedding_axis, embedding)
        assert mesh.embedding_axis.ranks == (0, 3)
    check_sum(mesh.axis("pp"), mesh.axis("pp").sibling("after"))


@pytest.mark.ranks(4)
def test_the_embedding_group_joins_first_and_last_stage_at_equal_coordinates() -> None:
    mesh = ParallelLayout(pp=2, tp=2).build(device_type())
    assert mesh.embedding_axis.ranks == (mesh.coordinate["tp"], mesh.coordinate["tp"] + 2)
    assert mesh.embedding_group.group_desc == "embedding"


@pytest.mark.ranks(1)
def test_one_stage_has_an_embedding_axis_of_one_and_needs_no_group() -> None:
    mesh = ParallelLayout().build(device_type())
    assert mesh.embedding_axis.size == 1
    assert mesh.embedding_group is None
    assert all(mesh.group(name) is None for name in ALL_AXES)
    assert mesh.axis("dp").sibling("gather") is None


@pytest.mark.ranks(64, backend="fake")
def test_axes_can_be_taken_as_one() -> None:
    mesh = ParallelLayout(pp=2, dp_replicate=2, cp=2, tp=2, ep=8).build(device_type())
    assert mesh.axis(("dp_replicate", "dp_shard")) == mesh.axis("dp")
    assert mesh.axis(("dp", "cp")) == mesh.axis("dp_cp")
    assert mesh.axis(("pp", "tp")).ranks == (0, 1, 32, 33)
    assert mesh.axis(("pp", "tp")).name == "pp_tp"
    assert mesh.axis(("dp_replicate", "expert_dp")).size == 4
    assert mesh["dp_shard", "tp"].mesh_dim_names == ("dp_shard", "tp")
    assert mesh["ep", "expert_tp"].shape == (8, 1)


@pytest.mark.ranks(8, backend="fake")
def test_axes_that_are_not_there_are_refused_with_those_that_are() -> None:
    mesh = ParallelLayout(tp=2).build(device_type())
    with pytest.raises(AxisError, match=r"no axis 'sp' on ParallelMesh\(.*it has: pp, dp_rep.*ep"):
        mesh.axis("sp")
    with pytest.raises(AxisError, match="mix dense axes"):
        mesh.axis(("tp", "ep"))
    with pytest.raises(AxisError, match="outer first, in the mesh's order"):
        mesh.axis(("tp", "dp_shard"))
    with pytest.raises(AxisError, match="outer first"):
        mesh.axis(("dp_shard", "dp"))
    with pytest.raises(AxisError, match="no axis named"):
        mesh.axis(())
    with pytest.raises(AxisError, match="mix dense axes"):
        mesh["tp", "ep"]


@pytest.mark.ranks(8, backend="fake")
def test_a_copied_module_keeps_the_mesh_and_a_pickled_one_says_why_not() -> None:
    mesh = ParallelLayout(tp=2).build(device_type())
    holder = torch.nn.Linear(1, 1)
    holder.mesh, holder.tp = mesh, mesh.axis("tp")
    twin = copy.deepcopy(holder)
    assert twin.mesh is mesh
    assert twin.tp is mesh.axis("tp")
    with pytest.raises(TypeError, match=r"save mesh\.layout and build it again"):
        pickle.dumps(mesh)


@pytest.mark.ranks(64, backend="fake")
def test_describe_shows_this_rank_and_counts_the_others() -> None:
    mesh = ParallelLayout(pp=2, tp=4, ep=4).build(device_type())
    text = mesh.describe(max_ranks=6)
    lines = text.splitlines()
    assert lines[0] == "64 ranks on cpu, this is rank 0"
    assert any(line.split() == ["tp", "4", "1", "0"] for line in lines)
    assert any(line.split() == ["pp", "2", "32", "0"] for line in lines)
    assert any(line.split()[0] == "0*" for line in lines if line)
    assert lines[-1] == "... and 58 more ranks"
    # rank 5: dp_shard 1, tp 1; expert_dp 1, ep 1
    assert any(line.split() == "5 0 0 1 0 1 1 1 0".split() for line in lines)


def use_a_mesh_of(world: int, layout: ParallelLayout) -> None:
    """Build every axis and group of a mesh from one rank's place in it."""
    rank = world - 11_215
    with init_distributed("fake", world_size=world, rank=rank):
        mesh = layout.build(device_type())
        for name in ALL_AXES:
            assert mesh[name].get_local_rank() == mesh.axis(name).rank
            mesh.axis(name).sibling("gather")
        assert mesh.axis("dp_cp").size == world // 128
        assert rank in mesh.embedding_axis.ranks if mesh.embedding_axis else True
        assert "65,000" not in mesh.describe()
        assert ParallelLayout().build(device_type()).axis("dp").size == world
        assert len({mesh.group(name) for name in ALL_AXES}) <= len(ALL_AXES)


@needs_torch(2, 13, "its DeviceMesh flattens its layout by 36 calls per rank")
def test_a_mesh_of_65536_ranks_takes_the_calls_of_one_of_16384() -> None:
    """What grows with the world is a line for each rank of a list, and no call (law 10)."""
    layout = ParallelLayout(pp=16, dp_replicate=4, cp=2, tp=8, ep=64)
    use_a_mesh_of(16_384, layout)  # imports and first uses are counted nowhere
    small = executed_by(lambda: use_a_mesh_of(16_384, layout))
    large = executed_by(lambda: use_a_mesh_of(65_536, layout))
    assert large.calls < 1.1 * small.calls
    assert large.lines - small.lines < 40 * (65_536 - 16_384)


def test_a_mesh_before_the_start_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"call lamina\.mesh\.init_distributed\(\) first"):
        ParallelLayout().build(device_type())


@pytest.mark.ranks(2)
def test_a_member_that_never_comes_is_reported_with_axis_and_ranks(ranks) -> None:
    mesh = ParallelLayout().build(device_type())
    current_world().timeout = timedelta(seconds=1)
    if ranks.rank == 0:
        with pytest.raises(
            GroupCreationError,
            match=r"rank 0 couldn't make the process group 'dp_shard:lonely' over ranks \[0, 1\]",
        ):
            mesh.axis("dp").sibling("lonely")


@pytest.mark.ranks(2)
def test_groups_are_made_by_members_alone_in_a_world_bound_to_a_device() -> None:
    # Bound, torch would make an NCCL group by splitting the default communicator, and a split waits
    # for all ranks. gloo can't split; that torch doesn't even look for what to split can be seen.
    def splits(_: dist.ProcessGroup) -> None:
        raise AssertionError("this group would be split off the default one")

    distributed_c10d._get_split_source = splits
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    group_of("alone", (dist.get_rank(),))
    assert world.bound_device_id == torch.device("cuda", 0)
    world.bound_device_id = None
