"""`mesh_axis` on plain torch meshes: the same MeshAxis, or an error that lists what there is."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamina.mesh import AxisError, ParallelLayout
from lamina.mesh.engine import mesh_axis
from lamina_testing import device_type


def total(group) -> float:
    value = torch.tensor([float(2 ** dist.get_rank())])
    dist.all_reduce(value, group=group)
    return value.item()


@pytest.mark.ranks(2)
def test_a_plain_one_dimensional_mesh_has_its_axis() -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    axis = mesh_axis(mesh, "dp")
    assert (axis.name, axis.size, axis.rank, axis.ranks) == ("dp", 2, dist.get_rank(), (0, 1))
    assert axis.group is mesh.get_group("dp")
    assert total(axis.sibling("gather")) == 3.0
    assert axis.sibling("gather").group_desc == "dp:gather"


@pytest.mark.ranks(4)
def test_dimensions_of_a_plain_mesh_are_flattened_outer_first_and_once() -> None:
    mesh = init_device_mesh(device_type(), (2, 1, 2), mesh_dim_names=("dp_outer", "dp_shard", "tp"))
    rank = dist.get_rank()
    axis = mesh_axis(mesh, ("dp_outer", "dp_shard", "tp"))
    assert (axis.name, axis.size, axis.rank) == ("dp_outer_dp_shard_tp", 4, rank)
    assert total(axis.group) == 15.0
    assert mesh_axis(mesh, ["dp_outer", "dp_shard", "tp"]).group is axis.group
    # A dimension of one rank adds nobody, so no group is made for it.
    assert mesh_axis(mesh, ("dp_outer", "dp_shard")).group is mesh.get_group("dp_outer")
    assert mesh_axis(mesh, "dp_shard").group is None


@pytest.mark.ranks(4)
def test_dimensions_that_torch_flattened_are_found_by_name() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp_shard", "cp"))
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axis = mesh_axis(mesh, "dp_shard_cp")
    assert (axis.size, axis.rank, axis.name) == (4, dist.get_rank(), "dp_shard_cp")
    assert axis.group is flat.get_group()
    assert total(axis.sibling("gather")) == 15.0


@pytest.mark.ranks(4)
def test_a_submesh_has_the_axes_of_its_own_dimensions() -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    whole, part = mesh_axis(mesh, "tp"), mesh_axis(mesh["tp"], "tp")
    assert (part.ranks, part.rank) == (whole.ranks, whole.rank)
    assert total(part.group) == sum(2.0**rank for rank in part.ranks)
    with pytest.raises(AxisError, match=r"no axis 'dp' on DeviceMesh.*it has: tp"):
        mesh_axis(mesh["tp"], "dp")


@pytest.mark.ranks(8, backend="fake")
def test_a_parallel_mesh_and_its_torch_mesh_have_equal_axes() -> None:
    mesh = ParallelLayout(dp_replicate=2, tp=2).build(device_type())
    assert mesh_axis(mesh, "tp") == mesh_axis(mesh.mesh, "tp") == mesh.axis("tp")
    assert mesh_axis(mesh.mesh, ("dp_replicate", "dp_shard")).ranks == mesh.axis("dp").ranks


@pytest.mark.ranks(8, backend="fake")
def test_wrong_names_are_refused_with_those_there_are() -> None:
    mesh = init_device_mesh(device_type(), (4, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(AxisError, match=r"no axis 'dp_shard' on DeviceMesh.*it has: dp, tp\."):
        mesh_axis(mesh, "dp_shard")
    with pytest.raises(AxisError, match="name each once, outer first"):
        mesh_axis(mesh, ("tp", "dp"))
    with pytest.raises(AxisError, match="name each once"):
        mesh_axis(mesh, ("tp", "tp"))
    with pytest.raises(AxisError, match=r"no dimension names.*mesh_dim_names=\(\.\.\.\)"):
        mesh_axis(init_device_mesh(device_type(), (8,)), "dp")


@pytest.mark.ranks(4, backend="fake")
def test_ranks_out_of_order_are_refused() -> None:
    # torch sorts a group's ranks, so rank 0 would be second on the mesh and first in the group.
    mesh = DeviceMesh(device_type(), [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
    assert mesh_axis(mesh, "dp").ranks == (0, 2)
    with pytest.raises(AxisError, match=r"ranks \[1, 0\] out of order along \['tp'\]"):
        mesh_axis(mesh, "tp")


@pytest.mark.ranks(4, backend="fake")
def test_a_rank_beside_the_mesh_is_told_so() -> None:
    mesh = DeviceMesh(device_type(), [1, 2], mesh_dim_names=("dp",))
    with pytest.raises(AxisError, match="rank 0 is not on"):
        mesh_axis(mesh, "dp")
