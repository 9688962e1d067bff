"""A step that stops half-way: the module's state is what the optimizer updates all the same."""

import copy
import functools
import operator
import os
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.buffers import StaleStorageError
from lamina.ddp import full_gradients, full_parameters
from lamina.ddp.optimizer.flat_step import FlatStep
from lamina.fsdp import (
    MixedPrecisionPolicy,
    RankOrderError,
    UnavailableError,
    fully_shard,
    shard_module,
)
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

from .one_process import FailingNet


def build():
    torch.manual_seed(3)
    return FailingNet()


def loss_of(model, seed):
    return model(inputs(model, seed)).square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "dtype"), [(3, None), (3, torch.bfloat16), (0, torch.bfloat16)]
)
def test_state_is_what_the_optimizer_updates_wherever_a_step_has_stopped(strategy, dtype, ranks):
    """A skipped step or an exception leaves whole compute weights in some modules."""
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    model, optimizer = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_mesh=init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
    )
    good = copy.deepcopy({n: p.detach() for n, p in build().named_parameters()})
    dtypes = lambda held: {str(value.dtype) for value in held.values()}  # noqa: E731

    loss = loss_of(model, ranks.rank)  # no backward follows
    assert dtypes(model.blocks[2].state_dict()) == {"torch.float32"}
    assert dtypes(model.state_dict()) == {"torch.float32"}
    loss.backward()  # or one does: it gathers again
    optimizer.step()
    optimizer.zero_grad()

    loss = loss_of(model, 10 + ranks.rank)
    model.load_state_dict(good)
    del loss
    assert all(torch.equal(value, good[n]) for n, value in full_parameters(model).items())
    with torch.no_grad():
        wanted = build().to(dtype)(inputs(model, 5).to(dtype)).float()
        assert torch.equal(model(inputs(model, 5)), wanted)

    model.fail = True
    with pytest.raises(RuntimeError, match="planted"):
        loss_of(model, 77).backward()
    assert dtypes(model.state_dict()) == {"torch.float32"}
    model.leave.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(inputs(model, 5))
    assert dtypes(model.state_dict()) == {"torch.float32"}
    model.load_state_dict(good)
    assert all(torch.equal(value, good[n]) for n, value in full_parameters(model).items())
    with model.unsharded(), pytest.raises(RuntimeError, match=r"inside unsharded\(\)"):
        model.load_state_dict(good)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 3])
def test_a_backward_that_raised_over_earlier_microbatches_is_not_gone_on_with(strategy, ranks):
    """Without earlier ones nothing is left of it."""
    mesh = {"device_mesh": init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))}
    model = fully_shard(build(), fsdp_unit_modules=[Block], zero_dp_strategy=strategy, **mesh)
    loss_of(model, ranks.rank).backward()
    wanted = {name: value.clone() for name, value in full_gradients(model).items()}
    zeros = functools.partial(model.zero_grad, set_to_none=False)
    forget = {1: model.zero_grad_buffer, 2: model.zero_grad, 3: zeros}
    for earlier in (0, 1, 2, 3):
        model.zero_grad()
        with model.no_sync():
            for _ in range(earlier):
                loss_of(model, 7).backward()
        model.fail = True
        with pytest.raises(RuntimeError, match="planted"):
            loss_of(model, 8).backward()
        model.fail = False
        if earlier:
            with pytest.raises(RuntimeError, match=r"held earlier.*Call zero_grad_buffer\(\)"):
                loss_of(model, ranks.rank).backward()
            forget[earlier]()
        loss_of(model, ranks.rank).backward()
        for name, value in full_gradients(model).items():
            assert torch.equal(value, wanted[name]), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("modules", [False, True])
