"""torch's optimizers step spans as they step the whole, or are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina.buffers import ShardedTensor

from .cut_tensors import pasted, spans, values

MODES = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}, "loop foreach fused"),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}, "loop foreach fused"),
    "Adam": (torch.optim.Adam, {}, "loop foreach fused"),
    "SGD": (torch.optim.SGD, {"lr": 0.1}, "loop foreach fused"),
    "SGD momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        "loop foreach fused",
    ),
    "Adagrad": (torch.optim.Adagrad, {}, "loop foreach fused"),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}, "loop foreach"),
    "NAdam": (torch.optim.NAdam, {}, "loop foreach"),
    "Adadelta": (torch.optim.Adadelta, {}, "loop foreach"),
}
CASES = [(name, mode) for name, (_, _, modes) in OPTIMIZERS.items() for mode in modes.split()]


def train(parameters, kind, options):
    optimizer = kind(parameters, **options)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * 3 + step)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_optimizers_step_spans_as_they_step_the_whole(name, mode):
    kind, options, _ = OPTIMIZERS[name]
    options = {**options, **MODES[mode]}
    full = values()
    whole = [nn.Parameter(tensor.clone()) for tensor in full.values()]
    train(whole, kind, options)
    trained = []
    for part in spans(full, 3):
        parameters = [nn.Parameter(tensor) for tensor in part.values()]
        optimizer = train(parameters, kind, options)
        trained.append(parameters)
        kinds = {
            type(value)
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        }
        assert kinds <= {ShardedTensor}
    for at, parameter in enumerate(whole):
        result = pasted([parameters[at].detach() for parameters in trained])
        if mode == "fused":  # vectorised and remaining elements round differently
            torch.testing.assert_close(result, parameter.detach(), rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(result, parameter.detach())


def test_optimizers_that_need_whole_rows_are_refused_by_name():
    parameter = nn.Parameter(spans(values(), 1)[0]["matrix"])
    parameter.grad = torch.ones_like(parameter)
    for kind in (torch.optim.Muon, torch.optim.Adafactor):
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
            kind([parameter]).step()
