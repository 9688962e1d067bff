"""ShardedOptimizer around every kind of optimizer, against the same optimizer in one process."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_parameters,
)
from lamina.mesh import ParallelLayout, mark
from lamina_testing import device_type
from lamina_testing.toys import OddNet, TinyTransformer

SHARDED = pytest.mark.parametrize("sharded", [False, True])
ELEMENTWISE = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2, weight_decay=0.01),
}
WHOLE = {
    "adafactor": lambda p: torch.optim.Adafactor([q for q in p if q.numel()], lr=0.01),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
}


class Gated(OddNet):
    """Leaves a block out on some steps."""

    def forward(self, x, blocks=3):
        x = self.enter(x)
        for block in self.blocks[:blocks]:
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


def build(make=Gated, dtype=torch.float32):
    torch.manual_seed(7)
    return make().to(dtype)


def wrap(model, make_optimizer, sharded, **config):
    mesh = ParallelLayout().build(device_type())
    optimizer = make_optimizer(list(model.parameters()))
    if "bucket_size" not in config:
        config.setdefault("num_buckets", 2)
    wrapped = DistributedDataParallel(
        model, DistributedDataParallelConfig(use_distributed_optimizer=sharded, **config), mesh
    )
    return wrapped, ShardedOptimizer(optimizer, wrapped, mesh)


def toy_input(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, rank, step):
    # the last block is left out at step 1: its step counts lag from then on
    return model(toy_input(rank, step), 2 if step == 1 else 3).square().mean()


def reference(make_optimizer, world, steps, make=Gated):
    model = build(make)
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(world)) / world).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(wrapped, optimizer, rank, steps, first=0):
    for step in range(first, steps):
        loss_of(wrapped, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(wrapped, wanted, atol=2e-6):
    found = full_parameters(wrapped)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda m: name + m)  # noqa: B023


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@SHARDED
@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_elementwise_optimizers_with_a_parameter_that_was_skipped_once(name, sharded, ranks):
    make = ELEMENTWISE[name]
    wrapped, optimizer = wrap(build(), make, sharded)
    train(wrapped, optimizer, ranks.rank, 5)
    compare(wrapped, reference(make, 2, 5), atol=2e-5)
    steps = {key: float(state["step"]) for key, state in optimizer.state_dict()["state"].items()}
    skipped = [key for key in steps if key.startswith("blocks.2")]
    assert {steps[key] for key in skipped} == {4.0}
    assert {steps[key] for key in steps if key not in skipped} == {5.0}


@pytest.mark.ranks(2)
@SHARDED
@pytest.mark.parametrize("name", list(WHOLE))
def test_optimizers_of_whole_matrices(name, sharded, ranks):
    make = WHOLE[name]
    wrapped, optimizer = wrap(build(), make, sharded, keep_tensors_whole=True)
    train(wrapped, optimizer, ranks.rank, 4)
    saved, weights = optimizer.state_dict(), full_parameters(wrapped)
    second = build()
    with torch.no_grad():
        for parameter_name, value in weights.items():
            second.get_parameter(parameter_name).copy_(value)
    resumed, resumed_optimizer = wrap(second, make, sharded, keep_tensors_whole=True)
    resumed_optimizer.load_state_dict(saved)
    train(resumed, resumed_optimizer, ranks.rank, 5, first=4)
    train(wrapped, optimizer, ranks.rank, 5, first=4)
    compare(resumed, full_parameters(wrapped), atol=0)
    # Muon orthogonalises in bfloat16, which turns the last bit of a gradient into 2^-8 of a step
    compare(wrapped, reference(make, 2, 5), atol=2e-3 if name == "muon" else 2e-5)


@pytest.mark.ranks(2)
def test_matrices_that_are_cut_are_refused_to_those_who_need_them_whole(ranks):
    with pytest.raises(ValueError, match="keep_tensors_whole=True"):
        wrap(build(), WHOLE["adafactor"], True)


@pytest.mark.ranks(2)
@SHARDED
def test_a_closure_gives_its_loss_and_the_step_is_the_same(sharded, ranks):
    make = ELEMENTWISE["foreach"]
    wrapped, optimizer = wrap(build(), make, sharded)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(wrapped, ranks.rank, step)
            loss.backward()
            return loss

        with torch.no_grad():
            loss = loss_of(wrapped, ranks.rank, step)
        assert optimizer.step(closure).item() == loss.item()
    compare(wrapped, reference(make, 2, 3), atol=2e-5)


@pytest.mark.ranks(2)
@SHARDED
def test_a_scaler_skips_the_step_on_every_rank_and_lowers_its_scale(sharded, ranks):
    model = build(dtype=torch.float16)
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    wrapped, optimizer = wrap(model, ELEMENTWISE["foreach"], sharded, grad_reduce_in_fp32=True)
    scaler = torch.amp.GradScaler(device_type(), init_scale=2.0**10, growth_interval=100)

    def step(scale_of_input):
        x = toy_input(ranks.rank, 0).half() * scale_of_input
        loss = wrapped(x).float().square().mean()
        if ranks.rank == 1:
            loss = loss * scale_of_input  # one rank alone overflows
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step(float("inf"))
    assert scaler.get_scale() == 2.0**9
    for name, value in full_parameters(wrapped).items():
        assert torch.equal(value, before[name]), name
    step(1.0)
    assert scaler.get_scale() == 2.0**9
    after = full_parameters(wrapped)
    # the first step of AdamW is the sign of the gradient: unscaled or not, but finite and small
    assert max(float((after[n] - before[n]).abs().max()) for n in ("enter.weight",)) == (
        pytest.approx(0.01, rel=0.05)
    )


@pytest.mark.ranks(2)
@SHARDED
def test_unscaled_gradients_are_clipped_at_their_true_norm(sharded, ranks):
    from lamina.ddp import clip_grad_norm

    wrapped, optimizer = wrap(build(), ELEMENTWISE["foreach"], sharded)
    loss_of(wrapped, ranks.rank, 0).backward()
    true = clip_grad_norm(wrapped, float("inf"))
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler(device_type(), init_scale=2.0**12)
    scaler.scale(loss_of(wrapped, ranks.rank, 0)).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(clip_grad_norm(wrapped, float("inf")), true)


@pytest.mark.ranks(2)
@SHARDED
def test_groups_and_schedulers_survive(sharded, ranks):
    def make(parameters):
        decayed = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1, "lr": 0.02},
            {"params": others, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    def half(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    made = []  # with a scheduler from before the model was wrapped

    def make_both(parameters):
        optimizer = make(parameters)
        made.append(half(optimizer))
        return optimizer

    wrapped, optimizer = wrap(build(), make_both, sharded)
    scheduler = made[0] if sharded else half(optimizer)
    model = build()
    plain = make(list(model.parameters()))
    plain_scheduler = half(plain)
    for step in range(3):
        loss_of(wrapped, ranks.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward()
        plain.step()
        plain.zero_grad()
        plain_scheduler.step()
    compare(wrapped, {n: p.detach() for n, p in model.named_parameters()}, atol=2e-5)
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def leave_out(optimizer, parameters):
    parameters["enter.bias"].grad = None


def forget(optimizer, parameters):
    del optimizer.state[parameters["leave.weight"]]


def replace(optimizer, parameters):
    for parameter in parameters.values():
        state = optimizer.state[parameter]
        state["exp_avg"] = torch.ones_like(state["exp_avg"])


def count_anew(optimizer, parameters):
    optimizer.state[parameters["enter.weight"]]["step"] = torch.tensor(1.0)


def change_groups(optimizer, parameters):
    first, second = (group["params"] for group in optimizer.param_groups)
    second.append(first.pop(0))
    first.reverse()


def change_settings(optimizer, parameters):
    optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.param_groups[1]["betas"] = (0.3, 0.8)


def nothing(optimizer, parameters):
    pass


@pytest.mark.ranks(2)
@SHARDED
def test_what_users_change_between_steps_is_what_the_next_step_uses(sharded, ranks):
    """Flat runs and their state are kept from step to step, until anything shows a change."""
    changes = (leave_out, forget, replace, count_anew, change_groups, change_settings)

    def make(parameters):
        return torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}], lr=0.02)

    wrapped, optimizer = wrap(build(), make, sharded)
    groups = list(wrapped.parameter_groups())
    mains = {r.name: p for g in groups for r, p in zip(g.refs, g.main_parameters, strict=True)}
    model = build()
    plain, parameters = make(list(model.parameters())), dict(model.named_parameters())
    order = [change for each in changes for change in (nothing, each, nothing)]
    saved = None
    for step, change in enumerate([*order, nothing], start=2):
        loss_of(wrapped, ranks.rank, step).backward()
        (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward()
        for one, held in ((optimizer, mains), (plain, parameters)):
            change(one, held)
            one.step()
            one.zero_grad()
        compare(wrapped, {n: p.detach() for n, p in parameters.items()}, atol=2e-5)
        if step == 4:
            saved = copy.deepcopy(plain.state_dict()), copy.deepcopy(optimizer.state_dict())
        if step == 8:
            plain.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])


class Launches(TorchDispatchMode):
    """Counts operations that would launch a kernel: all but views and allocation."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        views = ("view", "slice", "detach", "alias", "empty", "as_strided", "select", "unbind")
        self.number += not any(part in name for part in views)
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
@SHARDED
def test_launches_grow_with_units_and_not_with_parameters(sharded, ranks):
    counts = []
    for depth in (2, 12):
        torch.manual_seed(0)
        model = OddNet(depth=depth)
        wrapped, optimizer = wrap(model, ELEMENTWISE["foreach"], sharded, num_buckets=1)
        for step in range(3):
            wrapped(toy_input(ranks.rank, step)).mean().backward()
            with Launches() as launches:
                optimizer.step()
            optimizer.zero_grad()
        counts.append(launches.number)
    assert counts[0] == counts[1]


