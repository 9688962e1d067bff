"""Ways to train that are more than a loss and a step, beside plain PyTorch in one process.

A procedure is written once. It is given `wrap`, which makes a model's optimizer, and the rows of
this rank: with all rows and nothing wrapped it is the reference.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from lamina.ddp import DistributedDataParallel, full_parameters
from lamina.fsdp import fully_shard

ROWS, WIDTH, STEPS = 8, 8, 4
Wrap = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def data(seed: int, rows: slice) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))[rows]


def distance(model: nn.Module, rows: slice, target: int = 2) -> Tensor:
    return (model(data(1, rows)) - data(target, rows)).square().mean()


def adversaries(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """A generator and a critic take turns; the critic is frozen while the generator learns."""
    generator, its = wrap(Net(0))
    critic, own = wrap(Net(1))
    for _ in range(STEPS):
        critic.requires_grad_(True)
        own.zero_grad()
        made = generator(data(3, rows)).detach()
        (F.softplus(-critic(data(1, rows))) + F.softplus(critic(made))).mean().backward()
        own.step()
        critic.requires_grad_(False)
        its.zero_grad()
        F.softplus(-critic(generator(data(3, rows)))).mean().backward()
        its.step()
    return [generator, critic]


def clipped_critic(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """Wasserstein's: weights are clamped after each step."""
    critic, optimizer = wrap(Net(1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        critic(data(1, rows)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.2, 0.2)
    return [critic]


def sharpness_aware(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """Weights go uphill, gradients are taken there, and the step is made from where they were."""
    model, optimizer = wrap(Net(0))
    for _ in range(STEPS):
        optimizer.zero_grad()
        distance(model, rows).backward()
        with torch.no_grad():
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        distance(model, rows).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        optimizer.step()
    return [model]


def momentum_teacher(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """A copy of the model follows it slowly, and says what the model should say."""
    model, optimizer = wrap(Net(0))
    teacher = copy.deepcopy(model).requires_grad_(False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        said = teacher(1.1 * data(1, rows)).detach()
        (model(data(1, rows)) - said).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for new, mean in zip(model.parameters(), teacher.parameters(), strict=True):
                mean.mul_(0.9).add_(new.detach(), alpha=0.1)
    return [model, teacher]


def contrast_over_ranks(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """CLIP's loss: each row is told from the rows of all ranks."""
    first, its = wrap(Net(0))
    second, own = wrap(Net(1))
    for _ in range(STEPS):
        its.zero_grad()
        own.zero_grad()
        sides = [first(data(1, rows)), second(data(2, rows))]
        if rows != slice(None):
            sides = [torch.cat(all_gather(side)) for side in sides]
        F.cross_entropy(sides[0] @ sides[1].t(), torch.arange(ROWS)).backward()
        its.step()
        own.step()
    return [first, second]


def gradients_of_two_tasks(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """Gradients are kept, compared over the whole model, and put together by hand."""
    model, optimizer = wrap(Net(0))
    for _ in range(STEPS):
        kept = []
        for target in (2, 3):
            optimizer.zero_grad()
            distance(model, rows, target).backward()
            kept.append([parameter.grad.clone() for parameter in model.parameters()])
        agree = float(sum((a * b).sum() for a, b in zip(*kept, strict=True)))
        optimizer.zero_grad()
        for parameter, a, b in zip(model.parameters(), *kept, strict=True):
            parameter.grad = a + b * (1.0 if agree > 0 else 0.5)
        optimizer.step()
    return [model]


def policy(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """What the model said in evaluation is compared with what it says while it learns."""
    model, optimizer = wrap(Net(0))
    for _ in range(STEPS):
        model.eval()
        with torch.inference_mode():
            said = model(data(1, rows))
        model.train()
        for _ in range(2):
            optimizer.zero_grad()
            ((model(data(1, rows)) - said.clone()) * data(2, rows)).exp().mean().backward()
            optimizer.step()
    return [model]


def slow_weights(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """Lookahead: every second step weights go back half of the way."""
    model, optimizer = wrap(Net(0))
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        distance(model, rows).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), slow, strict=True) if step % 2 else ():
                parameter.copy_(old.lerp_(parameter, 0.5))
    return [model]


def frozen_and_made_anew(wrap: Wrap, rows: slice) -> list[nn.Module]:
    """Halfway a block is frozen, and the last layer begins again."""
    model, optimizer = wrap(Net(0))
    for step in range(STEPS):
        for name, parameter in model.named_parameters() if step == 2 else ():
            if "blocks.0" in name:
                parameter.requires_grad_(False)
            elif name.endswith("leave.weight"):
                with torch.no_grad():
                    parameter.zero_()
        optimizer.zero_grad()
        distance(model, rows).backward()
        optimizer.step()
    return [model]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # Without this epsilon a gradient of rounding alone would be a whole step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


PROCEDURES = (
    adversaries, clipped_critic, sharpness_aware, momentum_teacher, contrast_over_ranks,
    gradients_of_two_tasks, policy, slow_weights, frozen_and_made_anew,
)  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*all_gather is deprecated:FutureWarning")
@pytest.mark.parametrize("strategy", ["ddp", 1, 2, 3])
@pytest.mark.parametrize("procedure", PROCEDURES, ids=lambda procedure: procedure.__name__)
def test_procedures_equal_one_process(procedure, strategy, ranks):
    def wrap(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        if strategy == "ddp":
            model = DistributedDataParallel(model)
            return model, adamw(model)
        return fully_shard(model, adamw(model), zero_dp_strategy=strategy)

    half = ROWS // 2
    trained = procedure(wrap, slice(half * ranks.rank, half * (ranks.rank + 1)))
    reference = procedure(lambda model: (model, adamw(model)), slice(None))
    for model, plain in zip(trained, reference, strict=True):
        values = full_parameters(model)
        for name, value in plain.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), rtol=1e-5, atol=1e-6)
