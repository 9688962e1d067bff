"""Every argument of `fully_shard` works, or says by name why it can't."""

import importlib
import inspect
from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.ddp import (
    DistributedDataParallelConfig,
    HealthMonitor,
    ReplicaMonitor,
    full_gradients,
    full_parameters,
)
from lamina.ddp.engine import resolve_strategy
from lamina.fsdp import MixedPrecisionPolicy, UnavailableError, fully_shard, shard_module
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.units.plan import resolve_unit_classes
from lamina.mesh import ParallelLayout, mark
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

api = importlib.import_module("lamina.fsdp.api.fully_shard")  # a function hides its module

DOCUMENTED = """
    device_mesh fsdp_unit_modules dp_shard_dim dp_outer_dim tp_dim expt_device_mesh zero_dp_strategy
    outer_dp_sharding_strategy mixed_precision_policy overlap_grad_reduce overlap_param_gather
    sync_model_each_microbatch init_model_with_meta_device preproc_state_dict_for_dcp_ckpt
    report_nan_in_param_grad average_in_collective calculate_per_token_loss
    keep_fp8_transpose_cache nccl_ub fsdp_double_buffer hybrid_fsdp_group hybrid_fsdp_expt_group
    fsdp_group_ag expt_fsdp_group_ag device disable_bucketing disable_symmetric_registration
    enable_fine_grained_param_gather use_decoupled_grad cuda_graph_mode maxpool_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail
""".split()


def build(make=OddNet):
    torch.manual_seed(3)
    return make()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(rank, world, steps=3, microbatches=1, sync=None, **settings):
    """Parameters and last gradients of a short run."""
    model = build()
    settings.setdefault(
        "device_mesh", init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    )
    settings.setdefault("fsdp_unit_modules", [Block])
    model, optimizer = fully_shard(model, sgd(model), **settings)
    gradients = {}
    for step in range(steps):
        for m in range(microbatches):
            model(inputs(model, 100 * step + 10 * m + rank)).square().mean().backward()
        if sync is not None:
            sync(model)
            gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return model, gradients, full_parameters(model)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def test_all_documented_arguments_are_there():
    parameters = inspect.signature(fully_shard).parameters
    assert [name for name in DOCUMENTED if name not in parameters] == []


def test_signature_types_and_help_are_those_of_the_settings(monkeypatch):
    keywords = {p.name: p for p in inspect.signature(fully_shard).parameters.values()}
    del keywords["module"], keywords["optimizer"]
    assert {one.name: (one.type, one.default) for one in fields(ShardingSettings)} == {
        name: (one.annotation, one.default) for name, one in keywords.items()
    }
    for name in keywords:
        assert f"\n    {name}: " in fully_shard.__doc__, name
    passed = []
    monkeypatch.setattr(api, "_shard", lambda module, optimizer, settings: passed.append(settings))
    fully_shard(nn.Linear(1, 1), zero_dp_strategy=2, reduce_budget=7)
    assert passed == [ShardingSettings(zero_dp_strategy=2, reduce_budget=7)]


