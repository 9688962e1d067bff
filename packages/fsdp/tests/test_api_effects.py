"""What arguments, policy fields and methods do, seen from outside: each fails when it is cut."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.profiler import ProfilerActivity, profile

from lamina.collectives import Ledger
from lamina.ddp import DataParallel, NonFiniteGradientError, full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module
from lamina.mesh import mark, role_of
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs

BF16 = torch.bfloat16


def build(seed=3):
    torch.manual_seed(seed)
    return OddNet()


def sharded(seed=3, **settings):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    return fully_shard(build(seed), device_mesh=mesh, fsdp_unit_modules=[Block], **settings)


def loss_of(model, rank):
    return model(inputs(model, rank)).float().square().mean()


def summed(scale=1.0):
    """Gradients of both ranks' batches in one process."""
    reference = build()
    sum(loss_of(reference, rank) * scale for rank in range(2)).backward()
    return {name: p.grad for name, p in reference.named_parameters()}


def assert_near(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.ranks(2)
def test_report_nan_in_param_grad_names_the_parameter_before_it_is_sent(ranks):
    model = sharded(report_nan_in_param_grad=True)
    model.blocks[2].down.register_full_backward_pre_hook(
        lambda _, gradients: (gradients[0] * float("nan"),)
    )
    with pytest.raises(NonFiniteGradientError, match=r"blocks\.2\.\w+\.\w+ is not finite"):
        loss_of(model, ranks.rank).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("per_token", "scale"), [(True, 1.0), (False, 0.5)])
def test_calculate_per_token_loss_leaves_sums_over_ranks(per_token, scale, ranks):
    model = sharded(calculate_per_token_loss=per_token)
    loss_of(model, ranks.rank).backward()
    assert_near(full_gradients(model), summed(scale))
    model.scale_gradients(0.25)
    assert_near(full_gradients(model), summed(scale * 0.25))


@pytest.mark.ranks(2)
def test_sync_module_states_decides_whose_values_the_ranks_start_from(ranks):
    first = {name: p.detach() for name, p in build(0).named_parameters()}
    second = {name: p.detach() for name, p in build(1).named_parameters()}
    assert_near(full_parameters(sharded(seed=ranks.rank)), first)
    mixed = full_parameters(sharded(seed=ranks.rank, sync_module_states=False))
    for sync in (True, False):
        model = build(0)
        features = torch.full((3, 2), ranks.rank, dtype=torch.int64).T  # with strides of its own
        model.blocks[0].register_buffer("features", features)
        model.register_buffer("flag", torch.tensor(bool(ranks.rank)))
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
        model = fully_shard(model, device_mesh=mesh, sync_module_states=sync)
        wanted = 0 if sync else ranks.rank
        assert (model.blocks[0].features == wanted).all()
        assert bool(model.flag) is bool(wanted)
    taken = {torch.equal(mixed[n], first[n]) for n in first if n.startswith("blocks.0")}
    also = {torch.equal(mixed[n], second[n]) for n in first if n.startswith("blocks.0")}
    assert True in taken
    assert True in also


@pytest.mark.ranks(2)
def test_broadcast_params_takes_the_first_ranks_weights_and_installs_them(ranks):
    policy = MixedPrecisionPolicy(param_dtype=BF16)  # weights that compute are copies
    model = sharded(zero_dp_strategy=0, mixed_precision_policy=policy)
    with torch.no_grad():
        model(inputs(model, 0))
        for parameter in model.parameters():
            parameter.fill_(ranks.rank)
        model.broadcast_params()
        assert all(not value.any() for value in full_parameters(model).values())
        assert not model(inputs(model, 0)).any()


@pytest.mark.ranks(2)
def test_start_param_sync_installs_what_was_written_by_hand(ranks):
    policy = MixedPrecisionPolicy(param_dtype=BF16)  # weights that compute are copies
    model = sharded(mixed_precision_policy=policy)
    with torch.no_grad():
        loss_of(model, 0)
        for parameter in model.parameters():
            parameter.zero_()
        model.start_param_sync()
        assert not model(inputs(model, 0)).any()