def saved_state(wrapped, optimizer):
    return {"model": full_parameters(wrapped), "optimizer": optimizer.state_dict()}


@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 4)])
def test_state_goes_through_torch_checkpoints_to_another_number_of_ranks(
    before, after, ranks, tmp_path
):
    """Replicated over the rest of four ranks, so that one job has both sizes of shards."""
    make = ELEMENTWISE["foreach"]

    def sharded_over(number, model):
        mesh = ParallelLayout(dp_replicate=4 // number).build(device_type())
        optimizer = make(list(model.parameters()))
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_buckets=2)
        wrapped = DistributedDataParallel(model, config, mesh)
        return wrapped, ShardedOptimizer(optimizer, wrapped, mesh)

    wrapped, optimizer = sharded_over(before, build())
    train(wrapped, optimizer, ranks.rank, 3)
    weights = full_parameters(wrapped)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)

    second = build()
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            parameter.copy_(weights[name])
    resumed, resumed_optimizer = sharded_over(after, second)
    resumed_optimizer.param_groups[0]["lr"] = 99.0
    resumed_optimizer.prepare_state()
    for name, value in full_parameters(resumed).items():
        assert torch.equal(value, weights[name])
    target = {"optimizer": resumed_optimizer.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path)
    resumed_optimizer.load_state_dict(target["optimizer"])
    assert resumed_optimizer.param_groups[0]["lr"] == 0.01
    train(resumed, resumed_optimizer, ranks.rank, 5, first=3)
    compare(resumed, reference(make, 4, 5), atol=2e-5)


