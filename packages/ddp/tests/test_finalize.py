"""finalize_grads and clip_grad_norm on real meshes equal one process over all tokens."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.collectives import Ledger
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
    finalize_grads,
    full_gradients,
)
from lamina.mesh import ParallelLayout, mark
from lamina_testing import device_type

from . import meshes

LAYOUTS = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "tp2 x dp2": {"tp": 2},
    "pp2 x dp2": {"pp": 2},
    "pp2 x tp2": {"pp": 2, "tp": 2},
    "dp_replicate2 x tp2": {"dp_replicate": 2, "tp": 2},
    "pp2 x dp2 x tp2": {"pp": 2, "tp": 2},
}
WORLDS = {"tp2": 2, "pp2": 2, "cp2": 2, "pp2 x dp2 x tp2": 8}


def fits(ranks, layout):
    return ranks == WORLDS.get(layout, 4)


ON_MESHES = pytest.mark.matrix(where=fits, few=10)


class Run:
    """One rank's stage, wrapped, after the backward of a step."""

    def __init__(self, layout, sharded=True, per_token=False, counts=None, **config):
        self.mesh = ParallelLayout(**layout).build(device_type())
        self.stages, self.tp = self.mesh.layout.pp, self.mesh.layout.tp
        self.stage = meshes.Stage(self.mesh, self.stages)
        self.counts, self.per_token = counts, per_token
        self.model = DistributedDataParallel(
            self.stage,
            DistributedDataParallelConfig(
                use_distributed_optimizer=sharded,
                calculate_per_token_loss=per_token,
                bucket_size=20,
                overlap_grad_reduce=True,
                **config,
            ),
            self.mesh,
        )
        self.dp = self.mesh.axis("dp_cp")

    def backward(self, step=0):
        x = meshes.tokens(step, self.dp.rank, self.counts)
        together = None
        if self.mesh.layout.ep > 1:
            # What an all-to-all would bring here: the tokens of this rank's ep group.
            peers = [self.dp.ranks.index(r) for r in self.mesh.axis("ep").ranks]
            together = torch.cat([meshes.tokens(step, rank, self.counts) for rank in peers])
        self.model(x, together).backward()
        return len(x)

    def expected(self, step=0):
        return meshes.expected(
            step,
            self.dp.size,
            stages=self.stages,
            tp=self.tp,
            experts=self.mesh.layout.ep > 1,
            counts=self.counts,
            per_token=self.per_token,
        )

    def check(self, wanted, factor=1.0, rtol=1e-11):
        found = full_gradients(self.model)
        wanted = meshes.mine(wanted, self.stage)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value * factor, rtol=rtol, atol=1e-12)


@ON_MESHES
@pytest.mark.ranks(2, 4, 8, timeout=120)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_gradients_equal_one_process(layout, reproducible, sharded, ranks):
    run = Run(LAYOUTS[layout], sharded, reproducible=reproducible)
    for step in range(2):
        run.model.zero_grad_buffer()
        run.backward(step)
        finalize_grads(run.model, run.mesh)
        run.check(run.expected(step))
    assert run.stage.router.calls == 2


@ON_MESHES
@pytest.mark.ranks(2, 4, 8, timeout=120)
@pytest.mark.parametrize("counts", [(6, 2), (5, 0), (0, 0)])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_unequal_token_counts_on_the_last_stage_weigh_tokens_and_not_ranks(layout, counts, ranks):
    run = Run(LAYOUTS[layout], per_token=True, counts=counts)
    number = run.backward()
    last = run.mesh.coordinate["pp"] == run.stages - 1
    heard = {}
    run.stage.router.finalize_step = lambda mesh: heard.update(full_gradients(run.model))
    finalize_grads(run.model, run.mesh, num_tokens=number if last else 12345)
    wanted = run.expected()
    run.check(wanted)
    # Submodules' own steps come after all sums and before the division.
    tokens = sum(len(meshes.tokens(0, rank, counts)) for rank in range(run.dp.size))
    for name, value in meshes.mine(wanted, run.stage).items():
        torch.testing.assert_close(heard[name], value * max(tokens, 1), rtol=1e-11, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2])