def test_a_part_of_the_model_may_be_loaded_by_itself(modules, ranks):
    """A unit, its modules, and a child that is no unit: the next forward computes with it."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    cases = [(1, None), (2, None), (3, None), (0, torch.bfloat16), (3, torch.bfloat16)]
    for strategy, dtype in cases[2:3] if modules else cases:
        policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
        settings = {"zero_dp_strategy": strategy, "mixed_precision_policy": policy}
        model, other, x = build(), OddNet().requires_grad_(False), inputs(build(), 5)
        if modules:
            for part in (*model.blocks, model):
                shard_module(part, mesh)
        else:
            model = fully_shard(model, device_mesh=mesh, fsdp_unit_modules=[Block], **settings)
        for name in ("blocks.0", "blocks.1.up", "leave", "enter", "blocks"):
            torch.manual_seed(len(name))
            part = OddNet().get_submodule(name).state_dict()
            other.load_state_dict(full_parameters(model))
            other.get_submodule(name).load_state_dict(part)
            model(x)  # no backward follows
            found = model.get_submodule(name).state_dict()
            assert {value.dtype for value in found.values()} == {torch.float32}
            model.get_submodule(name).load_state_dict(part)
            loss = model(x)
            wanted = copy.deepcopy(other).to(dtype)(x.to(dtype)).float()
            assert torch.equal(loss, wanted), (strategy, dtype, name)
            loss.sum().backward()
            with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\) of "):
                model.get_submodule(name).load_state_dict(part, assign=True)


class LoadsThroughData(nn.Linear):
    """As modules do that convert what they load: no version counter shows it."""

    def _load_from_state_dict(self, state, prefix, *_):
        self.weight.data.copy_(state[prefix + "weight"])


@pytest.mark.ranks(2)
def test_a_load_that_version_counters_do_not_show_is_computed_with(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(LoadsThroughData(4, 4, bias=False))
    model = fully_shard(model, zero_dp_strategy=0, mixed_precision_policy=policy)
    model(torch.ones(1, 4))
    model.load_state_dict({"0.weight": torch.full((4, 4), 2.0)})
    assert torch.equal(model(torch.ones(1, 4)).float(), torch.full((1, 4), 8.0))


@pytest.mark.ranks(2)
def test_what_was_loaded_or_written_is_gathered_by_hand_too(ranks):
    """`unshard()` outside a forward: after a load, and after a write to a parameter."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(build(), fsdp_unit_modules=[Block], mixed_precision_policy=policy)
    model(inputs(model, 5))
    model.load_state_dict({n: torch.full(p.shape, 2.0) for n, p in model.named_parameters()})
    for unit, value in ((model, 2.0), (model.unit_of("blocks.0"), 2.0), (model, 3.0)):
        if value == 3.0:
            with torch.no_grad():
                model.enter.weight.fill_(value)
        unit.unshard()
        held = model.enter if unit is model else model.blocks[0].up
        assert torch.equal(held.weight, torch.full_like(held.weight, value)), value
        unit.reshard()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "slots", "step"), [(1, False, 0), (3, False, 0), (3, True, 0), (3, True, 1)]
)
def test_a_graph_that_is_kept_can_be_walked_again_but_not_differentiated(
    strategy, slots, step, ranks
):
    """Slots are planned after the first backward that keeps no graph."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    settings = {"zero_dp_strategy": strategy, "fsdp_double_buffer": slots}
    model = fully_shard(build(), device_mesh=mesh, fsdp_unit_modules=[Block], **settings)
    for number in range(step):
        model(inputs(model, number)).sum().backward()
        model.zero_grad()
    x = inputs(model, ranks.rank).requires_grad_()
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once, of_input = full_gradients(model), x.grad.clone()
    loss.backward()
    for name, value in full_gradients(model).items():
        torch.testing.assert_close(value, 2 * once[name], msg=name)
    torch.testing.assert_close(x.grad, 2 * of_input)
    loss = model(x).square().mean()
    (found,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, of_input)
    if strategy == 3:
        with pytest.raises(UnavailableError, match="create_graph"):
            torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        model(x).square().mean().backward()


@pytest.mark.ranks(2)
def test_a_graph_that_slots_have_left_behind_is_refused_by_name(ranks):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(
        build(), device_mesh=mesh, fsdp_unit_modules=[Block], fsdp_double_buffer=True
    )
    kept = loss_of(model, ranks.rank)
    kept.backward(retain_graph=True)
    loss_of(model, ranks.rank).backward()  # keeps none: slots are planned
    with pytest.raises(
        StaleStorageError, match=r"(root|blocks\.\d) has moved to another storage.*anew"
    ):
        kept.backward()
    loss_of(model, ranks.rank).backward()


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, depth=2):
        x = self.linear(x).tanh()
        return self(x, depth - 1) if depth > 1 else x


@pytest.mark.ranks(2)
def test_a_kept_graph_of_a_unit_that_calls_itself_can_be_walked_again(ranks):
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), Recursive()), fsdp_unit_modules=[Recursive])
    loss = model(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    once = full_gradients(model)
    loss.backward()
    for name, value in full_gradients(model).items():
        torch.testing.assert_close(value, 2 * once[name], msg=name)
    assert [group.weights.state.name for group in model.parameter_groups()][1:] == ["RELEASED"]


class InPlace(Block):
    def forward(self, x):
        x += 1
        return super().forward(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_units_write_into_its_input_is_its_callers(dtype, ranks):
    """Values, gradients and the count of writes; in a dtype that inputs are cast to, too."""
    torch.manual_seed(0)
    plain = nn.Sequential(InPlace(8), InPlace(8)).to(dtype or torch.float32)
    model = fully_shard(
        copy.deepcopy(plain),
        fsdp_unit_modules=[InPlace],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype),
    )
    given = torch.randn(2, 8, requires_grad=True)
    seen = []
    for each in (plain, model):
        x = given * 2
        out = each(x if each is model else x.to(dtype or torch.float32))
        # Without a cast the plain model has written into `x` itself.
        wrote = x if each is model or dtype is None else x + 1
        (gradient,) = torch.autograd.grad(out.sum() + wrote.square().sum().to(out.dtype), [given])
        seen.append((out, wrote, gradient))
    for found, expected in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        x = given * 2
        model(x)
        torch.testing.assert_close(x, given * 2 + 1)


class Picky(OddNet):
    """Leaves a block out where it is told to."""

    def forward(self, x, without=None):
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            x = x if index == without else block(x)
        return self.leave(x) * self.temperature


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("warm", [False, True])
def test_a_unit_that_runs_on_some_ranks_only_is_named(warm, ranks):
    """At first its gather is missing; once all are gathered ahead, its run. Replicas too (HSDP)."""
    mesh = {"device_mesh": init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))}
    ran, strays, cases = "0", "1", (0, 2)
    if ranks.world_size == 4:
        two = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
        mesh = {"device_mesh": two, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        ran, strays, cases = "0, 1", "2, 3", (2,)
    for left_out in cases:
        model = fully_shard(Picky(), fsdp_unit_modules=[Block], check_order=True, **mesh)
        if warm:
            model(inputs(model, ranks.rank)).sum().backward()
            model(inputs(model, ranks.rank), without=1).sum().backward()  # on all ranks: allowed
        stray = str(ranks.rank) in strays
        with pytest.raises(
            RankOrderError, match=rf"blocks\.{left_out} has run on ranks \[{ran}\].*\[{strays}\]"
        ):
            model(inputs(model, 0), without=left_out if stray else None).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("alone", [0, 1])
def test_an_evaluation_on_some_ranks_only_is_named(alone, ranks):
    """Its gathers pair with those of the next forward elsewhere, and it would print a value."""
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    units = {"fsdp_unit_modules": [Block], "check_order": True}
    model = fully_shard(OddNet(), device_mesh=mesh, **units)

    def evaluate():
        with torch.no_grad():
            model(inputs(model, 0))

    model(inputs(model, ranks.rank)).sum().backward()
    evaluate()  # on all ranks: allowed
    words = rf"\[{alone}\] in a forward without .*\[{1 - alone}\] in a forward with gradients"
    with pytest.raises(RankOrderError, match=words), torch.set_grad_enabled(ranks.rank != alone):
        model(inputs(model, 0))


def refuse_memory(*args, **__):
    """In the middle of a step: Adam counts its steps first."""
    for count in args[5] if len(args) > 5 else ():
        count += 1
    raise MemoryError("planted")


def train_with_steps_that_raise(made, function, then, failing, rank):
    """Each failing step is followed by one as if nothing had been; `then` says what is between."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(2)))
    optimizer = made(model.parameters(), lr=0.01)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh)
    held = list(optimizer.param_groups[0]["params"])

    def backward(number):
        if then == "closure":
            optimizer.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number + rank))
        model(x).square().mean().backward()

    for number in range(3):
        if then == "closure":
            optimizer.step(functools.partial(backward, number))
            continue  # the next one's closure zeroes
        backward(number)
        if number in failing:
            saved = copy.deepcopy(optimizer.state_dict())
            with mock.patch(function, refuse_memory), pytest.raises(MemoryError):
                optimizer.step()
            if then == "load_state_dict":
                optimizer.load_state_dict(saved)
            if then == "state_dict":
                state = optimizer.state_dict()
                assert state["param_groups"][0]["params"] == [0, 1]
                assert set(state["state"]) <= {0, 1}
            if then != "step":
                optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
                assert all(map(operator.is_, optimizer.param_groups[0]["params"], held))
                backward(number)
        optimizer.step()
        assert all(map(operator.is_, optimizer.param_groups[0]["params"], held))
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.ranks(2)
def test_a_step_that_raised_leaves_the_users_parameters_in_the_groups(ranks):
    """Memory that runs out in a first step, when state is made, and in a later one."""
    torchs, kernels = "torch.optim.adam.adam", "lamina.ddp.optimizer.flat_step.adam"
    plain = kernels if device_type() == "cpu" else torchs
    amsgrad = functools.partial(torch.optim.AdamW, amsgrad=True)
    for name, made, function, failing in (
        ("RMSprop", torch.optim.RMSprop, "torch.optim.rmsprop.rmsprop", (0, 2)),
        ("Muon", torch.optim.Muon, "torch.optim._muon.muon", (0, 2)),
        ("AdamW", torch.optim.AdamW, plain, (0, 2) if plain == kernels else (0,)),
        ("AMSGrad", amsgrad, torchs, (0,)),  # a later step that raises is counted, as in torch
    ):
        wanted = train_with_steps_that_raise(made, function, "", (), ranks.rank)
        for then in ("zero_grad", "state_dict", "load_state_dict", "step", "closure"):
            found = train_with_steps_that_raise(made, function, then, failing, ranks.rank)
            for key, value in found.items():
                assert torch.equal(value, wanted[key]), (name, then, key)