@pytest.mark.ranks(2)
def test_whole_state_of_one_process_is_cut_on_loading(ranks):
    make = ELEMENTWISE["foreach"]
    whole, whole_optimizer = wrap(build(), make, False)
    train(whole, whole_optimizer, ranks.rank, 2)
    second = build()
    with torch.no_grad():
        for name, value in full_parameters(whole).items():
            second.get_parameter(name).copy_(value)
    cut, cut_optimizer = wrap(second, make, True)
    cut_optimizer.load_state_dict(whole_optimizer.state_dict())
    for pair in ((whole, whole_optimizer), (cut, cut_optimizer)):
        train(*pair, ranks.rank, 4, first=2)
    compare(cut, full_parameters(whole), atol=0)


@pytest.mark.ranks(2)
@SHARDED
def test_two_models_with_different_settings_live_in_one_process(sharded, ranks):
    """Trained in turn, each ends where it ends alone (law 6)."""
    settings = (
        ("foreach", {"num_buckets": 3, "overlap_grad_reduce": True}, Gated),
        ("rmsprop", {"bucket_size": 50, "reduction": "native"}, Gated),
        ("nadam", {"num_buckets": 1, "reproducible": True}, Gated),
    )
    made = [
        wrap(build(make), ELEMENTWISE[name], sharded if index else not sharded, **config)
        for index, (name, config, make) in enumerate(settings)
    ]
    for step in range(3):
        losses = [loss_of(wrapped, ranks.rank, step) for wrapped, _ in made]
        sum(losses).backward()  # one backward through all of them
        for _, optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    for (name, _, make), (wrapped, _) in zip(settings, made, strict=True):
        compare(wrapped, reference(ELEMENTWISE[name], 2, 3, make), atol=2e-5)


