"""Muon under DistributedDataParallel, beside torch's in one process; who computes which matrix."""

import copy

import pytest
import torch
from torch import nn

from lamina.collectives import Ledger
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Muon,
    ShardedOptimizer,
    full_parameters,
)
from lamina.ddp.optimizer import muon as muon_file
from lamina.ddp.optimizer.owners import _balanced
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.toys import OddNet

SETTINGS = {"replicated": (False, False), "cut": (True, False), "whole": (True, True)}


def build():
    torch.manual_seed(7)
    return OddNet()


def loss_of(model, step):
    """Equal on all ranks, so that two ranks' mean has the bits of one process's gradient."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def train(model, optimizers, steps=4):
    for step in range(steps):
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def is_matrix(parameter):
    return parameter.ndim == 2 and parameter.numel() > 0


def two(model):
    """As people write it: Muon for matrices, AdamW for the rest."""
    matrices = [p for p in model.parameters() if is_matrix(p)]
    rest = [p for p in model.parameters() if not is_matrix(p)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, foreach=False)]


def wrapped(model, sharded, whole):
    mesh = ParallelLayout().build(device_type())
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, keep_tensors_whole=whole, num_buckets=2
    )
    return DistributedDataParallel(model, config, mesh), mesh


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", list(SETTINGS))
def test_muon_and_adamw_as_two_sharded_optimizers_have_the_bits_of_one_process(how, ranks):
    plain, model = build(), build()
    optimizers = two(model)
    model, mesh = wrapped(model, *SETTINGS[how])
    train(model, [ShardedOptimizer(each, model, mesh) for each in optimizers])
    train(plain, two(plain))
    before = build()
    for name, value in full_parameters(model).items():
        wanted = plain.get_parameter(name)
        assert torch.equal(value, wanted), name
        assert not value.numel() or not torch.equal(value, before.get_parameter(name)), name


@pytest.mark.ranks(4)
def test_ranks_that_own_no_matrix_step_beside_the_others(ranks):
    """Over two axes, of which the first leaves some ranks without any."""
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(5, 3, bias=False), nn.LayerNorm(3))
    layout = ParallelLayout(dp_replicate=2, dp_shard=2)
    model = copy.deepcopy(plain)
    optimizers = two(model)
    mesh = layout.build(device_type())
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=2
    )
    model = DistributedDataParallel(model, config, mesh)
    train(model, [ShardedOptimizer(each, model, mesh) for each in optimizers], 2)
    train(plain, two(plain), 2)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name


@pytest.mark.ranks(2)
def test_state_goes_from_torchs_muon_to_a_cut_one_and_back(ranks):
    plain, model = build(), build()
    reference = two(plain)
    train(plain, reference, 2)
    model.load_state_dict(plain.state_dict())
    names = {p: name for name, p in plain.named_parameters()}
    saved = {
        "state": {names[p]: s for p, s in reference[0].state.items()},
        "param_groups": [{**g, "params": [names[p] for p in g["params"]]}
                         for g in reference[0].param_groups],
    }  # fmt: skip
    optimizer = two(model)[0]
    model, mesh = wrapped(model, True, False)
    optimizer = ShardedOptimizer(optimizer, model, mesh)
    optimizer.load_state_dict(copy.deepcopy(saved))
    train(model, [optimizer], 2)
    train(plain, reference[:1], 2)
    state = optimizer.state_dict()["state"]
    for name, p in plain.named_parameters():
        if is_matrix(p):
            assert torch.equal(full_parameters(model)[name], p), name
            found = state[name]["momentum_buffer"].full_tensor()
            assert torch.equal(found, reference[0].state[p]["momentum_buffer"]), name


@pytest.mark.ranks(2)
def test_only_updates_travel_once_and_each_matrix_is_computed_on_one_rank(ranks, monkeypatch):
    computed = []
    inner = muon_file.newton_schulz
    monkeypatch.setattr(
        muon_file, "newton_schulz", lambda m, s: computed.extend(x.shape for x in m) or inner(m, s)
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    optimizer = torch.optim.Muon(model.parameters())
    model, mesh = wrapped(model, True, False)
    optimizer = ShardedOptimizer(optimizer, model, mesh)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 64)).sum().backward()
    with Ledger() as ledger:
        optimizer.step()
    rows = sum(shape[0] for shape in computed)  # a GPU has equal matrices below each other
    assert rows == 2 * 3 * 64, "each of two ranks has half of six equal matrices"
    sent = sum(r.bytes for r in ledger.records if r.op == "all_to_all")
    # A rank holds three matrices. Of bf16 it sends at most all of them there, and three back.
    assert 0 < sent <= 2 * 3 * 64 * 64 * 2


def test_the_owners_of_unequal_matrices_are_balanced():
    shapes = [torch.Size((n, 64)) for n in (64, 64, 32, 32, 16, 16, 16, 16, 8)]
    costs = [shape.numel() * min(shape) for shape in shapes]
    loads = [0] * 4
    for (outer, inner), cost in zip(_balanced(shapes, [2, 2]), costs, strict=True):
        loads[2 * outer + inner] += cost
    assert max(loads) == max(costs), "the two largest have a rank each"
    assert min(loads) > 0


def test_one_process_has_torchs_bits_and_experts_are_matrices_of_their_own():
    plain, model = build(), build()
    optimizer = Muon(
        [
            {"params": [p for p in model.parameters() if is_matrix(p)]},
            {"params": [p for p in model.parameters() if not is_matrix(p)],
             "orthogonalize": False, "lr": 0.01, "weight_decay": 0.01, "betas": (0.9, 0.999)},
        ],
        lr=0.02,
    )  # fmt: skip
    train(model, [optimizer])
    train(plain, two(plain))
    for name, p in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name
    stack = nn.Parameter(torch.randn(3, 8, 4))
    apart = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stack.grad = torch.randn(3, 8, 4)
    for parameter, gradient in zip(apart, stack.grad, strict=True):
        parameter.grad = gradient
    Muon([stack]).step()
    torch.optim.Muon(apart, lr=0.02).step()
    assert torch.equal(stack.detach(), torch.stack([p.detach() for p in apart]))


def test_embeddings_heads_and_vectors_are_left_to_adamw():
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(16, 8),
            "middle": nn.Linear(8, 8),
            "out": nn.Linear(8, 16, bias=False),
            "lm_head": nn.Linear(8, 12, bias=False),
        }
    )
    matrices, rest = Muon(model).param_groups
    assert [id(p) for p in matrices["params"]] == [id(model["middle"].weight)]
    assert len(rest["params"]) == 4
    assert (matrices["lr"], rest["lr"]) == (0.02, 3e-4)


def test_what_muon_cannot_step_is_refused_with_its_shape():
    with pytest.raises(ValueError, match=r"shape \[3\]: put it into a group"):
        Muon([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="adjust_lr_fn='other'"):
        Muon([nn.Parameter(torch.ones(3, 3))], adjust_lr_fn="other")


@pytest.mark.ranks(2)
def test_muon_that_was_not_told_of_refuses_cut_matrices(ranks):
    model, _ = wrapped(nn.Sequential(nn.Linear(64, 64, bias=False)), True, False)
    optimizer = Muon(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    with pytest.raises((NotImplementedError, RuntimeError), match="ShardedOptimizer"):
        optimizer.step()
