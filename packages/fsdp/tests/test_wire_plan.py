"""Law 5, host by host: the plan of a step's bytes equals what the ledger counts."""

import contextlib
from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from lamina.collectives import Ledger
from lamina.ddp import DistributedDataParallelConfig, wire_plan
from lamina.ddp.engine import WireBytes
from lamina.ddp.inspect.wire import codec_of
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.toys import Block

from .test_api_encoded import Int8

WIDTH = 32


def step(model, optimizer, microbatches=1):
    for left in reversed(range(microbatches)):
        with model.no_sync() if left else contextlib.nullcontext():
            model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def counted(ledger, purpose):
    """What went over the communicators of one purpose, without the flags of used parameters."""
    large = [one for one in ledger.records if one.op != "all_reduce_small"]
    records = [one for one in large if one.communicator.endswith(purpose)]
    between = sum(one.between for one in records)
    return WireBytes(sum(one.bytes for one in records) - between, between)


@pytest.mark.ranks(3, 6)
@pytest.mark.parametrize("strategy", [0, 3])
def test_leaves_that_are_no_whole_subtree_are_in_the_plan(strategy, ranks):
    """One host; 3 ranks, and two copies of 3."""
    model = nn.Sequential(*(Block(WIDTH) for _ in range(2)))
    model, optimizer = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_mesh=ParallelLayout(dp_replicate=ranks.world_size // 3).build(device_type()),
        dp_outer_dim="dp_replicate",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        reproducible=True,
    )
    step(model, optimizer)
    with Ledger() as ledger:
        step(model, optimizer, 2)
    assert counted(ledger, ":reduce") == wire_plan(model, 2).gradients


@pytest.mark.ranks(4, reuse=False)  # whether the job has hosts is asked once
@pytest.mark.parametrize(
    ("strategy", "replicate", "settings"),
    [
        (0, 1, {}),
        (1, 1, {}),
        (2, 1, {}),
        (3, 1, {}),
        (0, 2, {}),
        (3, 2, {}),
        (3, 2, {"outer_dp_sharding_strategy": 1}),
        (3, 1, {"reduction": "native"}),
        (3, 1, {"reduction": "int8"}),
        (0, 2, {"reduction": "int8"}),
        (3, 1, {"reduction": "checked"}),
        (0, 2, {"reduction": "checked"}),
        (0, 2, {"reproducible": True}),
        (3, 1, {"reproducible": True}),
        pytest.param(
            *(3, 1, {"mixed_precision_policy": MixedPrecisionPolicy(weight_codec=Int8())}),
            id="codes",  # a name that does not say where in memory the codec lies
        ),
    ],
    ids=str,
)
def test_the_plan_of_a_step_is_what_the_ledger_counts(monkeypatch, strategy, replicate, settings):
    """Two hosts of two ranks; one microbatch, and two."""
    if settings.get("reduction") == "checked" and device_type() == "cuda":
        pytest.skip("the host looks at checksums")
    monkeypatch.setenv("LAMINA_RANKS_PER_HOST", "2")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
    model, optimizer = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_mesh=ParallelLayout(dp_replicate=replicate).build(device_type()),
        dp_outer_dim="dp_replicate",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        **settings,
    )
    step(model, optimizer)
    for microbatches in (1, 2):
        with Ledger() as ledger:
            step(model, optimizer, microbatches)
        plan = wire_plan(model, microbatches)
        assert counted(ledger, ":gather") == plan.weights
        assert counted(ledger, ":reduce") == plan.gradients
        assert plan.gradients.between > 0
        assert (plan.weights.between > 0) is (strategy > 0 and (replicate == 1 or bool(settings)))


def test_every_reduction_has_a_formula_and_none_is_made_up():
    for name in get_args(get_type_hints(DistributedDataParallelConfig)["reduction"]):
        assert codec_of(name, torch.bfloat16).dtype in (torch.bfloat16, torch.int8)
    with pytest.raises(KeyError, match="another"):
        codec_of("another", torch.bfloat16)
