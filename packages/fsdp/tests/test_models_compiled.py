"""Compiled blocks under `fully_shard`, compiled before or after it, in both of torch's ways."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.inductor import needs_inductor
from lamina_testing.toys import Block, OddNet

from .module_parity import STRATEGIES, build, compare, one_process, plain_loss, sgd, train


def compiled(how, backend):
    """A model whose blocks are compiled in one of three ways."""

    def prepare(model):
        for index, block in enumerate(model.blocks):
            if how == "method":
                block.compile(backend=backend)
            else:
                model.blocks[index] = torch.compile(block, backend=backend)

    return prepare


def check_compiled(how, when, backend, strategy, ranks, units):
    model = build(OddNet)
    if when == "before":
        compiled(how, backend)(model)
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(
        model, sgd(model), device_mesh=mesh, zero_dp_strategy=strategy, fsdp_unit_modules=units
    )
    assert len(model.sharding_engine.units) == 4
    if when == "after":
        compiled(how, backend)(model)
    train(model, optimizer, plain_loss, ranks.rank)
    compare(model, one_process(OddNet, plain_loss))


CASES = pytest.mark.parametrize(
    ("how", "when"),
    [("method", "before"), ("method", "after"), ("wrapper", "before"), ("wrapper", "after")],
)


@pytest.mark.slow
@pytest.mark.ranks(2, timeout=300)
@CASES
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_inductor)])
@pytest.mark.parametrize("units", [None, [Block]], ids=["found", "named"])
@STRATEGIES
def test_compiled_blocks(strategy, units, backend, how, when, ranks):
    check_compiled(how, when, backend, strategy, ranks, units)


@pytest.mark.ranks(2, timeout=120)
def test_blocks_compiled_after_sharding(ranks):
    check_compiled("method", "after", "eager", 3, ranks, [Block])
