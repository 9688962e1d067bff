"""Adapters of peft in a sharded model, with a plain loop; test_bridges.py has other trainers.

Importing it takes seconds in every rank, so the test is a slow one.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard
from lamina_testing import device_type
from lamina_testing.toys import OddNet

pytestmark = pytest.mark.slow
STEPS = 3


def build():
    torch.manual_seed(3)
    return OddNet()


def sgd(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, foreach=False)


def batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def shard(model, optimizer, strategy):
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    return fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=strategy)


def one_process(model):
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(batch(rank, step)).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
    return model


def assert_near(model, reference):
    found = full_parameters(model)
    wanted = dict(reference.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.ranks(2, timeout=200)
def test_lora_through_peft_trains_adapters_and_nothing_else(ranks):
    peft = pytest.importorskip("peft", reason="pip install peft")

    def adapted():
        model = build()
        settings = peft.LoraConfig(r=2, target_modules=["up", "down"], lora_dropout=0.0)
        torch.manual_seed(4)
        return peft.get_peft_model(model, settings)

    for strategy in (3, 1):
        model = adapted()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model, optimizer = shard(model, sgd(model), strategy)
        assert len(model.sharding_engine.units) == 4
        for step in range(STEPS):
            model(batch(ranks.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_near(model, one_process(adapted()))
        for name, value in full_parameters(model).items():
            assert torch.equal(value, before[name]) != ("lora_" in name), name
        names = set(peft.get_peft_model_state_dict(model))
        assert names
        assert all("lora_" in name for name in names)