class Seeing(OddNet):
    """Notes dtypes as its forward sees them."""

    def forward(self, x):
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        self.took = x.dtype
        return super().forward(x.to(self.enter.weight.dtype))


def dtypes_under(policy):
    torch.manual_seed(3)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model = fully_shard(
        Seeing(), device_mesh=mesh, mixed_precision_policy=policy, fsdp_unit_modules=[]
    )
    out = model(inputs(model, 0))
    with Ledger() as ledger:
        out.float().sum().backward()
    wire = {str(r.dtype) for r in ledger.records if r.op == "reduce_scatter_fp32"}
    return model, out, wire


@pytest.mark.ranks(2)
def test_each_field_of_the_policy_decides_one_dtype(ranks):
    model, out, wire = dtypes_under(MixedPrecisionPolicy(param_dtype=BF16))
    assert set(model.seen.values()) == {BF16}
    assert (model.took, out.dtype) == (BF16, BF16)
    assert wire == {"torch.bfloat16"}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}

    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        cast_forward_inputs=False,
        output_dtype=torch.float32,
        grad_comm_dtype=torch.float32,
    )
    model, out, wire = dtypes_under(policy)
    assert (model.took, out.dtype) == (torch.float32, torch.float32)
    assert wire == {"torch.float32"}

    policy = TorchPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float64)
    model, out, wire = dtypes_under(policy)
    assert (model.took, out.dtype, wire) == (BF16, torch.float64, {"torch.float32"})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("made", "grads", "strategy"), [(BF16, torch.float32, 0), (torch.float32, BF16, 3)]
)
def test_main_grads_have_the_dtype_that_was_asked_for_and_are_stepped_with(
    made, grads, strategy, ranks
):
    policy = MixedPrecisionPolicy(
        main_params_dtype=None, param_dtype=BF16, main_grads_dtype=grads, output_dtype=torch.float32
    )
    model = build().to(made)
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        mixed_precision_policy=policy,
        zero_dp_strategy=strategy,
    )
    before = full_parameters(model)
    model(inputs(model, ranks.rank)).square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {grads}
    assert {p.dtype for p in model.parameters()} == {made}
    optimizer.step()
    after = full_parameters(model)
    assert not torch.equal(after["enter.weight"], before["enter.weight"])


@pytest.mark.ranks(4)
def test_main_grads_that_no_reduction_writes_are_refused_when_sharding(ranks):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    policy = MixedPrecisionPolicy(main_grads_dtype=BF16)
    model = build()
    with pytest.raises(ValueError, match=r"of temperature travel in torch\.float32.*grad_comm"):
        fully_shard(model, device_mesh=mesh["inner"], mixed_precision_policy=policy)
    with pytest.raises(ValueError, match=r"main_grads_dtype=torch\.bfloat16"):
        shard_module(model, mesh["inner"], mp_policy=policy)
    replicas = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    policy = MixedPrecisionPolicy(param_dtype=BF16, main_grads_dtype=BF16)
    with pytest.raises(ValueError, match=r"float32 over the 2 replicas.*reproducible=True"):
        fully_shard(model, mixed_precision_policy=policy, **replicas)
    assert not any(hasattr(p, "to_local") for p in model.parameters()), "nothing was touched"
    model = fully_shard(model, mixed_precision_policy=policy, reproducible=True, **replicas)
    model(inputs(model, ranks.rank).to(BF16)).float().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}


class Widening(nn.RMSNorm):
    """Computes in fp32 whatever it is given, and says so; its table is no longer one in bf16."""

    casts_itself = True
    full_precision_buffers = ("table",)

    def __init__(self):
        super().__init__(8)
        self.register_buffer("table", torch.full((8,), 1 / 3))

    def forward(self, x):
        return super().forward(x.float()), x.dtype


