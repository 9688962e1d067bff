"""Through all layers by their public faces: a GPT, sharded two ways, against both oracles."""

from __future__ import annotations

import pytest
import torch

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, TransformerBlock, TransformerConfig
from lamina_testing.oracles import bit_oracle, whole_batch_oracle

STEPS = 20


def build() -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(
        TransformerConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2)
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def loss_fn(model, tokens):
    return model(tokens[:, :-1], labels=tokens[:, 1:])


def data(step):
    generator = torch.Generator().manual_seed(step)
    return [[torch.randint(61, (2, 17), generator=generator)] for _ in range(2)]


@pytest.mark.ranks(2, timeout=120)
def test_strategies_0_and_3_equal_each_other_and_both_oracles_after_20_steps(ranks):
    found = {}
    for strategy in (0, 3):
        model = build()
        model, optimizer = fully_shard(
            model,
            sgd(model),
            device_mesh=ParallelLayout().build("cpu"),
            fsdp_unit_modules=[TransformerBlock],
            zero_dp_strategy=strategy,
        )
        for step in range(STEPS):
            loss_fn(model, data(step)[ranks.rank][0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[strategy] = full_parameters(model)
    bits = bit_oracle(build, data, loss_fn, sgd, steps=STEPS, cadence="every")[-1].parameters
    whole = whole_batch_oracle(build, data, loss_fn, sgd, steps=STEPS)[-1].parameters
    assert found[0].keys() == found[3].keys() == bits.keys() == whole.keys()
    start = build()
    for name, value in bits.items():
        assert torch.equal(found[0][name], value), name
        assert torch.equal(found[3][name], value), name
        torch.testing.assert_close(found[3][name], whole[name], rtol=0, atol=2e-5)
        assert not torch.equal(value, start.get_parameter(name)), f"{name} was never trained"