WRONG = {
    "a string for bytes": (lambda: fully_shard(OddNet(), gather_budget="1GB"), "in bytes"),
    "a string for bytes of messages": (
        lambda: fully_shard(OddNet(), reduce_message_bytes="32MiB"),
        "int or None, in bytes",
    ),
    "a string for yes and no": (lambda: fully_shard(OddNet(), overlap_grad_reduce="no"), "bool"),
    "a number for yes and no": (lambda: fully_shard(OddNet(), check_order=1), "bool"),
    "a name in place of several": (
        lambda: fully_shard(OddNet(), fsdp_unit_modules="Block"),
        "no list: write",
    ),
    "a dtype of integers": (lambda: MixedPrecisionPolicy(param_dtype=torch.int8), "floating"),
    "a dtype by name": (lambda: MixedPrecisionPolicy(param_dtype="bf16"), "give dtype or None"),
    "patterns without quotes": (lambda: fully_shard(OddNet(), zero_dp_strategy={1: 3}), "Mapping"),
    "a half strategy": (lambda: fully_shard(OddNet(), zero_dp_strategy=1.5), "int or str"),
    "no bytes": (lambda: fully_shard(OddNet(), reduce_budget=0), "at least 1 bytes"),
    "half an element": (lambda: DistributedDataParallelConfig(bucket_size=1.5), "in elements"),
    "buckets in words": (lambda: DistributedDataParallelConfig(bucket_size="32MiB"), "in elements"),
    "a limit in words": (lambda: DistributedDataParallelConfig(check_for_large_grads="1"), "float"),
    "a list for one module": (lambda: HealthMonitor(limit="10"), "float"),
    "steps in words": (lambda: ReplicaMonitor(OddNet(), steps="64"), "int"),
    "resharding in words": (lambda: shard_module(OddNet(), reshard_after_forward="yes"), "bool"),
    "a policy of buffers": (lambda: fully_shard(OddNet(), broadcast_buffers="no"), "'never'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_value_of_another_type_or_unit_is_refused_with_both(wrong):
    call, pattern = WRONG[wrong]
    with pytest.raises((TypeError, ValueError), match=pattern) as told:
        call()
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.matrix(few=6)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"average_in_collective": True},
        {"disable_bucketing": True},
        {"enable_fine_grained_param_gather": True},
        {"fsdp_double_buffer": True},
        {"fsdp_double_buffer": True, "maxpool_double_buffer": True},
        {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True},
        {"device": "cpu", "dp_shard_dim": "dp"},
        {"zero_dp_strategy": "optim_grads_params", "outer_dp_sharding_strategy": "no_shard"},
        {"fsdp_unit_modules": [f"{Block.__module__}.Block"]},
        # Two summands have one sum, in any order.
        {"reduction": "native"},
        {"reduction": "checked"},
        {"reduction": "native", "average_in_collective": True, "microbatches": 2},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_arguments_about_communication_do_not_change_bits(settings, ranks):
    if device_type() == "cuda" and settings.get("reduction") == "checked":
        pytest.skip("checksums are refused on a GPU")
    if "device" in settings:
        settings = {**settings, "device": device_type()}
    _, _, plain = train(ranks.rank, 2, microbatches=settings.get("microbatches", 1))
    _, _, found = train(ranks.rank, 2, **settings)
    assert_same(found, plain)


@pytest.mark.parametrize(
    ("name", "number"), [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("2", 2)]
)
def test_a_strategys_name_is_its_number(name, number):
    assert resolve_strategy(name) == resolve_strategy(number)
    if number < 2:
        assert resolve_strategy(3, name) == resolve_strategy(3, number)
    assert len({resolve_strategy(one).placements for one in range(2)}) == 2


class Outer:
    class Inner(nn.Linear):
        """A class inside a class."""


def test_units_are_given_by_import_string_and_a_wrong_one_is_refused():
    found = resolve_unit_classes([f"{__name__}.Outer.Inner", "torch.nn.Linear", Block])
    assert found == (Outer.Inner, nn.Linear, Block)
    with pytest.raises(ValueError, match=r"'torch\.nn\.Nowhere' cannot be imported"):
        resolve_unit_classes(["torch.nn.Nowhere"])
    with pytest.raises(ValueError, match="'Block' cannot be imported"):
        resolve_unit_classes(["Block"])
    with pytest.raises(ValueError, match=r"not a torch\.nn\.Module class"):
        resolve_unit_classes(["torch.nn.functional.linear"])


@pytest.mark.ranks(2)
def test_disable_bucketing_gives_each_parameter_a_collective_of_its_own(ranks):
    model, _, _ = train(ranks.rank, 2, steps=0, disable_bucketing=True)
    assert all(len(group.refs) == 1 for group in model.parameter_groups())


@pytest.mark.ranks(2)
def test_fine_grained_gathers_hold_one_module_at_a_time(ranks):
    model, _, _ = train(ranks.rank, 2, steps=0, enable_fine_grained_param_gather=True)
    names = [unit.name for unit in model.sharding_engine.units]
    assert names[:5] == ["", "enter", "blocks.0.norm", "blocks.0.up", "blocks.0.down"]
    seen = []
    model.blocks[0].down.register_forward_pre_hook(
        lambda *_: seen.append(type(model.blocks[0].norm.weight.data).__name__)
    )
    model(inputs(model, 0))
    assert seen == ["ShardedTensor"], "norm was not given back before down ran"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class AttentionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.ranks(2)
def test_fine_grained_keeps_weights_with_the_module_that_reads_them(ranks):
    model = fully_shard(build(AttentionNet), enable_fine_grained_param_gather=True)
    assert [u.name for u in model.sharding_engine.units] == ["", "blocks.0.inner", "blocks.1.inner"]
    model(torch.randn(2, 3, 8)).sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 2, 3])
