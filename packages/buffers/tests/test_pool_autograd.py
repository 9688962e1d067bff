"""What autograd saved out of pooled storage is what backward reads, or an error says so."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lamina.buffers import BufferLayout, StaleStorageError, StoragePool, TensorSpec
from lamina.buffers.engine import SavedTensorGuard
from lamina_testing import Meter

from .pools import address, conflicts_of, slotted


class Unit(nn.Module):
    """A linear layer whose weight is gathered into pooled storage, as an engine would do it."""

    def __init__(self, pool, key, weight):
        super().__init__()
        self.pool, self.key, self.content = pool, key, weight
        self.layout = BufferLayout.plan([TensorSpec("w", tuple(weight.shape))], 1, alignment=1)
        if key not in pool:
            pool.register(key, self.layout.size, weight.dtype)
        self.bind()

    def bind(self):
        self.weight = nn.Parameter(self.pool.views(self.key, self.layout)["w"])
        self.epoch = self.pool.epoch(self.key)

    def gather(self, **options):
        self.pool.acquire(self.key, **options)
        if self.epoch != self.pool.epoch(self.key):
            self.bind()
        self.pool.destination(self.key).copy_(self.content.view(-1))

    def forward(self, x):
        self.gather()
        y = torch.tanh(x @ self.weight)
        self.pool.release(self.key)
        return y


def chain(pool, seed=0, size=4, units="abc"):
    generator = torch.Generator().manual_seed(seed)
    return [Unit(pool, key, torch.randn(size, size, generator=generator)) for key in units]


def reference(units, x):
    """Oracle: the same chain in plain PyTorch."""
    weights = [unit.content.clone().requires_grad_() for unit in units]
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.sum().backward()
    return [weight.grad for weight in weights]


def backward_through(units, y, **options):
    """Backward unit by unit, each gathered before its part."""
    for unit in reversed(units):
        unit.gather(**options)
    y.sum().backward()


@pytest.mark.parametrize("mode", ["resize", "slots"])
@pytest.mark.parametrize("guarded", [False, True])
def test_gradients_are_right_when_units_come_back(mode, guarded):
    pool = StoragePool(mode=mode, poison=True)
    units = chain(pool)
    if mode == "slots":
        # All three are live in this backward, and the plan knows it.
        pool.plan_slots({"a": "bc", "b": "c"}, dedicated=True)
        for unit in units:
            unit.bind()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        y = x
        with SavedTensorGuard(pool) if guarded else torch.enable_grad():
            for unit in units:
                y = unit(y)
        backward_through(units, y, epoch=0 if mode == "resize" else 1)
        for unit, grad in zip(units, reference(units, x), strict=True):
            assert torch.equal(unit.weight.grad, grad)
            unit.weight.grad = None
            pool.release(unit.key)


def test_a_forward_that_is_dropped_leaves_nothing():
    """tanh and softmax save their own results, which a hook must not keep with their graph."""
    pool = StoragePool()
    (unit,) = chain(pool, units="a")
    live = []
    with Meter() as meter:
        for _ in range(3):
            with SavedTensorGuard(pool):
                y = unit(torch.ones(2, 4)).tanh().softmax(dim=-1)
            assert y.requires_grad
            del y
            gc.collect()
            live.append(meter.live_bytes())
    assert live == [live[0]] * 3


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("saved", ["result", "input"])
def test_a_saved_tensor_that_was_written_to_is_refused(saved, guarded):
    """Torch says so where there is no hook, and does not look where there is one."""
    w = torch.ones(3, requires_grad=True)
    with SavedTensorGuard(StoragePool()) if guarded else torch.enable_grad():
        doubled = w * 2
        y = doubled.exp() if saved == "result" else doubled.square()
        (y if saved == "result" else doubled).add_(1)
    words = "written to in place after forward had saved it" if guarded else "inplace operation"
    with pytest.raises(RuntimeError, match=words):
        y.sum().backward()


def test_second_derivatives_go_through_the_guard():
    w = torch.linspace(-1, 1, 3, dtype=torch.float64, requires_grad=True)

    def function(w):
        with SavedTensorGuard(StoragePool()):
            return (w * 2).exp().tanh()

    assert torch.autograd.gradgradcheck(function, (w,))


def test_forgetting_to_gather_gives_nan_under_poison_and_an_error_under_the_guard():
    for guarded in (False, True):
        pool = StoragePool(poison=True)
        units = chain(pool, units="a")
        x = torch.randn(2, 4, requires_grad=True)
        with SavedTensorGuard(pool) if guarded else torch.enable_grad():
            y = units[0](x)
        if guarded:
            with pytest.raises(StaleStorageError, match=r"'a' \(generation 1\) is not live"):
                y.sum().backward()
        else:
            y.sum().backward()
            assert x.grad.isnan().all()


def test_the_guard_finds_a_slot_that_holds_another_unit():
    pool = slotted("abc")
    assert address(pool, "a") == address(pool, "c")
    units = {}
    for key in "abc":
        pool.unregister(key)
    pool = StoragePool(mode="slots")
    made = chain(pool)
    pool.plan_slots(conflicts_of("abc"))
    for unit in made:
        unit.bind()
        units[unit.key] = unit
    x = torch.randn(2, 4, requires_grad=True)
    with SavedTensorGuard(pool):
        y = units["a"](x)
    units["c"].gather()  # takes a's slot
    with pytest.raises(StaleStorageError, match=r"'a' .* is not live: its slot holds 'c'"):
        y.sum().backward()


def test_a_key_that_must_come_back_to_its_slot_says_when_it_cannot():
    pool = slotted()
    epoch = pool.epoch("a")
    pool.acquire("a", epoch=epoch)
    pool.release("a")
    pool.acquire("c")
    with pytest.raises(StaleStorageError, match=r"'a' must come back to its slot.*'c' is live"):
        pool.acquire("a", epoch=epoch)
    assert "a" not in pool.live_keys()
    pool.acquire("a")  # somewhere else
    with pytest.raises(StaleStorageError, match=r"'a': views were saved in epoch 1.*epoch 2"):
        pool.acquire("a", epoch=epoch)


def test_the_guard_refuses_units_that_have_moved():
    pool = StoragePool(mode="slots")
    units = chain(pool)
    pool.plan_slots(conflicts_of("abc"))
    for unit in units:
        unit.bind()
    y = torch.randn(2, 4, requires_grad=True)
    with SavedTensorGuard(pool):
        for unit in units:
            y = unit(y)
    with pytest.raises(StaleStorageError, match=r"was saved in epoch 1 .* has moved since"):
        backward_through(units, y)


def test_the_guard_leaves_other_tensors_alone():
    pool = StoragePool()
    pool.register("a", 4, torch.float32)
    x = torch.randn(3, requires_grad=True)
    with SavedTensorGuard(pool):
        y = (x.exp() * x.to_sparse().to_dense()).sum()
    y.backward()
    assert torch.allclose(x.grad, x.exp() * (x + 1))


def test_a_second_gather_is_no_modification_for_autograd():
    """Without the guard: the destination has a version counter of its own."""
    pool = StoragePool()
    unit = chain(pool, units="a")[0]
    x = torch.randn(2, 4, requires_grad=True)
    y = unit(x)
    unit.gather()
    y.sum().backward()
    y = unit(x)
    pool.acquire("a").copy_(unit.content.view(-1))  # through the tensor itself: seen
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
