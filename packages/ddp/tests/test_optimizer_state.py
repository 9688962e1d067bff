"""State that is loaded, rolled back or shared: each parameter has its own, by name."""

import copy

import pytest
import torch

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_parameters,
)
from lamina.ddp.optimizer.sharded_optimizer import match_groups
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.toys import OddNet

SHARDED = pytest.mark.parametrize("sharded", [False, True])


class Gated(OddNet):
    def forward(self, x, blocks=3):
        x = self.enter(x)
        for block in self.blocks[:blocks]:
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


def wrap(make, sharded):
    torch.manual_seed(7)
    model = Gated()
    mesh = ParallelLayout().build(device_type())
    optimizer = make(model)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, num_buckets=2)
    wrapped = DistributedDataParallel(model, config, mesh)
    return wrapped, ShardedOptimizer(optimizer, wrapped, mesh)


def loss_of(model, rank, step, blocks):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x, blocks).square().mean()


def train(wrapped, optimizer, rank, steps):
    """`steps` gives each step's number and how many blocks it uses."""
    for step, blocks in steps:
        loss_of(wrapped, rank, step, blocks).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2)
@SHARDED
def test_a_rollback_takes_back_what_was_stepped_since(sharded, ranks):
    wrapped, optimizer = wrap(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), sharded)
    train(wrapped, optimizer, ranks.rank, [(0, 2)])  # the last block has no state yet
    saved = copy.deepcopy(optimizer.state_dict())
    assert not any(name.startswith("blocks.2") for name in saved["state"])
    weights = full_parameters(wrapped)
    # The last block joins, and then goes two steps ahead of nobody: counts differ by parameter.
    train(wrapped, optimizer, ranks.rank, [(1, 3), (2, 3), (3, 2)])
    ahead = copy.deepcopy(optimizer.state_dict())
    later = full_parameters(wrapped)
    assert {float(ahead["state"][n]["step"]) for n in ("blocks.2.up.bias", "enter.bias")} == {2, 4}
    for state, values, steps in ((saved, weights, [(1, 3), (2, 3), (3, 2)]), (ahead, later, [])):
        with torch.no_grad():
            wrapped.load_state_dict(values)
        optimizer.load_state_dict(state)
        found = optimizer.state_dict()["state"]
        assert found.keys() == state["state"].keys()
        assert {n: float(s["step"]) for n, s in found.items()} == {
            n: float(s["step"]) for n, s in state["state"].items()
        }
        train(wrapped, optimizer, ranks.rank, steps)
        for name, value in full_parameters(wrapped).items():
            assert torch.equal(value, later[name]), name


def grouped(order):
    def make(model):
        groups = {
            "decayed": {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.02},
            "others": {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.5},
            "all": {"params": list(model.parameters())},
        }
        return torch.optim.SGD([groups[name] for name in order], lr=0.1)

    return make


@pytest.mark.ranks(2)
def test_saved_groups_are_known_by_their_parameters(ranks):
    _, optimizer = wrap(grouped(["decayed", "others"]), True)
    saved = optimizer.state_dict()
    _, swapped = wrap(grouped(["others", "decayed"]), True)
    for group in swapped.param_groups:
        group["lr"] = 99.0
    swapped.load_state_dict(saved)
    assert [group["lr"] for group in swapped.param_groups] == [0.5, 0.02]
    _, single = wrap(grouped(["all"]), True)
    with pytest.raises(ValueError, match=r"was in group \d and .* in group \d, here in one"):
        single.load_state_dict(saved)
    with pytest.raises(ValueError, match="were in one group, here in two"):
        optimizer.load_state_dict(single.state_dict())
    with pytest.raises(KeyError, match="another model"):
        optimizer.load_state_dict({**saved, "state": {"nobody": {}}})


def test_groups_that_only_one_side_has_are_refused_by_name():
    assert match_groups([["a"], []], [["b", "a"]]) == [0, None]
    with pytest.raises(ValueError, match="no saved group holds b"):
        match_groups([["b"]], [["a"]])
    with pytest.raises(ValueError, match="saved group 1 holds b"):
        match_groups([["a"]], [["a"], ["b"]])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_a_closure_given_to_the_users_optimizer_counts_once_per_parameter(name, ranks):
    def make(model):
        return getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=False)

    wrapped, optimizer = wrap(make, True)
    torch.manual_seed(7)
    model = Gated()
    plain = make(model)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(wrapped, ranks.rank, step, 3)
            loss.backward()
            return loss

        if step == 1:
            optimizer.optimizer.step(closure)
        else:
            optimizer.step(closure)
        plain.zero_grad()
        (sum(loss_of(model, rank, step, 3) for rank in range(2)) / 2).backward()
        plain.step()
    for parameter_name, value in full_parameters(wrapped).items():
        wanted = model.get_parameter(parameter_name).detach()
        torch.testing.assert_close(value, wanted, rtol=0, atol=2e-5, msg=parameter_name)
