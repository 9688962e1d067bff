"""States of rarer kinds: nested optimizer state, conjugated views, tensors without memory."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

from lamina.checkpoint import (
    CheckpointManager,
    CheckpointMismatchError,
    JoinedOptimizers,
    PerRank,
    import_dcp,
    verify_checkpoint,
)
from lamina.checkpoint.storage.locations import LocalLocation, write_whole
from lamina.checkpoint.storage.manifest import VALUES, Manifest
from lamina_testing import device_type


class Preconditioned(torch.optim.Optimizer):
    """Keeps state as SOAP and Shampoo do: matrices in lists, counts in dicts; and one for all."""

    def __init__(self, parameters, lr=0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["GG"] = [torch.eye(n) for n in p.shape]
                    state["counts"] = {"steps": torch.zeros(()), "seen": 0}
                state["counts"]["steps"] += 1
                state["counts"]["seen"] += 1
                for matrix in state["GG"]:
                    matrix.add_(p.grad.norm())
                p.sub_(p.grad / state["GG"][0].norm() / state["counts"]["steps"] * group["lr"])


def lbfgs(parameters) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


def make(kind, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    return {"model": model, "optimizer": kind(model.parameters(), **options)}


def train(state, seeds) -> list[float]:
    losses = []
    for seed in seeds:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

        def loss(x=x):
            state["optimizer"].zero_grad()
            value = (state["model"](x) - x[:, :2]).square().mean()
            value.backward()
            return value

        losses.append(loss().item())
        if isinstance(state["optimizer"], torch.optim.LBFGS):
            state["optimizer"].step(loss)
        else:
            state["optimizer"].step()
    return losses


@pytest.mark.parametrize("kind", [lbfgs, Preconditioned])
def test_nested_optimizer_state_comes_back_into_one_that_never_stepped(tmp_path, kind):
    state = make(kind)
    train(state, range(3))
    CheckpointManager(tmp_path).save(3, state)
    expected = train(state, range(3, 6))
    for stepped in (0, 1):  # an LBFGS that stepped once has shorter lists
        other = make(kind, seed=9)
        train(other, range(stepped))
        CheckpointManager(tmp_path).restore(other)
        assert train(other, range(3, 6)) == expected


def test_what_was_not_read_never_reaches_an_optimizer(tmp_path):
    state = make(Preconditioned, lr=torch.tensor(0.5))
    train(state, range(2))
    manager = CheckpointManager(tmp_path)
    manager.save(2, state)
    other = make(Preconditioned, lr=0.25)
    with pytest.raises(CheckpointMismatchError, match=r"only in .*param_groups\.0\.lr"):
        manager.restore(other)
    manager.restore(other, strict=False, exclude=["optimizer.state.0.weight.GG.1"])
    optimizer = other["optimizer"]
    assert optimizer.param_groups[0]["lr"] == 0.25
    states = [optimizer.state[p] for p in other["model"].parameters()]
    assert "GG" not in states[0]  # a part of a list is none
    assert states[0]["counts"] == {"steps": 2, "seen": 2}
    assert len(states[1]["GG"]) == 1
    train(own := make(Preconditioned, seed=4), range(1))
    matrices = own["optimizer"].state[own["model"][0].weight]["GG"]
    kept = matrices[1].clone()
    manager.restore(own, strict=False, exclude=["optimizer.state.0.weight.GG.1"])
    stored = state["optimizer"].state[state["model"][0].weight]["GG"]
    assert torch.equal(matrices[0], stored[0])
    assert torch.equal(matrices[1], kept)


def test_an_object_is_restored_whatever_its_state_of_now_holds(tmp_path):
    class Schedule:
        def __init__(self, **state):
            self.state = state

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    CheckpointManager(tmp_path).save(1, {"schedule": Schedule(seen={"a": 1}, best=torch.ones(2))})
    schedule = Schedule(seen=defaultdict(int), best=torch.zeros(2))
    CheckpointManager(tmp_path).restore({"schedule": schedule})
    assert schedule.state["seen"] == {"a": 1}
    assert torch.equal(schedule.state["best"], torch.ones(2))


def test_views_that_conjugate_or_negate_are_stored_with_their_values(tmp_path):
    view = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert view.is_conj()
    assert view.imag.is_neg()

    def state_of(values):
        model = nn.Module()
        model.register_buffer("turned", values)
        return {"plain": values, "negated": values.imag, "own": PerRank(values), "model": model}

    CheckpointManager(tmp_path).save(1, state_of(view))
    assert verify_checkpoint(tmp_path / "step-00000001") == []
    for target in (torch.zeros_like(view), torch.zeros(2, dtype=view.dtype).conj()):
        state = state_of(target)
        CheckpointManager(tmp_path).restore(state)
        expected = torch.tensor([1 - 2j, 3 + 4j])
        assert torch.equal(state["plain"], expected)
        assert torch.equal(state["negated"], expected.imag)
        assert torch.equal(state["own"].value, expected)
        assert torch.equal(state["model"].turned, expected)


def test_a_tensor_on_the_meta_device_is_refused_by_name(tmp_path):
    state = make(torch.optim.AdamW)
    train(state, range(1))
    CheckpointManager(tmp_path).save(1, state)
    with torch.device("meta"):
        bare = make(torch.optim.AdamW)
    for load in (
        lambda: CheckpointManager(tmp_path).restore(bare),
        lambda: CheckpointManager(tmp_path).restore({"model": bare["model"]}, strict=False),
        lambda: import_dcp({"model": bare["model"]}, tmp_path / "step-00000001"),
    ):
        with pytest.raises(CheckpointMismatchError, match=r"'model\.0\.weight' .*meta.*to_empty"):
            load()
    for state_of in ({"model": bare["model"]}, {"rows": [torch.ones(1, device="meta")]}):
        with pytest.raises(TypeError, match=r"'(model\.0\.weight|rows\.0)' .*meta.*no values"):
            CheckpointManager(tmp_path).save(2, state_of)
    assert CheckpointManager(tmp_path).latest() == 1
    model = bare["model"].to_empty(device=device_type())
    CheckpointManager(tmp_path).restore({"model": model})
    assert torch.equal(model[2].weight, state["model"][2].weight)


@pytest.mark.parametrize("state", [nn.Linear(1, 1), [nn.Linear(1, 1)], {1: nn.Linear(1, 1)}])
def test_a_state_that_is_no_dict_of_names_is_refused(tmp_path, state):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": nn.Linear(1, 1)})
    for call in (lambda: manager.save(2, state), lambda: manager.restore(state)):
        with pytest.raises(TypeError, match=r"the state .*(Linear|list|1).*\{\"model\": model"):
            call()


def test_a_value_of_ranks_that_is_refused_changes_no_tensor(tmp_path):
    state = {**make(torch.optim.SGD), "mine": PerRank(3, on_change="raise")}
    CheckpointManager(tmp_path).save(1, state)
    path = tmp_path / "step-00000001"

    text = LocalLocation(path).read(VALUES).replace(b'"$ranks": [', b'"$ranks": [null, ')
    manifest = Manifest.read(LocalLocation(path))
    summed = write_whole(LocalLocation(path), VALUES, text)
    Manifest(1, 2, manifest.torch, {**manifest.files, VALUES: summed}).write(LocalLocation(path))
    other = {**make(torch.optim.SGD, seed=3), "mine": PerRank(4, on_change="raise")}
    before = other["model"][0].weight.clone()
    with pytest.raises(CheckpointMismatchError, match="saved by 2 ranks"):
        CheckpointManager(tmp_path).restore(other)
    assert torch.equal(other["model"][0].weight, before)


class Counting(nn.Linear):
    """Has a state of its own beside tensors, with a tensor in it."""

    seen = torch.zeros(2)

    def get_extra_state(self):
        return {"seen": [self.seen], "n": 1}

    def set_extra_state(self, state) -> None:
        assert state["n"] == 1
        (self.seen,) = state["seen"]


def test_what_was_not_read_never_reaches_a_module(tmp_path):
    saved, other = Counting(2, 2), Counting(2, 2)
    saved.seen, other.seen = torch.ones(2), torch.full((2,), 2.0)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": saved})
    manager.restore({"model": other}, exclude=["model._extra_state.seen"])
    assert torch.equal(other.weight, saved.weight)
    assert other.seen.tolist() == [2, 2]
    manager.restore({"model": other})
    assert other.seen.tolist() == [1, 1]


def test_an_optimizer_takes_nothing_but_an_optimizers_state(tmp_path):
    state = make(torch.optim.AdamW)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"optimizer": state["model"]})
    with pytest.raises(CheckpointMismatchError, match="'optimizer' is an optimizer here, and none"):
        manager.restore({"optimizer": state["optimizer"]})


class Several:
    """Optimizers of two groups each over parts of a model, and the entry that a state has."""

    def __init__(self, parts: int, rate: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.optimizers = []
        for part in range(parts):
            layers = list(self.model)[part::parts]
            groups = [
                {"params": [layer.weight for layer in layers], "lr": rate},
                {"params": [layer.bias for layer in layers], "lr": rate / 2, "weight_decay": 0.0},
            ]
            self.optimizers.append(torch.optim.AdamW(groups))
        self.entry = JoinedOptimizers(self.optimizers) if parts > 1 else self.optimizers[0]
        self.state = {"model": self.model, "optimizer": self.entry}

    def train(self, steps: int) -> None:
        for step in range(steps):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("restored", [1, 2, 4])
def test_optimizers_that_are_joined_are_stored_as_one_over_all_parameters(
    tmp_path, saved, restored
):
    plain, before, after = Several(1, 0.1), Several(saved, 0.1), Several(restored, 0.7)
    plain.train(2)
    before.train(2)
    CheckpointManager(tmp_path).save(1, before.state)
    after.train(1)
    CheckpointManager(tmp_path).restore(after.state)
    plain.train(2)
    after.train(2)
    for wanted, found in zip(plain.model.parameters(), after.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_optimizers_that_cannot_be_joined_are_refused():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    sgd = torch.optim.SGD
    both = [{"params": [second.weight]}, {"params": [second.bias]}]
    for optimizers, message in (
        ([], r"optimizers \[\].*at least one"),
        ([sgd(first.parameters()), torch.optim.Adam(second.parameters())], "'Adam', 1.*'SGD', 1"),
        ([sgd(first.parameters()), sgd(both)], "'SGD', 1.*'SGD', 2"),
        ([sgd(first.parameters()), sgd([first.bias])], "the same parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            JoinedOptimizers(optimizers)
