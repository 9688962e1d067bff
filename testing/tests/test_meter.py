"""The meter against bytes counted by hand."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lamina_testing import Meter, live_bytes, live_storages

N = 1024
F32 = 4 * N


def fresh(dtype=torch.float32):
    return torch.ones(N, dtype=dtype)


def test_each_kind_of_copy_counts_the_bytes_it_writes():
    a, b, square = fresh(), fresh(), torch.ones(32, 32)
    with Meter() as meter:
        a.copy_(b)
        a.clone()
        a.to(torch.bfloat16)
        torch.cat([a, b])
        torch.stack([a, b])
        a + b
        square.t().contiguous()
        square.t().reshape(-1)
        a.repeat(2)
        torch._foreach_copy_([a], [b])
        torch._foreach_add([a], [b])
        torch.split_with_sizes_copy(a, [N // 2, N // 2])
        torch.nn.functional.pad(a, (0, N))
    assert dict(meter.by_op) == {
        "copy_": F32,
        "clone": 3 * F32,
        "_to_copy": F32 // 2,
        "cat": 2 * F32,
        "stack": 2 * F32,
        "add": F32,
        "repeat": 2 * F32,
        "_foreach_copy_": F32,
        "_foreach_add": F32,
        "split_with_sizes_copy": F32,
        "constant_pad_nd": 2 * F32,
    }
    assert meter.bytes_copied == sum(meter.by_op.values())


def test_what_moves_nothing_counts_nothing():
    a, b = fresh(), fresh()
    with Meter() as meter:
        a.add_(b)
        torch.add(a, b, out=a)
        a.zero_()
        a.mul_(2.0)
        a * b
        a.view(2, -1).t().detach()
        a.to(torch.float32)
        torch.empty(N)
    assert meter.bytes_copied == 0


def test_tensors_below_the_threshold_do_not_count():
    with Meter(min_numel=N) as meter:
        torch.ones(N - 1).clone()
        assert meter.bytes_copied == 0
        torch.ones(N).clone()
    assert meter.bytes_copied == F32


def test_copies_in_backward_and_in_hooks_are_seen():
    weight = nn.Parameter(fresh())
    weight.register_hook(lambda gradient: gradient.clone())
    with Meter(min_numel=N) as meter:
        ((weight * 2).sum() + (weight * 3).sum()).backward()
    # Two uses: autograd adds the gradients out of place, then the hook clones the sum.
    assert dict(meter.by_op) == {"add": F32, "clone": F32}


def test_copies_inside_an_optimizer_are_seen():
    weight = nn.Parameter(fresh(torch.bfloat16))
    master = nn.Parameter(fresh())
    optimizer = torch.optim.SGD([master], lr=1.0)
    with Meter(min_numel=N) as meter:
        master.grad = weight.detach().float()
        optimizer.step()
        weight.data.copy_(master.data)
    assert dict(meter.by_op) == {"_to_copy": F32, "copy_": F32 // 2}


@pytest.mark.ranks(1)
def test_copies_inside_a_tensor_subclass_are_seen():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    tensor = DTensor.from_local(fresh(), init_device_mesh("cpu", (1,)), [Shard(0)])
    with Meter() as meter:
        tensor.clone()
    assert dict(meter.by_op) == {"clone": F32}


@pytest.mark.ranks(2)
def test_the_copies_of_torchs_fsdp_are_seen(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = 64
    module = nn.Linear(size, size, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (ranks.world_size,)))
    with Meter(min_numel=size * size // 2) as meter:
        module(torch.ones(1, size)).sum().backward()
    whole = 4 * size * size
    assert meter.by_op["split_with_sizes_copy"] >= whole, "copy-out of the gathered parameter"
    copied_in = meter.by_op["chunk_cat"] + meter.by_op["chunk_cat_mixed_dtype"]
    assert copied_in == whole, "copy-in of its gradient"


def test_views_count_once_and_released_storage_counts_nothing():
    a = fresh()
    before = live_bytes()
    views = [a[1:], a.view(2, -1), nn.Parameter(a)]
    assert live_bytes() == before
    assert live_storages()[a.data_ptr()] == F32
    a.untyped_storage().resize_(0)
    assert live_bytes() == before - F32
    a.untyped_storage().resize_(2 * F32)
    assert live_bytes() == before + F32
    del a, views
    assert live_bytes() == before - F32


def test_gradients_count_though_nobody_has_looked_at_them():
    weight = nn.Parameter(fresh())
    before = live_bytes()
    (weight * 2).sum().backward()
    assert live_bytes() == before + F32


def test_a_view_that_autograd_refuses_to_place_counts_as_memory():
    base = torch.ones(N, requires_grad=True) * 1
    views = [half.view(2, -1) for half in base.split(N // 2)]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = views[0].is_leaf
    with Meter() as meter:
        before = meter.live_bytes()
        kept = fresh()
        assert meter.live_bytes() - before == F32
    assert kept is not None
    assert views[0]._base is base  # lived while the meter looked


def test_tensors_without_memory_do_not_count():
    before = live_bytes()
    tensors = [torch.ones(N, device="meta")]
    with torch._subclasses.FakeTensorMode():
        tensors.append(torch.ones(N))
        assert live_bytes() == before
    with Meter() as meter:
        begin = meter.live_bytes()
        tensors.append(torch.ones(N, device="meta"))
        assert meter.live_bytes() == begin


@pytest.mark.ranks(1)
def test_a_wrapper_subclass_counts_as_what_it_wraps():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (1,))
    before = live_bytes()
    tensor = DTensor.from_local(fresh(), mesh, [Replicate()])
    assert live_bytes() == before + F32
    del tensor


def test_the_peak_is_the_most_that_lived_at_once():
    gc.collect()
    with Meter() as meter:
        base = meter.live_bytes()
        a = torch.ones(N)
        b = torch.ones(N)
        del a
        c = torch.ones(N)
        assert meter.live_bytes() == base + 2 * F32
        assert meter.peak_live_bytes == base + 2 * F32
        d = b * c
        del b, c
        assert meter.live_bytes() == base + F32
        assert meter.peak_live_bytes == base + 3 * F32
        meter.reset()
        assert meter.peak_live_bytes == base + F32
        d.untyped_storage().resize_(10 * F32)
        d.view(-1)
        assert meter.peak_live_bytes == base + 10 * F32


def test_what_autograd_saves_is_live_until_backward():
    weight = nn.Parameter(fresh())
    with Meter() as meter:
        base = meter.live_bytes()
        loss = (weight.exp() * 2).sum()  # saves the result of exp
        small = loss.untyped_storage().nbytes()
        assert meter.live_bytes() == base + F32 + small
        loss.backward()
        assert meter.live_bytes() == base + F32 + small, "saved is gone, the gradient is there"
        weight.grad = None
        assert meter.live_bytes() == base + small


def test_tensors_made_before_the_meter_are_live_in_it():
    a = fresh()
    with Meter() as meter:
        assert meter.live_storages()[a.data_ptr()] == F32
        address = a.data_ptr()
        del a
        assert address not in meter.live_storages()


def test_garbage_from_before_is_not_memory_that_was_given_back():
    loop: list[object] = [fresh()]
    loop.append(loop)
    del loop
    with Meter() as meter:
        before = meter.live_bytes()
        gc.collect()
        assert meter.live_bytes() == before


class Loop:
    """Garbage as soon as nobody holds it, but not freed before the collector finds it."""

    def __init__(self):
        self.tensor, self.itself = fresh(), self


def test_garbage_that_other_garbage_held_is_gone_too():
    held = None
    for _ in range(4):
        loop = Loop()
        weakref.finalize(loop, lambda inner: None, held)  # lets `held` go when `loop` has gone
        held = loop
    del held, loop
    before = live_bytes()
    for _ in range(5):
        gc.collect()
    assert live_bytes() == before