def test_without_sync_each_microbatch_the_optimizers_step_ends_the_accumulation(strategy, ranks):
    common = {"microbatches": 2, "zero_dp_strategy": strategy}
    _, _, lazy = train(ranks.rank, 2, sync_model_each_microbatch=False, **common)
    model = build()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(
        model, sgd(model), device_mesh=mesh, fsdp_unit_modules=[Block], zero_dp_strategy=strategy
    )
    for step in range(3):
        for m in range(2):
            with model.no_sync() if m == 0 else torch.enable_grad():
                model(inputs(model, 100 * step + 10 * m + ranks.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(lazy, full_parameters(model))
    model.set_model_auto_sync(False)
    with pytest.raises(RuntimeError, match="set_model_auto_sync"):
        optimizer.step(lambda: 0.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_finish_grad_sync_shows_the_accumulated_gradient(strategy, ranks):
    _, gradients, _ = train(
        ranks.rank,
        2,
        microbatches=2,
        sync=lambda model: model.finish_grad_sync(),
        sync_model_each_microbatch=False,
        zero_dp_strategy=strategy,
    )
    _, wanted, _ = train(
        ranks.rank, 2, microbatches=2, sync=lambda model: None, zero_dp_strategy=strategy
    )
    assert gradients.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(gradients[name], wanted[name], rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"keep_fp8_transpose_cache": True}, UnavailableError, "FP8"),
        ({"nccl_ub": True}, UnavailableError, "CUDA|NCCL"),
        ({"cuda_graph_mode": True, "fsdp_double_buffer": True}, UnavailableError, "CUDA"),
        ({"cuda_graph_mode": True}, ValueError, "fsdp_double_buffer"),
        ({"maxpool_double_buffer": True}, ValueError, "fsdp_double_buffer"),
        (
            {"reduce_budget": 1, "overlap_grad_reduce": False},
            ValueError,
            "reduce_budget=1.*overlap_grad_reduce",
        ),
        ({"fsdp_db_use_persist_buf_on_alloc_fail": True}, ValueError, "fsdp_double_buffer"),
        ({"disable_symmetric_registration": True}, ValueError, "nccl_ub"),
        (
            {"average_in_collective": True, "calculate_per_token_loss": True},
            ValueError,
            "finalize_grads",
        ),
        ({"init_model_with_meta_device": True}, ValueError, "meta"),
        ({"tp_dim": "dp", "dp_shard_dim": "dp"}, ValueError, "tp_dim"),
        ({"tp_dim": "nowhere"}, ValueError, "nowhere"),
        ({"reduction": "fast"}, ValueError, "native"),
        ({"outer_dp_sharding_strategy": "optim"}, ValueError, "dp_outer_dim"),
        ({"fsdp_double_buffer": True, "zero_dp_strategy": 2}, ValueError, "zero_dp_strategy=3"),
        ({"mixed_precision_policy": torch.bfloat16}, TypeError, "MixedPrecisionPolicy"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_by_name(settings, error, says, ranks):
    if error is UnavailableError and device_type() == "cuda":
        pytest.skip("a GPU has it")
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = build()
    with pytest.raises(error, match=says) as caught:
        fully_shard(model, device_mesh=mesh, **settings)
    assert any(name in str(caught.value) for name in settings), "the argument is not named"
    assert not any(hasattr(p, "to_local") for p in model.parameters()), "half sharded"


@pytest.mark.ranks(4)
def test_tp_dim_is_not_the_dimension_to_shard_along(ranks):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("data", "model"))
    model = fully_shard(build(), device_mesh=mesh, tp_dim="model")
    group = next(model.parameter_groups())
    assert group.axes.inner.name == "data"
    assert group.axes.size == 2


class DecoupledSGD(torch.optim.Optimizer):
    """Reads and zeroes gradients as Megatron's optimizers do with `use_decoupled_grad`."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.decoupled_grad is not None:
                    change = parameter.decoupled_grad.to(parameter.dtype)
                    parameter.add_(change, alpha=-group["lr"])

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.decoupled_grad = None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 3])
def test_an_optimizer_reads_and_zeroes_decoupled_gradients(strategy, ranks):
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16, param_dtype=torch.bfloat16)
    common = {"zero_dp_strategy": strategy, "mixed_precision_policy": policy}
    found = {}
    for make in (torch.optim.SGD, DecoupledSGD):
        model = build()
        model, optimizer = fully_shard(
            model,
            make(model.parameters(), lr=0.1),
            use_decoupled_grad=make is DecoupledSGD,
            **common,
        )
        for step in range(3):
            model(inputs(model, 10 * step + ranks.rank)).square().mean().backward()
            assert next(model.parameters()).grad.dtype is torch.bfloat16
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        found[make] = full_parameters(model)
        model.state_dict()
    for name, value in found[torch.optim.SGD].items():
        torch.testing.assert_close(found[DecoupledSGD][name], value, rtol=1e-2, atol=1e-4)


class Experts(OddNet):
    """The last block is an expert's."""

    def __init__(self):
        super().__init__()
        for parameter in self.blocks[2].parameters():
            mark(parameter, expert=True)


@pytest.mark.ranks(4)
def test_expert_mesh_shards_expert_parameters_and_averages_over_all_ranks(ranks):
    mesh = init_device_mesh(device_type(), (4,), mesh_dim_names=("dp",))
    experts = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "dp"))
    model = fully_shard(
        build(Experts), device_mesh=mesh, expt_device_mesh=experts, fsdp_unit_modules=[Block]
    )
    kinds = {g.refs[0].role.expert: g for g in model.parameter_groups()}
    assert (kinds[False].axes.size, kinds[True].axes.size) == (4, 2)
    assert kinds[True].axes.divisor == 4
    model(inputs(model, ranks.rank)).mean().backward()
    reference = build(Experts)
    copies = [r for r in range(4) if r // 2 == ranks.rank // 2]
    sum(reference(inputs(reference, r)).mean() for r in copies).div(4).backward()
    torch.testing.assert_close(
        full_gradients(model)["blocks.2.up.weight"], reference.blocks[2].up.weight.grad
    )


@pytest.mark.ranks(2)
def test_gathers_go_over_the_group_that_was_given(ranks):
    mine = dist.new_group([0, 1], group_desc="mine")
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(build(), device_mesh=mesh, fsdp_group_ag=mine)
    with Ledger() as ledger:
        model(inputs(model, 0))
    gathers = [record for record in ledger.records if record.op == "all_gather_into"]
    assert gathers
    assert {record.axis for record in gathers} == {"mine"}


@pytest.mark.ranks(4)
def test_groups_over_other_ranks_are_refused(ranks):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    whole, half = dist.new_group([0, 1, 2, 3]), [dist.new_group([0, 2]), dist.new_group([1, 3])]
    common = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    with pytest.raises(ValueError, match="hybrid_fsdp_group has ranks"):
        fully_shard(build(), hybrid_fsdp_group=half[ranks.rank % 2], **common)
    with pytest.raises(ValueError, match="fsdp_group_ag has ranks"):
        fully_shard(build(), fsdp_group_ag=whole, **common)
    with pytest.raises(ValueError, match="hybrid_fsdp_expt_group is given"):
        fully_shard(build(), hybrid_fsdp_expt_group=whole, **common)
    with pytest.raises(ValueError, match="expt_fsdp_group_ag is given"):
        fully_shard(build(), expt_fsdp_group_ag=whole, **common)
    fully_shard(build(), hybrid_fsdp_group=whole, **common)
    mine = [dist.new_group([0, 1], group_desc="mine"), dist.new_group([2, 3], group_desc="mine")]
    model = fully_shard(
        build(Experts),
        expt_device_mesh=mesh,
        hybrid_fsdp_expt_group=whole,
        expt_fsdp_group_ag=mine[ranks.rank // 2],
        **common,
    )
    with Ledger() as ledger:
        model(inputs(model, 0))
    asked = {record.axis for record in ledger.records if record.op == "all_gather_into"}
    assert len(asked) == 2, "dense weights over a group of their own, experts' over the given one"
    assert "mine" in asked


@pytest.mark.ranks(2)
def test_reproducible_gives_the_same_bits_under_every_strategy(ranks):
    results = [
        train(ranks.rank, 2, microbatches=2, zero_dp_strategy=s, reproducible=True)[2]
        for s in (0, 1, 3)
    ]
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.ranks(1)
def test_a_model_on_meta_with_an_optimizer_over_it_trains(ranks):
    with torch.device("meta"):
        model = OddNet()
        for name in ("temperature", "empty"):
            setattr(model, name, nn.Parameter(torch.ones_like(getattr(model, name), device="cpu")))
    model, optimizer = fully_shard(model, sgd(model), init_model_with_meta_device=True)
    before = full_parameters(model)
    model(inputs(model, 0)).square().mean().backward()
    optimizer.step()
    after = full_parameters(model)
    assert {p for group in optimizer.param_groups for p in group["params"]} == {*model.parameters()}
    assert not torch.equal(after["enter.weight"], before["enter.weight"])


@pytest.mark.ranks(1)
def test_no_mesh_means_one_axis_over_the_world(ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and gloo for CPUs all the same
    model = fully_shard(build())
    assert next(model.parameter_groups()).axes.size == 1
    assert ParallelLayout().build(device_type()).axis("dp").size == 1
