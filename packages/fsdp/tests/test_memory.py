"""Memory as seen from outside: storages that operators made, and what a deleted model leaves."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from lamina.collectives.engine import kept_bytes, release_kept
from lamina.ddp import memory_plan
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.fsdp.api.build import _of_two_units
from lamina_testing import Meter, bytes_at_rest, device_type, live_bytes, not_freed
from lamina_testing.simulated import simulated_world
from lamina_testing.toys import Block

WIDTH, DEPTH, BATCH = 64, 6, 4
SLACK = 16 * 1024  # flags, handles, tensors of small parameters


class Deep(nn.Module):
    """Blocks that are alike, and a root with next to nothing."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def activations():
    """What autograd holds of one forward, and the gradients on their way, in one process."""
    model = Deep()
    with Meter() as meter:
        before = meter.live_bytes()
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        return meter.live_bytes() - before + 16 * BATCH * WIDTH * int(loss.numel())


def sharded(world, width=WIDTH, **settings):
    model = Deep(width)
    if "device_mesh" not in settings:
        settings["device_mesh"] = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fully_shard(model, optimizer, fsdp_unit_modules=[Block], **settings)


def step(model, optimizer, width=WIDTH):
    model(torch.randn(BATCH, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("slots", [False, True])
def test_a_step_peaks_at_shards_two_slots_and_two_units_of_gradients(slots, ranks):
    extra = activations() + SLACK
    before = bytes_at_rest() - kept_bytes()
    model, optimizer = sharded(ranks.world_size, fsdp_double_buffer=slots)
    for _ in range(2):
        step(model, optimizer)
    gc.collect()
    with Meter() as meter:
        meter.reset()
        step(model, optimizer)
        peak = meter.peak_live_bytes - before - kept_bytes()  # what transports receive into
    sizes = [4 * group.layout.size for group in model.parameter_groups()]
    shards = 2 * sum(sizes) // ranks.world_size  # weights and main grads
    # Two units gathered; two gradient buffers, on the wire or being filled, beside what autograd
    # has just made of the largest parameter. On a GPU a reduction receives as much as it sends.
    receives = 2 * max(sizes) if device_type() == "cuda" else 0
    working = 4 * max(sizes) + receives + 4 * 3 * WIDTH * WIDTH
    assert peak <= shards + working + extra, (peak - shards - extra) / max(sizes)
    assert peak <= memory_plan(model).peak + 4 * 3 * WIDTH * WIDTH + extra
    assert peak > shards + 2 * max(sizes), "the meter misses something"


def replicas(outer):
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("outer", "inner"))
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "outer_dp_sharding_strategy": outer,
    }


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
KINDS = {
    # Settings; then bytes per element, padding apart. At rest: weights, main weights, main grads.
    # Whole weights of a unit. Its gradients while they are summed: two units'. Of two axes (with
    # inner sums), and of sums that go to the host, two are on the wire and one is being filled.
    "HSDP": (lambda: replicas(0), (4 / 2, 0, 4 / 2), 4, 2 * (4 + 4 / 2) + 4),
    "HFSDP": (lambda: replicas(1), (4 / 2, 0, 4 / 4), 4, 2 * (4 + 4 / 2) + 4),
    "bf16": (lambda: {"mixed_precision_policy": BF16}, (0, 4 / 4, 4 / 4), 2, 2 * 2),
    "offload": (
        lambda: {"offload_policy": CPUOffloadPolicy()},
        (4 / 4, 0, 4 / 4),
        4,
        2 * (4 + 4 / 4) + 4,
    ),
}
PADDING = 1.05  # at most, in a toy of this size


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", list(KINDS))
def test_rest_peak_and_end_follow_from_placements_and_dtypes(kind, ranks):
    settings, rest, whole, summed = KINDS[kind]
    settings = settings()
    of_block, of_model = (sum(p.numel() for p in m.parameters()) for m in (Block(WIDTH), Deep()))
    autograd = activations() + SLACK + 4 * 3 * WIDTH * WIDTH  # the largest gradient as it is made
    release_kept()
    before = bytes_at_rest() - kept_bytes()
    model, optimizer = sharded(4, **settings)
    step(model, optimizer)
    plan = memory_plan(model)
    held = bytes_at_rest() - kept_bytes() - before
    states = plan.resident - plan.windows  # what collectives keep is left out
    assert states <= held <= states + 4096, str(plan)
    assert sum(rest) * of_model <= held <= sum(rest) * of_model * PADDING
    with Meter() as meter:
        meter.reset()
        step(model, optimizer)
        peak = meter.peak_live_bytes - before - kept_bytes()  # what transports receive into
    # On a GPU two reductions receive as much as they send, in the wire's dtype.
    receives = 2 * whole if device_type() == "cuda" else 0
    working = sum(rest) * of_model + (2 * whole + summed + receives) * of_block
    assert peak <= working * PADDING + autograd, (peak, working, str(plan))
    assert peak <= plan.peak + autograd, (peak, str(plan))
    assert peak > held + 2 * whole * of_block, "the meter misses something"
    groups = [weakref.ref(group) for group in model.parameter_groups()]
    del model, optimizer, plan
    assert not_freed(groups) == []
    release_kept()
    assert bytes_at_rest() - kept_bytes() - before <= SLACK  # 1 MiB would be the whole toy


