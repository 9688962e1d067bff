"""``fully_shard`` gathers the weights of FP8 products as FP8 codes with a scale per block."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.collectives import Ledger
from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, UnavailableError, fully_shard
from lamina.models import (
    Float8Codec,
    GPTModel,
    Precision,
    TransformerConfig,
    apply_recompute,
    float8_weights,
)
from lamina_testing import Meter, device_type

CONFIG = TransformerConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, ffn_size=48, max_sequence_length=32,
    precision=Precision(backend="torch-fp8"),
)  # fmt: skip
STEPS = 3


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def sharded(config=CONFIG, *, codec=True, param_dtype=None, **settings):
    model = GPTModel(config, seed=1)
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        weight_codec=Float8Codec() if codec else None,
        encoded=float8_weights(model),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    return fully_shard(
        model, optimizer, device_mesh=mesh, mixed_precision_policy=policy, **settings
    )


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight after e4m3 codes with a power of two per 128 elements from its start."""
    pieces = []
    for piece in weight.detach().flatten().split(128):
        scale = 2.0 ** math.floor(math.log2(448 / piece.abs().max()))
        pieces.append((piece * scale).to(torch.float8_e4m3fn).float() / scale)
    return torch.cat(pieces).view(weight.shape)


def oracle():
    """One process: both ranks' batches, products of rounded weights, steps on the weights."""
    main, compute = GPTModel(CONFIG, seed=1), GPTModel(CONFIG, seed=1)
    optimizer = torch.optim.SGD(main.parameters(), lr=0.1, momentum=0.9)
    names = set(float8_weights(main))
    for step in range(STEPS):
        compute.zero_grad()
        for (name, own), weight in zip(main.named_parameters(), compute.parameters(), strict=True):
            weight.data = rounded(own) if name in names else own.detach().clone()
        for rank in range(2):
            (compute(*batch(10 * step + rank)) / 2).backward()
        for own, weight in zip(main.parameters(), compute.parameters(), strict=True):
            own.grad = weight.grad.clone()
        optimizer.step()
    return dict(main.named_parameters())


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_training_equals_one_process_with_decoded_weights(recompute, cache, ranks):
    model, optimizer = sharded(keep_fp8_transpose_cache=cache)
    apply_recompute(model, recompute)
    for step in range(STEPS):
        model(*batch(10 * step + ranks.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = full_parameters(model)
    for name, expected in oracle().items():
        torch.testing.assert_close(found[name], expected.detach(), rtol=0, atol=2e-6)


@pytest.mark.ranks(2)
def test_gathers_carry_half_of_what_bf16_does():
    size = {}
    for codec in (False, True):
        model, _ = sharded(codec=codec, param_dtype=torch.bfloat16)
        weights = sum(
            p.numel() for n, p in model.named_parameters() if "blocks" in n and p.ndim > 1
        )
        with Ledger() as ledger, torch.no_grad():
            model(*batch(0))
        for record in ledger.records:
            if record.op == "all_gather_into":
                key = (codec, record.dtype)
                size[key] = size.get(key, 0) + record.bytes
    # This rank sends its half of the codes, and a byte for each block of 128.
    codes = size[True, torch.float8_e4m3fn]
    assert codes == pytest.approx(weights / 2, rel=0.01)
    assert size[True, torch.uint8] == codes / 128
    saved = size[False, torch.bfloat16] - size[True, torch.bfloat16]
    assert (codes + size[True, torch.uint8]) / saved == pytest.approx(0.5, abs=0.01)


def left_behind(model) -> int:
    with Meter() as meter:
        before = meter.live_bytes()
        loss = model(*batch(0))
        after = meter.live_bytes()
    loss.backward()
    return after - before


@pytest.mark.ranks(2)
def test_the_transpose_cache_costs_a_byte_per_weight():
    plain, cached = (sharded(keep_fp8_transpose_cache=cache)[0] for cache in (False, True))
    weights = sum(p.numel() for n, p in plain.named_parameters() if "blocks" in n and p.ndim > 1)
    gradients = [full_gradients(model) for model in (plain, cached) if left_behind(model)]
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name
    assert left_behind(cached) - left_behind(plain) == pytest.approx(weights, rel=0.05)
    with pytest.raises(UnavailableError, match="no module of GPTModel multiplies in FP8"):
        sharded(replace(CONFIG, precision=Precision()), codec=False, keep_fp8_transpose_cache=True)


@pytest.mark.ranks(2)
def test_a_model_from_the_meta_device_with_histories_trains(ranks):
    precision = Precision(backend="torch-fp8", amax="delayed", history=2)
    config = replace(CONFIG, precision=precision)
    with torch.device("meta"):
        model = GPTModel(config, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp_shard",))
    model, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, init_model_with_meta_device=True
    )
    losses = []
    for _ in range(5):
        loss = model(*batch(ranks.rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.blocks[0].mlp.up.float8.amax_history[1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 128])
def test_what_was_decoded_is_coded_without_rounding(block, dtype):
    codec = Float8Codec(block=block)
    weights = (torch.randn(40, block) * torch.logspace(-3, 1, 40)[:, None]).to(dtype)
    weights[3] = 0.0
    codes = torch.empty(40, block, dtype=codec.dtype)
    side = torch.empty(40, dtype=codec.side_dtype)
    once, twice = torch.empty_like(weights), torch.empty_like(weights)
    for given, decoded in ((weights, once), (once, twice)):
        codec.encode(given, codes, side)
        codec.decode(codes, side, decoded)
    assert torch.equal(once, twice)
    largest = weights.float().abs().amax(dim=1, keepdim=True)
    error = (once.float() - weights.float()).abs()
    # Four digits of precision for normal numbers; the smallest step below.
    assert (error <= weights.float().abs() / 16 + largest / 2**17).all()


def test_an_overflow_is_decoded_as_nan():
    codec = Float8Codec()
    weights = torch.ones(2, 128)
    weights[1, 5] = float("inf")
    codes, side = torch.empty(2, 128, dtype=codec.dtype), torch.empty(2, dtype=codec.side_dtype)
    codec.encode(weights, codes, side)
    codec.decode(codes, side, weights)
    assert weights[0].eq(1).all()
    assert weights[1].isnan().all()


def test_blocks_that_could_cross_a_shard_are_refused():
    with pytest.raises(ValueError, match="block is 96"):
        Float8Codec(block=96)
