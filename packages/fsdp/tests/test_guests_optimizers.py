"""EMA, Muon and optimizers of others over sharded models, against the same in one process."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lamina.buffers import ShardedTensor
from lamina.ddp import Muon, full_parameters
from lamina.fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from lamina.mesh import mark
from lamina_testing import device_type
from lamina_testing.oracles import PlainMuon
from lamina_testing.toys import Block, OddNet, inputs

STRATEGIES = pytest.mark.parametrize("strategy", [0, 1, 3])
STEPS = 3


def build():
    torch.manual_seed(3)
    return OddNet()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def loss_of(model, rank, step):
    return model(inputs(model, 10 * step + rank)).square().mean()


def settings(strategy):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    return {"device_mesh": mesh, "zero_dp_strategy": strategy, "fsdp_unit_modules": [Block]}


def assert_near(model, reference):
    for name, value in full_parameters(model).items():
        wanted = reference.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5, msg=name)


def one_process(*optimizers_of, after_step=lambda: None, model=None):
    model = build() if model is None else model
    optimizers = [make(model) for make in optimizers_of]
    for step in range(STEPS):
        model.zero_grad()
        sum(loss_of(model, rank, step) / 2 for rank in range(2)).backward()
        for optimizer in optimizers:
            optimizer.step()
        after_step()
    return model


@pytest.mark.ranks(2)
@STRATEGIES
def test_an_average_of_weights_by_torch(strategy, ranks):
    """`AveragedModel` copies the model, so it is made before sharding, and its copy sharded too."""
    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    model, optimizer = fully_shard(model, sgd(model.parameters()), **settings(strategy))
    fully_shard_model(average.module, **settings(strategy))
    for step in range(STEPS):
        loss_of(model, ranks.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        average.module.start_param_sync()
    plain = build()
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    one_process(
        lambda m: sgd(m.parameters()),
        after_step=lambda: expected.update_parameters(plain),
        model=plain,
    )
    assert_near(average.module, expected.module)
    with torch.no_grad():
        wanted = expected(inputs(plain, 77))
        torch.testing.assert_close(average(inputs(model, 77)), wanted, rtol=0, atol=1e-5)


@pytest.mark.ranks(2)
@STRATEGIES
def test_an_average_of_weights_in_five_lines(strategy, ranks):
    model = build()
    model, optimizer = fully_shard(model, sgd(model.parameters()), **settings(strategy))
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(STEPS):
        loss_of(model, ranks.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.5)
    plain = build()
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}

    def follow():
        for name, p in plain.named_parameters():
            expected[name].lerp_(p.detach(), 0.5)

    one_process(lambda m: sgd(m.parameters()), after_step=follow, model=plain)
    for name, value in average.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-5, msg=name)


class Matrices(OddNet):
    """Three matrices in a unit: two ranks' shards meet within the second."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(17, 17, bias=False) for _ in range(3))) for _ in range(2)
        )


def matrices():
    torch.manual_seed(3)
    return Matrices()


def cutting(strategy):
    return settings(strategy) | {"fsdp_unit_modules": [nn.Sequential]}


def is_matrix(name, parameter):
    return "blocks" in name and parameter.dim() == 2


def muon(model):
    chosen = [p for n, p in model.named_parameters() if is_matrix(n, p)]
    return torch.optim.Muon(chosen, lr=0.02, weight_decay=0.1)


def others(model):
    return sgd([p for n, p in model.named_parameters() if not is_matrix(n, p)])


@pytest.mark.matrix(few=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@STRATEGIES
def test_muon_steps_over_matrices_that_are_cut(strategy, before, ranks):
    model = matrices()
    made = [muon(model), others(model)] if before else []
    model = fully_shard_model(model, **cutting(strategy))
    optimizers = [fully_shard_optimizer(o, model) for o in made or [muon(model), others(model)]]
    train_with(model, optimizers, ranks)
    assert_near(model, one_process(muon, others, model=matrices()))


def train_with(model, optimizers, ranks):
    for step in range(STEPS):
        loss_of(model, ranks.rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 3])
def test_muon_and_adamw_in_one_line_equal_two_optimizers(strategy, ranks):
    def adamw(model):
        rest = [p for n, p in model.named_parameters() if p.ndim != 2]
        return torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)

    def torchs(model):
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)

    model = matrices()
    model, optimizer = fully_shard(model, Muon(model, lr=0.02, adamw_lr=0.01), **cutting(strategy))
    train_with(model, [optimizer], ranks)
    assert_near(model, one_process(torchs, adamw, model=matrices()))
    # Matrices are cut where the strategy cuts, and so is their momentum.
    for parameter, state in optimizer.state.items():
        for value in state.values():
            assert value.dim() == 0 or type(value) is type(parameter.detach())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 3])