def test_gradients_of_bf16_weights_are_combined_over_tp_in_fp32_and_together(strategy, ranks):
    class Several(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for index, kind in enumerate(("sum", "mean", "sum", "mean")):
                parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
                self.register_parameter(f"p{index}", mark(parameter, tp_grad=kind))

        def forward(self, factor):
            return sum((parameter * factor).sum() for parameter in self.parameters())

    mesh = ParallelLayout(tp=2).build(device_type())
    settings = {"use_distributed_optimizer": strategy > 0, "zero_dp_strategy": strategy}
    settings |= {"bucket_size": 1, "calculate_per_token_loss": True}
    model = DistributedDataParallel(Several(), DistributedDataParallelConfig(**settings), mesh)
    model((256.0, 1.0)[ranks.rank]).backward()
    ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, mesh)
    mains = [p for group in model.parameter_groups() for p in group.main_parameters]
    for main in mains:
        main.grad = main.grad * 2  # the user's own tensors are what is combined and divided
    with Ledger() as ledger:
        finalize_grads(model, mesh, num_tokens=2)
    assert [record.op for record in ledger.records].count("all_reduce_fp32") == 2  # one a kind
    found = full_gradients(model)
    for index in range(4):  # bf16 has no 257 between 256 and 258
        wanted = torch.full((3,), 257.0 if index % 2 == 0 else 128.5)
        assert torch.equal(found[f"p{index}"], wanted), index
    with pytest.raises(RuntimeError, match="summed or divided again"):
        finalize_grads(model, mesh)
    for main in mains:
        assert float(main.grad.sum()) in (3 * 257.0, 3 * 128.5)
        main.grad.zero_()
    model((256.0, 1.0)[ranks.rank]).backward()
    finalize_grads(model, mesh)
    for name, value in full_gradients(model).items():
        assert torch.equal(value, found[name]), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_experts_have_buffers_of_their_own_and_the_dense_scale(per_token, sharded, ranks):
    run = Run({"ep": 2}, sharded, per_token)
    number = run.backward()
    finalize_grads(run.model, run.mesh, num_tokens=number if per_token else None)
    run.check(run.expected())
    held = [{ref.role.expert for ref in group.refs} for group in run.model.parameter_groups()]
    assert {True} in held
    assert {True, False} not in held


def whole_norm(wanted, order):
    flat = torch.cat([g.reshape(-1) for g in wanted.values()])
    return torch.linalg.vector_norm(flat, order)


CLIPPED = {**LAYOUTS, "ep2 x expert_dp2": {"ep": 2}, "pp2 x ep2": {"pp": 2, "ep": 2}}


@ON_MESHES
@pytest.mark.ranks(2, 4, 8, timeout=120)
@pytest.mark.parametrize("order", [2.0, math.inf, 3.0])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("reduction", ["ordered", "native"])
@pytest.mark.parametrize("layout", list(CLIPPED))
def test_the_norm_counts_every_parameter_once(layout, reduction, sharded, order, ranks):
    run = Run(CLIPPED[layout], sharded, reduction=reduction)
    run.backward()
    finalize_grads(run.model, run.mesh)
    wanted = run.expected()
    norm = whole_norm(wanted, order)
    # by module, and by parameters, which are what a user's own loop has
    mains = [p for group in run.model.parameter_groups() for p in group.main_parameters]
    for target in (run.model, [run.model], mains, run.model.parameters()):
        found = clip_grad_norm(target, math.inf, run.mesh, order)
        torch.testing.assert_close(found, norm.float(), rtol=3e-7, atol=0)
    limit = float(norm) / 4
    target = run.stage.parameters() if order == 3.0 else run.model
    clip_grad_norm(target, limit, run.mesh, order)
    run.check(wanted, limit / (float(norm) + 1e-6), rtol=3e-7)  # the norm is rounded to fp32
    # By now reductions look for squares, which the 2-norm takes where nothing came after them.
    run.model.zero_grad_buffer()
    run.backward()
    finalize_grads(run.model, run.mesh)
    groups = [g for g in run.model.parameter_groups() if any(g.trained.produced_gradient)]
    cut = sharded and run.mesh.axis("dp_shard_cp").size > 1
    assert not cut or any(g.shown.squares is not None for g in groups)
    found = clip_grad_norm(run.model, math.inf, run.mesh, order)
    torch.testing.assert_close(found, norm.float(), rtol=3e-7, atol=0)


class HostLooks(TorchDispatchMode):
    """Counts what would stop the host on a GPU, and passes over data of parameter size."""

    def __init__(self):
        super().__init__()
        self.looks = self.passes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.looks += name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")
        self.passes += name in ("aten::dot", "aten::_to_copy") and args[0].numel() > 8
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_norm_takes_the_squares_that_the_reduction_found(sharded, ranks):
    run = Run({}, sharded)
    run.backward()
    norm = whole_norm(run.expected(), 2.0).float()
    # The first time nobody has asked for squares yet: all is measured, to the same number.
    torch.testing.assert_close(
        clip_grad_norm(run.model, math.inf, run.mesh), norm, rtol=3e-7, atol=0
    )
    run.model.zero_grad_buffer()
    run.backward()
    with HostLooks() as counted:
        found = clip_grad_norm(run.model, math.inf, run.mesh, error_if_nonfinite=True)
    torch.testing.assert_close(found, norm, rtol=3e-7, atol=0)
    assert counted.looks == 1
    # Whole gradients may change without a trace: they are measured, by the rank that counts them.
    assert (counted.passes == 0) is (sharded or ranks.rank > 0)


