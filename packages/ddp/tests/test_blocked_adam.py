"""Adam block by block on a CPU: torch's own update, to the bit."""

import pytest
import torch

from lamina.ddp.optimizer import flat_step
from lamina.ddp.optimizer.flat_step import blocked_adam


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
        (torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-5}),
    ],
)
def test_blocks_give_the_bits_of_the_whole(kind, more, foreach, monkeypatch):
    monkeypatch.setattr(flat_step, "BLOCK", 100)
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(1037))
    mine = torch.nn.Parameter(whole.detach().clone())
    optimizer = kind([whole], lr=0.01, foreach=foreach, **more)
    state = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros(1037),
        "exp_avg_sq": torch.zeros(1037),
    }
    for _ in range(4):
        whole.grad = torch.randn(1037)
        optimizer.step()
        mine.grad = whole.grad
        assert blocked_adam(optimizer, optimizer.param_groups[0], mine, state)
        assert torch.equal(mine, whole)
    for name, value in state.items():
        assert torch.equal(value, optimizer.state[whole][name]), name


@pytest.mark.parametrize(
    "more",
    [
        {"fused": True},
        {"amsgrad": True},
        {"differentiable": True},
        {"lr": torch.tensor(0.1), "foreach": False},
    ],
)
def test_what_it_does_not_do_is_left_to_torch(more):
    parameter = torch.nn.Parameter(torch.randn(8))
    optimizer = torch.optim.AdamW([parameter], **{"lr": 0.1, **more})
    state = {"step": 0, "exp_avg": 0, "exp_avg_sq": 0}
    assert not blocked_adam(optimizer, optimizer.param_groups[0], parameter, state)
    plain = torch.optim.SGD([parameter], lr=0.1)
    assert not blocked_adam(plain, plain.param_groups[0], parameter, state)