@pytest.mark.ranks(2)
@SHARDED
def test_the_callers_objects_are_left_alone(sharded, ranks):
    model = build(TinyTransformer)
    attributes = {name: set(vars(child)) for name, child in model.named_modules()}
    optimizer = ELEMENTWISE["foreach"](list(model.parameters()))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    mesh = ParallelLayout().build(device_type())
    wrapped = DistributedDataParallel(model, config, mesh)
    ShardedOptimizer(optimizer, wrapped, mesh)
    assert config == DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    found = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert found == groups
    assert {name: set(vars(child)) for name, child in model.named_modules()} == attributes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["rmsprop", "muon"])
def test_a_step_that_raised_leaves_the_groups_as_they_were(name, ranks):
    def planted(*_, **__):
        raise MemoryError("planted")

    make = {**ELEMENTWISE, **WHOLE}[name]
    inner = {"rmsprop": "rmsprop.rmsprop", "muon": "_muon.muon"}[name]
    wrapped, optimizer = wrap(build(), make, True, keep_tensors_whole=name in WHOLE)
    ids = lambda: [[id(p) for p in group["params"]] for group in optimizer.param_groups]  # noqa: E731
    for step in range(3):
        held = ids()
        loss_of(wrapped, ranks.rank, step).backward()
        with mock.patch(f"torch.optim.{inner}", planted), pytest.raises(MemoryError):
            optimizer.step()
        assert ids() == held
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        train(wrapped, optimizer, ranks.rank, step + 1, first=step)
    compare(wrapped, reference(make, 2, 3), atol=2e-5)


class Uneven(nn.Module):
    """Its third tensor is the largest, so a layout that cuts none puts it first."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Bilinear(8, 8, 8)

    def forward(self, x):
        x = self.first(x)
        return self.last(x, x)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", [ELEMENTWISE["adamax"], lambda p: torch.optim.SGD(p, lr=0.1)])
def test_whole_tensors_in_any_order_of_memory_are_all_updated(make, ranks):
    plain, wrapped = build(Uneven), build(Uneven)
    optimizer = make(list(plain.parameters()))
    wrapped, sharded = wrap(wrapped, make, True, keep_tensors_whole=True, num_buckets=1)
    for step in range(3):
        for model, its in ((plain, optimizer), (wrapped, sharded)):
            model(toy_input(0, step)).square().mean().backward()
            its.step()
            its.zero_grad()
    for name, value in full_parameters(wrapped).items():
        torch.testing.assert_close(value, plain.get_parameter(name), msg=name)


class Counting(torch.optim.Optimizer):
    """Of another library, in kind: it keeps a number that belongs to no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self):
        self.state["steps"] += 1
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.lerp_(p.grad, 0.5)
                p.sub_(0.1 / self.state["steps"] * moment)


@pytest.mark.ranks(2)
@SHARDED
def test_state_that_belongs_to_no_parameter_is_saved_and_loaded(sharded, ranks):
    wrapped, optimizer = wrap(build(), Counting, sharded)
    train(wrapped, optimizer, ranks.rank, 2)
    saved, weights = copy.deepcopy(optimizer.state_dict()), full_parameters(wrapped)
    assert saved["state"]["steps"] == 2
    second = build()
    with torch.no_grad():
        for name, value in weights.items():
            second.get_parameter(name).copy_(value)
    resumed, resumed_optimizer = wrap(second, Counting, sharded)
    resumed_optimizer.load_state_dict(saved)
    train(resumed, resumed_optimizer, ranks.rank, 3, first=2)
    compare(resumed, reference(Counting, 2, 3))
    saved["state"]["no such parameter"] = {"moment": torch.zeros(1)}
    with pytest.raises(KeyError, match="no such parameter"):
        resumed_optimizer.load_state_dict(saved)


@pytest.mark.ranks(2)
@SHARDED
def test_an_optimizer_of_whole_matrices_over_tensor_parallel_pieces_is_refused(sharded, ranks):
    mesh = ParallelLayout(tp=2).build(device_type())
    model = nn.Sequential(nn.Linear(8, 4, bias=False))
    mark(model[0].weight, tp_shard_dim=0)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    optimizer = torch.optim.Adafactor(model.parameters())
    wrapped = DistributedDataParallel(model, config, mesh)
    with pytest.raises(ValueError, match=r"Adafactor looks at whole.*0\.weight is cut.*tensor-par"):
        ShardedOptimizer(optimizer, wrapped, mesh)