CHANGES = {
    "through .grad": lambda run, mains: [p.grad.mul_(3.0) for p in mains if p.grad is not None],
    "by the wrapper": lambda run, mains: run.model.scale_gradients(3.0),
    "foreach": lambda run, mains: torch._foreach_mul_([p.grad for p in mains], 3.0),
    "own tensors": lambda run, mains: [setattr(p, "grad", p.grad * 3.0) for p in mains],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("change", list(CHANGES))
def test_the_norm_sees_what_was_done_to_gradients_after_their_reduction(change, sharded, ranks):
    run = Run({}, sharded)
    run.backward()
    mains = [p for group in run.model.parameter_groups() for p in group.main_parameters]
    CHANGES[change](run, mains)
    found = clip_grad_norm(run.model, math.inf, run.mesh)
    torch.testing.assert_close(
        found, 3.0 * whole_norm(run.expected(), 2.0).float(), rtol=3e-7, atol=0
    )
    clip_grad_norm(run.model, float(found) / 2, run.mesh)
    clipped = clip_grad_norm(run.model, math.inf, run.mesh)
    torch.testing.assert_close(clipped, found / 2, rtol=1e-6, atol=0)


@pytest.mark.ranks(4)
def test_a_non_finite_norm_names_the_parameter_on_every_mesh(ranks):
    run = Run({"tp": 2})
    run.backward()
    finalize_grads(run.model, run.mesh)
    group = next(g for g in run.model.parameter_groups() if g.refs[0].name == "gain")
    group.trained.main.span_view("gain").fill_(math.nan)
    named = group.trained.main.span_view("gain").numel() > 0
    expected = r"gain\. Skip" if named else "other ranks"
    with pytest.raises(RuntimeError, match=expected):
        clip_grad_norm(run.model, 1.0, run.mesh, error_if_nonfinite=True)
    before = full_gradients(run.model)
    group.trained.main.span_view("gain").fill_(math.inf)
    assert clip_grad_norm(run.model, math.inf, run.mesh) == math.inf  # only measures
    for name, value in full_gradients(run.model).items():
        assert name == "gain" or torch.equal(value, before[name]), name


@pytest.mark.ranks(2)
def test_a_token_count_for_means_is_refused(ranks):
    run = Run({})
    run.backward()
    with pytest.raises(ValueError, match="calculate_per_token_loss=True"):
        finalize_grads(run.model, run.mesh, num_tokens=3)


@pytest.mark.ranks(4, timeout=120)
def test_tied_weights_stay_equal_over_steps_of_a_sharded_optimizer(ranks):
    run = Run({"pp": 2})
    optimizer = ShardedOptimizer(
        torch.optim.AdamW(run.stage.parameters(), lr=0.05), run.model, run.mesh
    )
    whole = {n: torch.nn.Parameter(p) for n, p in meshes.parameters_of_everyone(run.stages).items()}
    reference = torch.optim.AdamW(whole.values(), lr=0.05)
    for step in range(3):
        run.backward(step)
        finalize_grads(run.model, run.mesh)
        clip_grad_norm(run.model, 1.0, run.mesh)
        optimizer.step()
        optimizer.zero_grad()
        total = sum(
            meshes.whole_loss(whole, meshes.tokens(step, rank), run.stages, 1, False)
            for rank in range(run.dp.size)
        )
        (total / run.dp.size).backward()
        # in fp64: Lamina rounds the norm to fp32 once
        norm = whole_norm({n: p.grad for n, p in whole.items() if p.grad is not None}, 2.0)
        factor = (1.0 / (norm.float() + 1e-6)).clamp(max=1.0)
        for parameter in whole.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.double())
        reference.step()
        reference.zero_grad()
    for name, value in meshes.mine({n: p.data for n, p in whole.items()}, run.stage).items():
        torch.testing.assert_close(getattr(run.stage, name).data, value, rtol=0, atol=1e-9)


@pytest.mark.ranks(1)
def test_a_list_of_stages_is_a_list_in_whatever_class(ranks):
    mesh = ParallelLayout().build(device_type())
    stages = [DistributedDataParallel(torch.nn.Linear(4, 4), mesh=mesh) for _ in range(2)]
    for given in (stages, torch.nn.ModuleList(stages)):
        stages[1](stages[0](torch.ones(2, 4))).sum().backward()
        finalize_grads(given, mesh)
        assert clip_grad_norm(given, 1e9, mesh) > 0
        for stage in stages:
            stage.zero_grad()
