"""Law 6: nothing global, nothing of the caller's changed but the optimizer's parameters."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, TinyTransformer, inputs

SETTINGS = [
    {"zero_dp_strategy": 3, "fsdp_double_buffer": True},
    {"zero_dp_strategy": 0},
    {
        "zero_dp_strategy": 1,
        "mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    },
    {"zero_dp_strategy": 2, "calculate_per_token_loss": True, "overlap_grad_reduce": False},
    {"zero_dp_strategy": 3, "reproducible": True, "disable_bucketing": True},
]


def build(make=OddNet):
    torch.manual_seed(3)
    return make()


def make(settings, model_class=OddNet):
    model = build(model_class)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    return fully_shard(model, optimizer, device_mesh=mesh, **settings)


def step(model, optimizer, number, rank):
    model(inputs(model, 10 * number + rank)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_models_with_different_settings_train_in_turn_as_they_do_alone(ranks):
    alone = []
    for settings in SETTINGS:
        pair = make(settings)
        for number in range(2):
            step(*pair, number, ranks.rank)
        alone.append(full_parameters(pair[0]))
    pairs = [make(settings) for settings in SETTINGS]
    other = make({}, TinyTransformer)
    for number in range(2):
        for pair in pairs:
            step(*pair, number, ranks.rank)
        step(*other, number, ranks.rank)
    for (model, _), wanted in zip(pairs, alone, strict=True):
        for name, value in full_parameters(model).items():
            assert torch.equal(value, wanted[name]), name


@pytest.mark.ranks(2)
def test_one_models_forward_runs_inside_anothers_step(ranks):
    """A frozen teacher beside a student: two engines at work in one backward."""
    student, optimizer = make({"zero_dp_strategy": 3, "fsdp_unit_modules": [Block]})
    teacher, _ = make({"zero_dp_strategy": 3, "fsdp_unit_modules": [Block]})
    plain = build()
    x = inputs(student, ranks.rank)
    with torch.no_grad():
        target = teacher(x)
    assert torch.equal(target, plain(x))
    (student(x) - 2 * target).square().mean().backward()
    both = student(x).mean() + teacher(x).mean()
    both.backward()
    assert all(p.grad is not None for p in teacher.parameters())
    optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_the_callers_objects_stay_as_they_were(strategy, ranks):
    model = build()
    model.note = {"mine": [1, 2]}
    model.enter.weight.no_decay = True
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.3, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "name": "vectors"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    held = [
        {k: copy.copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    ]
    defaults = dict(optimizer.defaults)
    units, policy = [Block], MixedPrecisionPolicy()
    settings = {"zero_dp_strategy": strategy, "fsdp_unit_modules": units}
    given = dict(settings)
    children = {name: id(child) for name, child in model.named_modules()}
    sharded, same = fully_shard(model, optimizer, mixed_precision_policy=policy, **settings)
    assert (sharded, same) == (model, optimizer)
    assert settings == given
    assert units == [Block]
    assert optimizer.defaults == defaults
    now = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert now == held
    assert {name: id(child) for name, child in model.named_modules()} == children
    assert model.note == {"mine": [1, 2]}
    assert all(type(child) is Block for child in model.blocks)
    assert all(p.no_decay for n, p in model.named_parameters() if n == "enter.weight")
    step(model, optimizer, 0, ranks.rank)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.03)
    assert [len(g["params"]) for g in optimizer.param_groups] == [
        len(g)
        for g in (
            [p for p in build().parameters() if (p.dim() > 1) is wide] for wide in (True, False)
        )
    ]


@pytest.mark.ranks(2)
def test_torch_keeps_its_switches(ranks):
    def switches():
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_rng_state().sum().item(),
        )

    model = build()
    plain = build()
    torch.manual_seed(11)
    before = switches()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    for block in plain.blocks:
        shard_module(block, mesh)
    shard_module(plain, mesh)
    pair = fully_shard(model, torch.optim.SGD(model.parameters()), device_mesh=mesh)
    step(*pair, 0, ranks.rank)
    assert switches() == before