class Norms(nn.Module):
    """Does not know of mixed precision: an RMSNorm with fp32 weights gives fp32."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.widening = Widening()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.full((8,), 1 / 3))
        self.register_buffer("norm_table", torch.full((8,), 1 / 3))
        self.register_buffer("same", self.table)
        self.register_buffer("counts", torch.arange(8))

    def forward(self, x):
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        self.norm_out = self.norm(x)
        self.wide, self.given = self.widening(self.norm_out)
        return self.linear(self.wide.to(x.dtype))


@pytest.mark.ranks(2)
def test_patterns_keep_parameters_in_full_precision(ranks):
    policy = MixedPrecisionPolicy(
        param_dtype=BF16,
        buffer_dtype=BF16,
        keep_full_precision=["*norm*", "widening.weight"],
    )
    x = torch.randn(2, 8)
    wanted = nn.functional.rms_norm(x.to(BF16).float(), (8,)).to(BF16)
    for shard in (
        lambda model: fully_shard(model, mixed_precision_policy=policy),
        lambda model: shard_module(model, mp_policy=policy),
    ):
        model = shard(Norms())
        model(x).sum().backward()
        assert {n: str(d) for n, d in model.seen.items()} == {
            "norm.weight": "torch.float32",
            "widening.weight": "torch.float32",
            "linear.weight": "torch.bfloat16",
            "linear.bias": "torch.bfloat16",
        }
        assert torch.equal(model.norm_out, wanted), "the norm did not compute in fp32"
        assert (model.wide.dtype, model.given) == (torch.float32, BF16)
        assert {n: str(b.dtype) for n, b in model.named_buffers(remove_duplicate=False)} == {
            "table": "torch.bfloat16",
            "norm_table": "torch.float32",
            "widening.table": "torch.float32",
            "same": "torch.bfloat16",
            "counts": "torch.int64",
        }
        assert model.table is model.same


class Shared(nn.Module):
    """Reads its child's weight beside what the child returns."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.up(x)), self.up.weight.t())


