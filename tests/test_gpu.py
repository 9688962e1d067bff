"""What only a GPU shows: streams, CUDA kernels, NCCL. Skipped, with the reason, without one.

The last test runs the same body on a CPU, so that a GPU that is there for minutes meets no mistake
of the test's own.
"""

from __future__ import annotations

import pytest
import torch

from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina_testing.oracles import bit_oracle
from lamina_testing.toys import Block, OddNet, TinyTransformer, inputs

STEPS = 4
MODELS = {"odd": OddNet, "transformer": TinyTransformer}


def build(name: str, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(7)
    return MODELS[name]().to(device)


def loss_fn(model, batch):
    if batch.is_floating_point():
        batch = batch.to(next(model.parameters()).dtype)
    return model(batch).float().square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def check(ranks, name, strategy, bf16):
    world, device = ranks.world_size, torch.device(ranks.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(name, device)

    def data(step):
        return [
            [inputs(model, 1000 * step + 10 * rank + m).to(device) for m in range(2)]
            for rank in range(world)
        ]

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    sharded, optimizer = fully_shard(
        model,
        sgd(model),
        device_mesh=ParallelLayout().build(device.type),
        fsdp_unit_modules=[Block] if name == "odd" else None,
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy,
    )
    oracle = bit_oracle(
        lambda: build(name, device),
        data,
        loss_fn,
        sgd,
        steps=STEPS,
        cadence="once" if strategy < 2 else "every",
        wire_dtype=torch.bfloat16 if bf16 else None,
        compute_dtype=torch.bfloat16 if bf16 else None,
    )
    for step in range(STEPS):
        first, last = data(step)[ranks.rank]
        with sharded.no_sync():
            (loss_fn(sharded, first) / 2).backward()
        (loss_fn(sharded, last) / 2).backward()
        gradients = full_gradients(sharded)
        optimizer.step()
        optimizer.zero_grad()
        parameters = full_parameters(sharded)
        for key, value in oracle[step].parameters.items():
            assert torch.equal(gradients[key], oracle[step].gradients[key]), f"gradient of {key}"
            assert torch.equal(parameters[key], value), f"{key} after step {step}"


@pytest.mark.ranks(2, 4, backend="gloo", device="cuda", timeout=240)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["odd", "transformer"])
def test_strategies_on_one_shared_gpu_equal_the_bit_oracle(name, strategy, bf16, ranks):
    check(ranks, name, strategy, bf16)


@pytest.mark.ranks(1, backend="nccl", timeout=240)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("strategy", [0, 3])
def test_a_world_of_one_on_nccl_equals_the_bit_oracle(strategy, bf16, ranks):
    check(ranks, "transformer", strategy, bf16)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "bf16"), [(0, True), (3, False)])
def test_the_same_holds_on_a_cpu(strategy, bf16, ranks):
    check(ranks, "odd", strategy, bf16)