@pytest.mark.ranks(1)
def test_memory_that_runs_out_as_a_step_ends_leaves_no_state_of_others(ranks):
    model = build()
    model, optimizer = fully_shard(model, torch.optim.AdamW(model.parameters()))
    held = set(optimizer.param_groups[0]["params"])
    for _ in range(2):
        loss_of(model, 0).backward()
        with mock.patch.object(FlatStep, "_flat_state", refuse_memory), pytest.raises(MemoryError):
            optimizer.step()
        assert set(optimizer.state) <= held
    optimizer.step()
    assert optimizer.state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_a_state_dict_in_another_thread_leaves_the_backward_alone(strategy, ranks):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, zero_dp_strategy=strategy, fsdp_unit_modules=[nn.Linear]
    )
    raised = []

    def save():
        try:
            model.state_dict()
        except RuntimeError as error:
            raised.append(str(error))

    def while_backward_runs(_):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    def hooked(module, args, output):
        output.register_hook(while_backward_runs)

    x = torch.ones(3, 4)
    model[1].register_forward_hook(hooked)
    for each in (model, plain):
        each(x).square().mean().backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert len(raised) == 1
    assert "while a backward runs" in raised[0]
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_no_rank(strategy, ranks):
    """As a worker of a data loader is: its messages would mix with those of the rank."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(model, device_mesh=mesh, zero_dp_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reading, writing = os.pipe()
        if os.fork() == 0:
            try:
                full_parameters(model)
            except RuntimeError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading, encoding="utf-8") as told:
            assert f"was forked from rank {ranks.rank} of 2" in told.read()
        os.wait()
    assert full_parameters(model)