def test_muon_beside_integers_that_are_frozen(strategy, ranks):
    model = matrices()
    model.order = nn.Parameter(torch.arange(64).view(8, 8), requires_grad=False)
    model, optimizer = fully_shard(model, muon(model), **cutting(strategy))
    train_with(model, [optimizer], ranks)
    reference = one_process(muon, model=matrices())
    assert torch.equal(full_parameters(model).pop("order"), torch.arange(64).view(8, 8))
    for name, value in reference.named_parameters():
        torch.testing.assert_close(full_parameters(model)[name], value.detach(), atol=1e-5, rtol=0)


def adafactor(model):
    # torch's own fails over empty tensors.
    return torch.optim.Adafactor([p for p in model.parameters() if p.numel()], lr=0.02)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [muon, adafactor])
@pytest.mark.parametrize("strategy", [1, 3])
def test_state_that_one_rank_keeps_is_in_every_ranks_whole_state(make, strategy, ranks):
    """Each rank steps other tensors. Saved whole, loaded into another strategy, and saved again."""
    whole, saved = StateDictOptions(full_state_dict=True), None
    plain = matrices()
    reference = make(plain)
    # torch's own function loads no state of another shape than the parameter's where there is none.
    for step, how in enumerate([strategy, 3, 1] if make is muon else [strategy]):
        model = matrices()
        model, optimizer = fully_shard(model, make(model), **cutting(how))
        if saved is not None:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=saved[0],
                optim_state_dict=saved[1],
                options=whole,
            )
        loss_of(model, ranks.rank, step).backward()
        optimizer.step()
        saved = get_state_dict(model, optimizer, options=whole)
        plain.zero_grad()
        sum(loss_of(plain, rank, step) / 2 for rank in range(2)).backward()
        reference.step()
        wanted = get_optimizer_state_dict(plain, reference)["state"]
        assert saved[1]["state"].keys() == wanted.keys()
        for name, values in wanted.items():
            torch.testing.assert_close(saved[1]["state"][name], values, rtol=1e-4, atol=1e-6)
    assert_near(model, plain)


@pytest.mark.ranks(2)
def test_an_optimizer_of_whole_tensors_over_cut_ones_is_refused_by_name(ranks):
    model = fully_shard_model(nn.Sequential(nn.Linear(64, 64, bias=False)))
    with pytest.raises(ValueError, match=r"looks at whole tensors, and 0\.weight is cut"):
        fully_shard_optimizer(torch.optim.Adafactor(model.parameters()), model)


@pytest.mark.ranks(2)
def test_adafactor_over_tensor_parallel_pieces_is_refused_by_name(ranks):
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    mark(model[0].weight, tp_shard_dim=0)
    with pytest.raises(ValueError, match=r"0\.weight is cut over tensor-parallel ranks"):
        fully_shard(
            model, torch.optim.Adafactor(model.parameters()), device_mesh=mesh, dp_shard_dim="dp"
        )
    assert type(model) is nn.Sequential, "half sharded"


@pytest.mark.ranks(2)
def test_muon_over_dtensors_of_unequal_pieces(ranks):
    """`parallelize_module` cuts 7 rows into 4 and 3, and 5 columns into 3 and 2."""
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}

    def build():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 7, bias=False), nn.Linear(7, 5, bias=False)).double()

    plain, model = build(), parallelize_module(build(), mesh["tp"], plan)
    wanted = PlainMuon(plain, 0.05, 0.01, lambda name: True)
    optimizer = Muon(model.parameters(), lr=0.05, ns_dtype=torch.float64)
    model, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp"
    )
    for step in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
        for each, its in ((plain, wanted), (model, optimizer)):
            each(x).square().mean().backward()
            its.step()
            its.zero_grad()
    pieces = plain[0].weight.chunk(2, 0)[ranks.rank], plain[1].weight.chunk(2, 1)[ranks.rank]
    for found, piece in zip(full_parameters(model).values(), pieces, strict=True):
        torch.testing.assert_close(found, piece.detach(), rtol=0, atol=1e-10)