@pytest.mark.ranks(2)
@pytest.mark.parametrize("slots", [False, True])
def test_gathers_bring_main_weights_rounded_once_and_no_rank_keeps_them_so(slots, ranks):
    """After steps and after a user's own write; frozen weights have no others to be cast from."""
    model = Deep()
    model.blocks[0].requires_grad_(False)
    model, optimizer = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_mesh=init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)),
        fsdp_unit_modules=[Block],
        mixed_precision_policy=BF16,
        fsdp_double_buffer=slots,
    )
    for factor in (1.0, 1.01):
        step(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        whole = {name: p.full_tensor() for name, p in model.named_parameters()}
        with model.unsharded():
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, whole[name].to(torch.bfloat16)), name
    assert any(not torch.equal(each, each.to(torch.bfloat16)) for each in whole.values())
    kept = {group.weights.local.dtype for group in model.parameter_groups() if group.requires_grad}
    assert kept == {torch.float32}


@pytest.mark.ranks(2)
def test_a_deleted_model_leaves_nothing(ranks):
    """Transports keep a little for the next model's calls until they are told."""
    width = 256  # blocks of 1.5 MiB
    before = bytes_at_rest() - kept_bytes()
    model, optimizer = sharded(2, width)
    for _ in range(2):
        step(model, optimizer, width)
    assert live_bytes() - before > 4 << 20
    del model, optimizer
    assert bytes_at_rest() - kept_bytes() - before <= 1 << 20
    release_kept()
    assert kept_bytes() == 0 or device_type() == "cuda"  # windows stay
    assert bytes_at_rest() - kept_bytes() - before <= 1 << 20


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [1, 3])
def test_zeroed_gradients_are_given_back_before_activations_are_made(strategy, ranks):
    model, optimizer = sharded(2, zero_dp_strategy=strategy)
    model(torch.randn(BATCH, WIDTH)).square().mean().backward()
    held = []

    def forward():
        with torch.no_grad():
            model(torch.randn(BATCH, WIDTH))
        gc.collect()
        held.append(live_bytes() - kept_bytes())

    gradients = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    forward()  # not zeroed: kept
    optimizer.zero_grad()
    forward()  # zeroed, but the user still holds them
    for name, gradient in gradients.items():
        assert torch.equal(gradient.full_tensor(), whole[name])
    del gradients, gradient
    forward()
    assert held[1] == held[0]
    assert held[0] - held[2] == memory_plan(model).main_grads


@pytest.mark.ranks(1, init=False, backend="gloo")  # simulated groups order no streams
def test_over_a_backend_reductions_receive_into_three_messages_each(ranks):
    """Eight simulated ranks that share no memory, as over NCCL."""
    width, message, peaks, plans = 256, 1 << 16, [], []
    for given in (1 << 30, message):
        gc.collect()
        with simulated_world(8):
            model, optimizer = sharded(8, width, reduce_message_bytes=given)
            for _ in range(2):
                step(model, optimizer, width)
            gc.collect()
            with Meter() as meter:
                before = meter.live_bytes()
                step(model, optimizer, width)
                peaks.append(meter.peak_live_bytes - before)
            plans.append(memory_plan(model))
            unit = max(4 * group.layout.size for group in model.parameter_groups())
            del model, optimizer
    saved = 2 * (unit - 3 * message)  # two reductions are in flight
    assert plans[0].in_flight - plans[1].in_flight == saved
    assert plans[0].in_flight == 4 * unit
    assert peaks[0] - peaks[1] == pytest.approx(saved, rel=0.05)


def test_on_a_gpu_the_reduction_of_a_large_head_goes_on_beside_a_block():
    def unit(module_class, wire_bytes):
        group = SimpleNamespace(requires_grad=True, trained=SimpleNamespace(wire_bytes=wire_bytes))
        return SimpleNamespace(module_class=module_class, groups=[group])

    units = [unit("Linear", 100), unit("Block", 30), unit("Block", 20), unit("Embedding", 90)]
    assert _of_two_units(units, of_gpu=True) == 30 + 100
    assert _of_two_units(units, of_gpu=False) == 30 + 30
