"""`lamina.fsdp.check` passes what trains right and names what does not."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lamina.fsdp.check import check_model
from lamina_testing.toys import OddNet


def loss(model, batch):
    return model(batch).square().mean()


def build(make=OddNet):
    model = make()
    return (
        model,
        loss,
        lambda step, rank: torch.randn(
            4, 5, generator=torch.Generator().manual_seed(10 * step + rank)
        ),
    )


class Noisy(OddNet):
    """Dropout and running statistics are what a rank's own are."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(17)

    def forward(self, x):
        x = self.drop(self.norm(self.enter(x)))
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * self.temperature + self.empty.sum()


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("make", [OddNet, Noisy])
def test_models_that_train_right_pass(make, strategy, ranks):
    assert check_model(lambda: build(make), zero_dp_strategy=strategy) is None


class WrongGradient(torch.autograd.Function):
    """Right under one process; scaled up on the sharded model's second rank."""

    @staticmethod
    def forward(ctx, x, on):
        ctx.on = on
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.5 if ctx.on else 1.0), None


class Wrong(OddNet):
    """Wrong only where it is sharded, from step 1 on, and only in its middle block's weights."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        sharded = type(self) is not Wrong
        x = self.blocks[0](self.enter(x))
        middle = self.blocks[1]
        up = middle.up(middle.norm(x))
        on = sharded and self.calls > 1 and dist.get_rank() == 1
        x = x + middle.down(WrongGradient.apply(nn.functional.gelu(up), on))
        return self.leave(self.blocks[2](x)) * self.temperature + self.empty.sum()


@pytest.mark.ranks(2)
def test_the_first_wrong_gradient_is_named_with_its_step(ranks):
    found = check_model(lambda: build(Wrong), fsdp_unit_modules=[])
    assert found is not None
    assert found.step == 1
    assert found.what == "gradient of enter.weight"
    assert math.isfinite(found.worst)
    assert found.worst > found.limit
    assert str(found).startswith("step 1, rank ")


class RankLoss(OddNet):
    def forward(self, x):
        wrong = type(self) is not RankLoss and dist.get_rank() == 1
        return super().forward(x) + (0.1 if wrong else 0.0)


@pytest.mark.ranks(2)
def test_a_ranks_wrong_loss_is_named(ranks):
    found = check_model(lambda: build(RankLoss))
    assert (found.step, found.rank, found.what) == (0, 1, "loss")


@pytest.mark.ranks(2)
def test_a_model_without_values_is_refused(ranks):
    def described():
        with torch.device("meta"):
            return build()

    with pytest.raises(ValueError, match="meta"):
        check_model(described)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_the_command_line(wrong, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch.distributed as dist\n"
        "from lamina_testing.toys import OddNet, inputs\n"
        "class Net(OddNet):\n"
        "    def forward(self, x):\n"
        f"        bad = {wrong} and type(self) is not Net and dist.get_rank() == 1\n"
        "        return super().forward(x) + bad\n"
        "def build():\n"
        "    model = Net()\n"
        "    return model, lambda m, x: m(x).mean(), lambda s, r: inputs(model, 9 * s + r)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lamina.fsdp.check", "mine:build", "--ranks", "2"],
        cwd=Path(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if wrong:
        assert done.returncode == 1
        assert "mine:build differs: step 0, rank 1: loss is off by" in done.stdout
        return
    assert done.returncode == 0, done.stderr
    assert "mine:build: 3 steps on 2 ranks equal one process" in done.stdout