class OverAllTensors(torch.optim.Optimizer):
    """Its rate follows from all gradients, as that of D-Adaptation, Prodigy and AdaGC."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.state["steps"] = 0  # belongs to no parameter, which torch allows

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        chosen = [p for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in chosen]).norm()
        self.state["steps"] += 1
        for p in chosen:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.lerp_(p.grad, 0.5)
            p.sub_(group["lr"] * moment / (0.1 + norm))


class OverRows(torch.optim.Optimizer):
    """It looks at a tensor's rows, as CAME, AdamP and Shampoo do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.numel():
                rows = self.state[p].setdefault("rows", torch.zeros(p.shape[:1]))
                rows.lerp_(p.grad.square().reshape(*p.shape[:1], -1).mean(-1).view(rows.shape), 0.5)
                p.sub_(0.1 * p.grad / (0.1 + rows.sqrt().view(-1, *[1] * (p.ndim - 1))))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("blocks", [False, True], ids=["", "blocks as large as tensors"])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_an_optimizer_whose_rate_follows_from_all_tensors(strategy, blocks, ranks):
    """Where a tensor was whole on a rank by chance, the norm was that of this rank's tensors."""

    def make(model):
        return OverAllTensors(model.parameters())

    model = build()
    for parameter in model.parameters() if blocks else ():
        mark(parameter, block_rows=64)
    model, optimizer = fully_shard(model, make(model), **settings(strategy))
    train_with(model, [optimizer], ranks)
    assert_near(model, one_process(make))
    assert optimizer.state["steps"] == STEPS


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 3])
def test_an_optimizer_of_others_that_looks_at_rows(strategy, ranks):
    """It is refused by name where a tensor may be cut, whether one is or not."""

    def make(model):
        return OverRows([p for p in model.parameters() if p.ndim])

    for build_one, how in ((build, settings(strategy)), (matrices, cutting(strategy))):
        model = build_one()
        model, optimizer = fully_shard(model, make(model), **how)
        loss_of(model, ranks.rank, 0).backward()
        with pytest.raises(NotImplementedError, match="keep_tensors_whole=True"):
            optimizer.step()
        model = build_one()
        model, optimizer = fully_shard(model, make(model), **how, keep_tensors_whole=True)
        train_with(model, [optimizer], ranks)
        assert_near(model, one_process(make, model=build_one()))


class OverEachTensor(torch.optim.Optimizer):
    """The rate of a tensor follows from its norm and mean, as that of LARS, LAMB and NovoGrad."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.lerp_(p.grad, 0.5)
                rate = p.norm() * p.abs().max() / (0.1 + p.grad.square().mean() + p.var())
                p.sub_(0.1 * rate * moment)


class Rows(nn.Module):
    """Rows of a matrix that tp cuts give a sum each: no rank needs to know of the others' rows."""

    def __init__(self, rows=slice(None)):
        super().__init__()
        torch.manual_seed(5)
        self.rows = nn.Parameter(torch.randn(8, 6)[rows].clone())
        self.all = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return (x @ self.rows.T).square().sum() + (x * self.all).square().sum()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [OverEachTensor, OverAllTensors], ids=lambda each: each.__name__)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_norms_of_an_optimizer_of_others_are_those_of_all_tensor_parallel_parts(
    strategy, tp, make, ranks
):
    """Each rank's norm was that of its part, so tp changed the result, without a word."""
    mesh = init_device_mesh(device_type(), (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    dp, part = divmod(ranks.rank, tp)
    model = Rows(slice(part * 8 // tp, (part + 1) * 8 // tp))
    mark(model.rows, tp_shard_dim=0)
    model, optimizer = fully_shard(
        model, make(model.parameters()), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp",
        zero_dp_strategy=strategy,
    )  # fmt: skip
    plain = Rows()
    wanted = make(plain.parameters())

    def x(step, rank):
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))

    for step in range(STEPS):
        model(x(step, dp)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sum(plain(x(step, rank)) for rank in range(4 // tp)).div(4 // tp).backward()
        wanted.step()
        wanted.zero_grad()
    found = full_parameters(model)
    torch.testing.assert_close(found["all"], plain.all.detach(), rtol=1e-5, atol=1e-5)
    rows = plain.rows.detach().chunk(tp)[part]
    torch.testing.assert_close(found["rows"], rows, rtol=1e-5, atol=1e-5)
    for state in optimizer.state.values():  # kept as the parameter is, and not as it was lent
        if isinstance(state, dict):
            assert isinstance(state["moment"], ShardedTensor) is (strategy > 0 and tp < 4)


@pytest.mark.ranks(2)
def test_whole_tensors_that_tensor_parallelism_has_cut_are_refused(ranks):
    mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
    model = Rows(slice(4))
    mark(model.rows, tp_shard_dim=0)
    with pytest.raises(ValueError, match=r"OverRows looks at whole tensors, and rows is cut .*tp"):
        fully_shard(
            model, OverRows(model.parameters()), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp",
            keep_tensors_whole=True,
        )  # fmt: skip
