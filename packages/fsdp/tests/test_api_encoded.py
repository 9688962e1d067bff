"""Quantised weights: an int8 stand-in computes as one process does with the same codes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina_testing import device_type
from lamina_testing.toys import Block, OddNet, inputs


class Int8:
    """Symmetric int8 with one scale per block."""

    dtype = torch.int8
    side_dtype = torch.float32

    def __init__(self, block=64):
        self.block = block

    def encode(self, weights, codes, side):
        side.copy_(weights.abs().amax(dim=1).float().clamp(min=1e-12) / 127)
        codes.copy_((weights.float() / side[:, None]).round())

    def decode(self, codes, side, weights):
        weights.copy_(codes.float() * side[:, None])


def rounded(tensor, codec):
    """What is left of a tensor after its codes, block by block from its start."""
    flat = torch.zeros(-(-tensor.numel() // codec.block) * codec.block)
    flat[: tensor.numel()] = tensor.detach().reshape(-1)
    blocks = flat.view(-1, codec.block)
    codes, side = torch.empty(blocks.shape, dtype=codec.dtype), torch.empty(len(blocks))
    codec.encode(blocks, codes, side)
    codec.decode(codes, side, blocks)
    return flat[: tensor.numel()].view(tensor.shape)


def build():
    torch.manual_seed(3)
    return OddNet()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def oracle(world, steps):
    """Forward and backward with rounded weights, steps on the weights themselves."""
    main, compute, codec = build(), build(), Int8()
    optimizer, gradients = sgd(main), {}
    for step in range(steps):
        for weight, own in zip(compute.parameters(), main.parameters(), strict=True):
            weight.data = rounded(own, codec)
        compute.zero_grad()
        for rank in range(world):
            (compute(inputs(compute, 10 * step + rank)).square().mean() / world).backward()
        for own, weight in zip(main.parameters(), compute.parameters(), strict=True):
            own.grad = weight.grad.clone()
        gradients = {n: p.grad.clone() for n, p in main.named_parameters()}
        optimizer.step()
    return gradients, dict(main.named_parameters())


def sharded(world, **settings):
    model = build()
    return fully_shard(
        model,
        sgd(model),
        device_mesh=init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",)),
        fsdp_unit_modules=[Block],
        mixed_precision_policy=MixedPrecisionPolicy(weight_codec=Int8()),
        **settings,
    )


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("double_buffer", [False, True])
def test_training_with_codes_equals_one_process_with_codes(double_buffer, ranks):
    model, optimizer = sharded(ranks.world_size, fsdp_double_buffer=double_buffer)
    gradients = {}
    for step in range(3):
        model(inputs(model, 10 * step + ranks.rank)).square().mean().backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    wanted_gradients, wanted = oracle(ranks.world_size, 3)
    plain = full_parameters(model)
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], wanted_gradients[name], rtol=0, atol=2e-6)
        torch.testing.assert_close(plain[name], value.data, rtol=0, atol=2e-6)


@pytest.mark.ranks(2)
def test_gathers_carry_codes_and_scales_only(ranks):
    model, _ = sharded(2)
    with Ledger() as ledger, torch.no_grad():
        model(inputs(model, 0))
    elements = sum(group.layout.size for group in model.parameter_groups())
    gathered = ledger.bytes(op="all_gather_into")
    assert gathered == (elements + 4 * elements // Int8().block) // 2


@pytest.mark.ranks(2)
def test_blocks_that_shards_would_cut_are_refused(ranks):
    with pytest.raises(ValueError, match=r"block=96.*divisor of 128"):
        fully_shard(build(), mixed_precision_policy=MixedPrecisionPolicy(weight_codec=Int8(96)))
    with pytest.raises(ValueError, match="zero_dp_strategy=3"):
        fully_shard(
            build(),
            zero_dp_strategy=2,
            mixed_precision_policy=MixedPrecisionPolicy(weight_codec=Int8()),
        )
