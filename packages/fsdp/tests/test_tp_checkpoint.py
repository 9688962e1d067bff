"""Parameters that tp has cut go through DCP as the model's own tensors, to any mesh and none."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard, fully_shard_optimizer, shard_module
from lamina.mesh import ParallelLayout, mark
from lamina.mesh.engine import mesh_axis
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

from .tp_models import (
    Net,
    batch,
    make_whole,
    mesh_2x2,
    put_together,
    take_pieces,
)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def on(mesh, strategy, axis):
    """Another model than the one that is saved: what it has comes from the checkpoint."""
    torch.manual_seed(99)
    model = Net(axis)
    return fully_shard(
        model, adamw(model), device_mesh=mesh, dp_shard_dim="dp", zero_dp_strategy=strategy
    )


def step(model, optimizer, number):
    """The same batch on all ranks, so that any number of them makes the same step."""
    model(batch(0, number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def averages(model, optimizer):
    """Whole `exp_avg`s of this tp rank's parameters by name."""
    found = {}
    for name, parameter in model.named_parameters():
        value = optimizer.state[parameter]["exp_avg"]
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


def load(model, optimizer, path, group=None):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path, process_group=group)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("saved", "loaded"), [(0, 3), (3, 1)])
def test_saved_on_2x2_loaded_on_other_meshes_and_without_tp(saved, loaded, ranks, tmp_path):
    mesh = mesh_2x2()
    axis = mesh_axis(mesh, "tp")
    model, optimizer = on(mesh, saved, axis)
    take_pieces(model, make_whole(), axis) if saved == 0 else None
    for number in range(2):
        step(model, optimizer, number)
    path = str(tmp_path / "checkpoint")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    whole = dict(make_whole().named_parameters())
    assert all(stored[f"model.{name}"].size == value.shape for name, value in whole.items())
    wanted = [
        put_together(one, model, axis)
        for one in (full_parameters(model), averages(model, optimizer))
    ]

    other, its = on(mesh_2x2(), loaded, axis)  # tp 2, the same ranks: goes on with the same bits
    load(other, its, path)
    for one in ((model, optimizer), (other, its)):
        step(*one, 2)
    assert_same([full_parameters(other)], [full_parameters(model)])

    flat = init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))  # no tp
    one_tp = init_device_mesh(device_type(), (4, 1), mesh_dim_names=("dp", "tp"))
    for where, its_axis in ((flat, None), (one_tp, mesh_axis(one_tp, "tp"))):
        other, its = on(where, loaded, its_axis)
        load(other, its, path)
        assert_same((full_parameters(other), averages(other, its)), wanted)

    pair = DeviceMesh(device_type(), [[0, 1]], mesh_dim_names=("dp", "tp"))  # tp 2, another dp
    alone = torch.distributed.new_group([0, 1])
    if ranks.rank < 2:
        its_axis = mesh_axis(pair, "tp")
        other, its = on(pair, loaded, its_axis)
        load(other, its, path, alone)
        found = [
            put_together(one, other, its_axis)
            for one in (full_parameters(other), averages(other, its))
        ]
        assert_same(found, wanted)


@pytest.mark.ranks(4)
def test_saved_without_tp_loaded_on_2x2_and_a_whole_tensor_by_hand(ranks, tmp_path):
    flat = init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))
    model, optimizer = on(flat, 3, None)
    step(model, optimizer, 0)
    path = str(tmp_path / "checkpoint")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    mesh = mesh_2x2()
    axis = mesh_axis(mesh, "tp")
    other, its = on(mesh, 3, axis)
    load(other, its, path)
    found = [
        put_together(one, other, axis) for one in (full_parameters(other), averages(other, its))
    ]
    assert_same(found, [full_parameters(model), averages(model, optimizer)])
    whole = make_whole()
    other.load_state_dict(whole.state_dict())
    found = put_together(full_parameters(other), other, axis)
    for name, value in whole.named_parameters():
        assert torch.equal(found[name], value), name


@pytest.mark.ranks(2)
def test_whole_tensors_of_what_tp_has_cut_are_refused_by_name(ranks):
    settings = {"dp_shard_dim": "dp", "preproc_state_dict_for_dcp_ckpt": False}
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    torch_made = OddNet(width=6)
    parallelize_module(torch_made.blocks[0], mesh["tp"], {"up": ColwiseParallel()})
    for model in (Net(mesh_axis(mesh, "tp")), torch_made):
        for _ in range(2):  # nothing has happened: the second time is the first
            with pytest.raises(ValueError, match=r"ckpt=False: [\w.]+ of shape .* is cut"):
                fully_shard(model, device_mesh=mesh, **settings)
    no_tp = init_device_mesh(device_type(), (2, 1), mesh_dim_names=("dp", "tp"))
    model = fully_shard(Net(mesh_axis(no_tp, "tp")), device_mesh=no_tp, **settings)
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("module_by_module", [False, True])
def test_dtensors_are_saved_as_the_tensors_they_are_parts_of(module_by_module, ranks, tmp_path):
    mesh, path = mesh_2x2(), str(tmp_path / "checkpoint")
    torch.manual_seed(1)
    model = OddNet(width=6)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if module_by_module:
        for module in (*model.blocks, model):
            shard_module(module, mesh["dp"])
        optimizer = fully_shard_optimizer(adamw(model), model)
    else:
        model, optimizer = fully_shard(model, adamw(model), device_mesh=mesh, dp_shard_dim="dp")
    model(inputs(model, 0)).square().mean().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    plain = OddNet(width=6)
    its = adamw(plain)
    plain, its = fully_shard(
        plain, its, device_mesh=init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))
    )
    load(plain, its, path)
    torch.manual_seed(1)
    reference = OddNet(width=6)
    stepper = adamw(reference)
    reference(inputs(reference, 0)).square().mean().backward()
    stepper.step()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(full_parameters(plain)[name], value.detach(), msg=name)
    for name, value in averages(plain, its).items():
        wanted = stepper.state[reference.get_parameter(name)]["exp_avg"]
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.ranks(2)
def test_a_mark_that_the_mesh_contradicts_is_named(ranks):
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    model = Block(6)
    mark(model.up.weight, tp_shard_dim=0, tp_blocks=(6, 12))  # all of it: tp of one
    with pytest.raises(ValueError, match=r"up\.weight is marked .*2 ranks of 'tp'"):
        fully_shard(model, device_mesh=mesh, dp_shard_dim="dp")


@pytest.mark.ranks(2)
def test_module_by_module_a_marked_piece_is_not_saved_as_the_whole(ranks):
    layout = ParallelLayout(dp_shard=1, tp=2).build(device_type())
    model = Block(6)
    mark(model.up.weight, tp_shard_dim=0)
    held = shard_module(model, layout).state_dict()
    assert held["up.weight"].size() == (36, 6), "the part of the model's tensor that it is"
    assert held["norm.weight"].size() == (6,)
    model = nn.Sequential(Block(6))
    mark(model[0].up.weight, tp_shard_dim=0)
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    shard_module(model[0], mesh["dp"])
    shard_module(model, mesh["dp"])
    with pytest.raises(ValueError, match=r"up\.weight is marked tp_shard_dim=0.*ParallelMesh"):
        model.state_dict()
