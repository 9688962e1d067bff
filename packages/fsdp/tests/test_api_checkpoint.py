"""`torch.distributed.checkpoint` on what `state_dict()` gives, and the documented loop as it is."""

import copy
import io
import itertools
import warnings

import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.toys import Block as MyTransformerBlock
from lamina_testing.toys import OddNet, inputs

OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(
        model.parameters(), lr=0.1, initial_accumulator_value=0.5
    ),
}


def build(seed=3):
    torch.manual_seed(seed)
    return OddNet()


def make(mesh, strategy, optimizer="adamw", seed=3, **settings):
    model = build(seed)
    return fully_shard(
        model,
        OPTIMIZERS[optimizer](model),
        device_mesh=mesh,
        fsdp_unit_modules=[MyTransformerBlock],
        zero_dp_strategy=strategy,
        **settings,
    )


def step(model, optimizer, number):
    """The same batch on all ranks, so that any number of them makes the same step."""
    model(inputs(model, number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(model, optimizer, state):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


@pytest.mark.ranks(2)
def test_the_documented_loop_runs_as_it_is(ranks, tmp_path):
    model, x, path = build(), torch.randn(4, 5), str(tmp_path / "checkpoint")
    optimizer = torch.optim.AdamW(model.parameters())
    # fmt: off
    device_mesh = init_device_mesh(device_type(), mesh_shape=(2,), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(model, optimizer, device_mesh=device_mesh,
                                   fsdp_unit_modules=[MyTransformerBlock], dp_shard_dim="dp", zero_dp_strategy=3)  # noqa: E501
    loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()  # noqa: E702
    torch.distributed.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)  # noqa: E501
    # fmt: on
    other, other_optimizer = make(device_mesh, 3, seed=4)
    state = state_of(other, other_optimizer)
    torch.distributed.checkpoint.load(state, checkpoint_id=path)
    load(other, other_optimizer, state)
    for name, value in full_parameters(model).items():
        assert torch.equal(full_parameters(other)[name], value), name


FEW = list(zip([3, 3, 0, 1, 2], [3, 0, 3, 2, 1], itertools.cycle(OPTIMIZERS)))
"""One optimizer for each pair of strategies; the others are slow."""


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer"),
    [
        *(
            one if one in FEW else pytest.param(*one, marks=pytest.mark.slow)
            for one in itertools.product([3, 0, 1, 2], [3, 0, 2, 1], OPTIMIZERS)
            if one[:2] in {one[:2] for one in FEW}
        ),
        ("HSDP", 3, "adamw"),
        ("HFSDP", 2, "adamw"),
    ],
)
def test_saved_by_four_ranks_loaded_by_three_two_and_one(saved, loaded, optimizer, ranks, tmp_path):
    if isinstance(saved, int):
        model, stepper = make(
            init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",)), saved, optimizer
        )
    else:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
        outer = {"dp_outer_dim": "outer", "outer_dp_sharding_strategy": int(saved == "HFSDP")}
        model, stepper = make(mesh, 3, optimizer, dp_shard_dim="inner", **outer)
    for number in range(2):
        step(model, stepper, number)
    path = str(tmp_path / "checkpoint")
    torch.distributed.checkpoint.save(state_of(model, stepper), checkpoint_id=path)
    for number in range(2, 4):
        step(model, stepper, number)
    wanted = full_parameters(model)
    for size in (3, 2, 1):
        fewer = DeviceMesh(device_type(), list(range(size)), mesh_dim_names=("dp",))
        if ranks.rank < size:
            other, other_stepper = make(fewer, loaded, optimizer, seed=4)
            state = state_of(other, other_stepper)
            torch.distributed.checkpoint.load(
                state, checkpoint_id=path, process_group=fewer.get_group()
            )
            load(other, other_stepper, state)
            for number in range(2, 4):
                step(other, other_stepper, number)
            for name, value in full_parameters(other).items():
                torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_asking_for_state_changes_nothing(optimizer, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    results = []
    for asks in (True, False):
        model, stepper = make(mesh, 3, optimizer)
        for number in range(2):
            if asks:
                stepper.state_dict()
            step(model, stepper, number)
        assert not asks or len(stepper.state) == len(list(model.parameters()))
        results.append(full_parameters(model))
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_plain_tensors_on_request_go_through_torch_save(strategy, optimizer, ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model, stepper = make(mesh, strategy, optimizer, preproc_state_dict_for_dcp_ckpt=False)
    for number in range(2):
        step(model, stepper, number)
    file = io.BytesIO()
    torch.save(state_of(model, stepper), file)
    file.seek(0)
    state = torch.load(file)
    assert {type(value) for value in state["model"].values()} == {torch.Tensor}
    plain = build()
    plain.load_state_dict(state["model"])  # torch takes step counts as they are, not copies
    plain_stepper = OPTIMIZERS[optimizer](plain)
    plain_stepper.load_state_dict(copy.deepcopy(state["optimizer"]))
    other, other_stepper = make(mesh, 3, optimizer, seed=4)
    load(other, other_stepper, state)
    for one, its in ((plain, plain_stepper), (other, other_stepper), (model, stepper)):
        step(one, its, 5)
    for name, value in full_parameters(model).items():
        assert torch.equal(full_parameters(other)[name], value), name
        torch.testing.assert_close(plain.get_parameter(name).data, value, rtol=0, atol=1e-6)


class OwnAdamW(torch.optim.AdamW):
    """What its first step makes of a parameter is its own business."""


@pytest.mark.ranks(1)
def test_state_that_nothing_could_be_loaded_into_is_warned_of(ranks):
    model = build()
    settings = {"lr": 0.0, "weight_decay": 0.0}
    model, stepper = fully_shard(model, OwnAdamW(model.parameters(), **settings))
    count = len(list(model.parameters()))
    with pytest.warns(UserWarning, match=rf"OwnAdamW.* no state of {count} .* zero gradients"):
        assert not stepper.state_dict()["state"]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepper.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(stepper.state_dict()["state"]) == count


class TwoHalves(torch.nn.Module):
    """Its second half has no gradient in the first two steps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x, number):
        x = self.first(x)
        return x.sum(1) if number < 2 else self.second(x).sum(1)


def counts_of(optimizer):
    states = optimizer.state_dict()["state"].values()
    return [float(state["step"]) for state in states]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 3])
@pytest.mark.parametrize("generic", [False, True])
def test_each_parameter_gets_its_own_step_count_back(generic, strategy, ranks, tmp_path):
    def made(numbers):
        torch.manual_seed(0)
        model = TwoHalves()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
        model, optimizer = fully_shard(
            model, optimizer, device_mesh=mesh, fsdp_unit_modules=[], zero_dp_strategy=strategy
        )
        for number in numbers:
            model(torch.ones(3, 4), number).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def state_for(model, optimizer):
        if generic:
            return get_optimizer_state_dict(model, optimizer)
        return optimizer.state_dict()

    saved, loaded = made([0, 1, 2]), made([2, 3])
    path = str(tmp_path / "checkpoint")
    torch.distributed.checkpoint.save(state_for(*saved), checkpoint_id=path)
    state = state_for(*loaded)
    torch.distributed.checkpoint.load(state, checkpoint_id=path)
    if generic:
        set_optimizer_state_dict(*loaded, state)
    else:
        loaded[1].load_state_dict(state)
    assert counts_of(saved[1]) == counts_of(loaded[1]) == [3.0, 3.0, 1.0, 1.0]