class Listed(nn.Module):
    """Its weights lie in containers, which nobody calls."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList([torch.rand(8, 8)])
        self.scales = nn.ParameterDict({"out": torch.rand(8)})

    def forward(self, x):
        return x @ self.matrices[0] * self.scales["out"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("kind", [Listed, Shared])
def test_a_module_that_is_wholly_kept_in_full_precision_computes_in_it(kind, strategy, ranks):
    policy = MixedPrecisionPolicy(param_dtype=BF16, keep_full_precision=["0.*"])
    model, x = nn.Sequential(kind(), nn.Linear(8, 8)), torch.randn(2, 8)
    with torch.no_grad():
        wanted = model[0](x.to(BF16).float()).to(BF16)
    model = fully_shard(model, mixed_precision_policy=policy, zero_dp_strategy=strategy)
    outputs = []
    model[0].register_forward_hook(lambda _, __, output: outputs.append(output))
    model(x).sum().backward()
    assert torch.equal(outputs[0], wanted)


@pytest.mark.ranks(1)
def test_a_pattern_that_matches_nothing_is_refused(ranks):
    policy = MixedPrecisionPolicy(param_dtype=BF16, keep_full_precision=["*norm*", "*layernorm*"])
    with pytest.raises(ValueError, match=r"keep_full_precision=\['\*layernorm\*'\].*enter\.weight"):
        fully_shard(build(), mixed_precision_policy=policy)


@pytest.mark.ranks(2)
def test_backward_prefetch_lists_say_what_is_gathered_ahead(ranks):
    model = build()
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    for module in (*model.blocks, model):
        shard_module(module, mesh)
    for _ in range(2):
        loss_of(model, ranks.rank).backward()
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])
    seen = []
    model.blocks[2].down.register_full_backward_hook(
        lambda *_: seen.append([b.sharding_unit.gathered[0].state.name for b in model.blocks])
    )
    loss_of(model, ranks.rank).backward()
    assert seen[0][1] == "RELEASED"
    assert seen[0][0] in ("GATHERING", "READY", "IN_USE")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("convert", ["half", "double"])
def test_a_model_that_was_converted_after_sharding_is_refused_by_name(convert, strategy, ranks):
    model = sharded_alone(zero_dp_strategy=strategy)
    getattr(model, convert)()
    was = rf"was torch\.float32 on {device_type()}\S* in its .* before it is"
    with pytest.raises(RuntimeError, match=was):
        loss_of(model, ranks.rank)


def shard_by_module(model, policy):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    for block in model.blocks:
        shard_module(block, mesh, mp_policy=policy)
    return shard_module(model, mesh, mp_policy=policy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [0, 1, 3, "shard_module"])
@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_copy_of_a_sharded_model_trains_on_as_the_model_does(kind, dtype, ranks):
    def train(model, optimizer, steps):
        for step in range(steps):
            loss_of(model, ranks.rank + 2 * step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model)

    policy = MixedPrecisionPolicy(param_dtype=dtype)
    plain = build()
    mark(plain.blocks[0].up.weight, block_rows=1)
    plain.blocks[0].register_forward_hook(lambda module, _, out: out * 2)
    plain.blocks[1].down.bias.requires_grad_(False)
    hooks = [len(m._forward_pre_hooks) for m in plain.modules()]
    if kind == "shard_module":
        model = shard_by_module(plain, policy)
    else:
        model = sharded_as(plain, zero_dp_strategy=kind, mixed_precision_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = train(model, optimizer, 2)
    made = copy.deepcopy(model)
    other = torch.optim.SGD(made.parameters(), 0.1)
    assert role_of(made.blocks[0].up.weight).block_rows == 1
    assert [type(m) for m in made.blocks[0].up.modules()] == [nn.Linear]
    assert len(hooks) == len(list(made.modules()))
    for one, two in zip(model.modules(), made.modules(), strict=True):
        assert len(one._forward_pre_hooks) == len(two._forward_pre_hooks)
        assert len(one._load_state_dict_post_hooks) == len(two._load_state_dict_post_hooks)
    found = train(made, other, 2)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name]), f"training the copy has changed {name}"
    wanted = train(model, optimizer, 2)
    assert found.keys() == wanted.keys()
    moved = sum(not torch.equal(wanted[name], before[name]) for name in wanted)
    assert moved > len(wanted) / 2
    for name, value in wanted.items():
        assert torch.equal(value, found[name]), name
    with torch.no_grad():
        again = copy.deepcopy(made)  # a copy of a copy
        assert torch.equal(loss_of(again, ranks.rank), loss_of(made, ranks.rank))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [3, "shard_module"])
def test_a_copy_has_the_part_that_torch_compile_has_wrapped(kind, ranks):
    model = build()
    blocks = list(model.blocks)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    if kind == "shard_module":
        for block in (*blocks, model):
            shard_module(block)
    else:
        fully_shard(model, zero_dp_strategy=kind, fsdp_unit_modules=[Block])
    loss_of(model, 0).backward()
    made = copy.deepcopy(model)
    assert [type(m).__name__ for m in made.modules()] == [type(m).__name__ for m in model.modules()]
    assert made.blocks[1]._orig_mod is not model.blocks[1]._orig_mod
    assert torch.equal(loss_of(made, 0), loss_of(model, 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [2, "shard_module"])
def test_a_copy_takes_the_first_ranks_statistics_in_its_first_evaluation(kind, ranks):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if kind == "shard_module":
        shard_module(model, broadcast_buffers="forward")
    else:
        fully_shard(model, zero_dp_strategy=kind, broadcast_buffers="forward")
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(ranks.rank))
    model(rows).sum().backward()
    made = copy.deepcopy(model)
    for one in (made, model):
        one.eval()(rows)
    means = [one[1].running_mean.clone() for one in (made, model)]
    torch.distributed.broadcast(first := means[1].clone(), 0)
    assert torch.equal(means[1], first)
    assert torch.equal(means[0], first)


def sharded_as(model, **settings):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    return fully_shard(model, device_mesh=mesh, fsdp_unit_modules=[Block], **settings)


@pytest.mark.ranks(1)
def test_an_optimizer_over_weights_of_a_forward_is_refused_by_name(ranks):
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    for place in (False, True):
        model = sharded_alone(fsdp_unit_modules=[Block], mixed_precision_policy=policy)
        loss_of(model, ranks.rank)  # the root's weights stay for a backward that does not come
        if place:
            model.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss_of(model, ranks.rank).backward()
        if place:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=r"step\(\) with [.\w]+ as modules compute with"):
                optimizer.step()


@pytest.mark.ranks(1)
def test_a_sharded_model_is_not_pickled(ranks):
    model = sharded_alone()
    assert isinstance(model, DataParallel)
    with pytest.raises(TypeError, match=r"is no list: write \[Conv2d\]"):
        fully_shard(nn.Linear(2, 2), fsdp_unit_modules=nn.Conv2d)
    with pytest.raises(NotImplementedError, match=r"save model.state_dict\(\)"):
        pickle.dumps(model)
    with pytest.raises(ValueError, match=r"fsdp_unit_modules=\[Conv2d\] matches no submodule"):
        fully_shard(build(), fsdp_unit_modules=[nn.Conv2d])


def sharded_alone(**settings):
    return fully_shard(build(), **settings)


@pytest.mark.ranks(2)
def test_fp16_weights_skip_the_step_on_all_ranks_when_one_overflows(ranks):
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fully_shard(model, optimizer, mixed_precision_policy=policy)
    scaler = torch.amp.GradScaler(device_type(), init_scale=256.0)
    seen = {}
    for block in model.blocks:
        block.register_forward_pre_hook(lambda m, _: seen.update(dtype=m.up.weight.dtype))
    kept = [full_parameters(model)]
    for number in range(3):
        loss = loss_of(model, ranks.rank + 10 * number)
        if number == 1 and ranks.rank == 1:
            loss = loss * 1e30
        scaler.scale(loss).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kept.append(full_parameters(model))
    same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(kept)]
    assert same == [False, True, False]
    assert scaler.get_scale() == 128.0
    assert seen["dtype"] is torch.float16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(value.isfinite().all() for value in kept[-1].values())


@pytest.mark.ranks(1)
def test_a_unit_that_is_called_alone_after_the_model_gets_its_inputs_cast():
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    model = sharded_alone(mixed_precision_policy=policy, fsdp_unit_modules=[Block])
    hidden = torch.randn(4, 17)
    with torch.no_grad():
        first = model.blocks[0](hidden)
        model(inputs(model, 0))
        assert torch.equal(model.blocks[0](hidden), first)
    assert first.dtype is BF16


@pytest.mark.ranks(1)
def test_backwards_of_units_follow_one_another_in_a_profile():
    model = sharded_alone(fsdp_unit_modules=[Block])
    loss = loss_of(model, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    times = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]
    spans = {name: (start, end) for name, start, end in times if name.startswith("backward of")}
    products = [(start, end) for name, start, end in times if name == "aten::mm"]
    turns = [spans[f"backward of blocks.{at}"] for at in (2, 1, 0)]
    for begin, end in turns:
        assert any(begin < start < stop < end for start, stop in products)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(turns))


@pytest.mark.ranks(2)
def test_an_optimizer_that_nobody_was_told_of_gives_its_state_whole(ranks):
    model, mesh = build(), init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    for block in model.blocks:
        shard_module(block, mesh)
    shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, ranks.rank).backward()
    optimizer.step()
    whole = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
    for name, gradient in summed(0.5).items():
        average = state[name]["exp_avg"]
        assert type(average) is torch.Tensor
        torch.testing.assert_close(average, 0.1 * gradient)  # of one step, with beta1 = 0.9
