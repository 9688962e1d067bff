"""I: results that no output holds, ranks that run different blocks, and torch's tools around."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from border.case import OURS, STRATEGIES, Block, Case, Net, sgd
from border.judge import use
from torch import Tensor, nn
from torch.nn.utils import prune

I = "Objects, ranks that differ, and tools around"  # noqa: E741
STAYS_WHOLE = ("0", "1", "2", "ddp", "ddp_sharded", "torch_ddp")


class State:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Leaves(Block):
    def forward(self, state: State) -> None:
        state.hidden = super().forward(state.hidden)


class Wraps(Block):
    def forward(self, x: Tensor) -> Slotted:
        return Slotted(super().forward(x))


class Leaving(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state = State(self.enter(x))
        for block in self.blocks:
            block(state)
        return self.leave(state.hidden)


class Wrapping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wraps(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x).hidden
        return self.leave(x)


class Keeps(Block):
    loss: Tensor
    cut = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.loss = (out - 0.5).square().mean()
        return out.detach() if self.cut else out


class Keeping(Net):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeps(8) for _ in range(2))
        for block in self.blocks:
            block.cut = cut


@use(I, columns=(*OURS, "torch_ddp"))
def block_leaves_its_result_in_an_object(case: Case):
    """A block sets an attribute of an object that it is given, and returns nothing"""
    return case.train(*case.setup(case.net(Leaving)))


@use(I)
def block_returns_an_object_with_slots(case: Case):
    """A block returns an object with `__slots__`"""
    return case.train(*case.setup(case.net(Wrapping)))


def _with_kept_losses(case: Case) -> Callable[[Any, int], Tensor]:
    def loss(model: Any, step: int) -> Tensor:
        return case.loss(model, step) + sum(b.loss.float() for b in case.core(model).blocks)

    return loss


@use(I)
def block_keeps_a_loss(case: Case):
    """Blocks keep a loss as an attribute, and the loop adds it"""
    model, optimizer = case.setup(case.net(Keeping, False))
    return case.train(model, optimizer, loss=_with_kept_losses(case))


@use(I)
def block_keeps_a_loss_and_detaches(case: Case):
    """Blocks keep a loss as an attribute, and return a detached output"""
    model, optimizer = case.setup(case.net(Keeping, True))
    return case.train(model, optimizer, loss=_with_kept_losses(case))


class Dropping(Net):
    without = -1

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = x if number == self.without else block(x)
        return self.leave(x)


def _dropped(case: Case) -> dict[str, Any]:
    """Each rank leaves out another block in each step."""

    def loss(model: Any, step: int) -> Tensor:
        total = torch.zeros(())
        for rank in range(2) if case.plain else (case.rank,):
            rows = case.rows(step)[4 * rank :][:4] if case.plain else case.rows(step)
            case.core(model).without = (rank + step) % 2 if step else -1
            total = total + (model(rows).float() - 1).square().mean()
        return total / 2 if case.plain else total

    model, optimizer = case.setup(case.net(Dropping))
    return case.train(model, optimizer, 4, loss=loss)


@use(I, columns=STAYS_WHOLE)
def layers_dropped_on_each_rank(case: Case):
    """Each rank drops another block at random (weights stay whole)"""
    return _dropped(case)


@use(
    I,
    columns=("3", "shard_module"),
    refused=True,
    says=("run a unit on all ranks or on none",),
)
def layers_dropped_on_each_rank_where_units_are_gathered(case: Case):
    """Each rank drops another block at random (weights are gathered)"""
    return _dropped(case)


@use(I)
def gradient_scaler(case: Case):
    """`torch.amp.GradScaler`: scale, unscale, step, update"""
    model, optimizer = case.setup()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = case.parameters(model)
    for step in range(3):
        scaler.scale(case.loss(model, step)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(I)
def pruned_before_wrapping(case: Case):
    """`torch.nn.utils.prune.l1_unstructured` before wrapping"""
    model = case.net()
    prune.l1_unstructured(model.blocks[0].up, "weight", 0.5)
    return case.train(*case.setup(model))


@use(I)
def saved_tensors_on_the_host(case: Case):
    """`torch.autograd.graph.save_on_cpu()` around a forward"""

    def loss(model: Any, step: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return case.loss(model, step)

    return case.train(*case.setup(), loss=loss)


@use(I)
def anomalies_are_looked_for(case: Case):
    """`torch.autograd.detect_anomaly()` around training"""
    with torch.autograd.detect_anomaly(check_nan=True):
        return case.train(*case.setup())


class Encoder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)[:, None].repeat(1, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.leave(x[:, 0])


@use(I, dtypes=("fp32",))
def encoder_layers_of_torch(case: Case):
    """`nn.TransformerEncoderLayer`, whose evaluation reads all weights at once"""
    model, optimizer = case.setup(case.net(Encoder))
    case.train(model, optimizer, 1)
    model.eval()
    with torch.inference_mode():
        seen = case.mean(case.loss(model, 5))
    model.train()
    return case.train(model, optimizer, 1, seen=seen)


@use(I)
def trained_in_a_thread(case: Case):
    """A thread that is not the main one wraps and trains"""
    found: dict[str, Any] = {}
    raised: list[BaseException] = []

    def work() -> None:
        try:
            found.update(case.train(*case.setup()))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found


@use(I)
def unfrozen_and_added_as_a_group(case: Case):
    """`add_param_group` of a block that is unfrozen between two steps"""
    model = case.net()
    model.blocks[0].requires_grad_(False)
    model, optimizer = case.setup(model, lambda ps: sgd([p for p in ps if p.requires_grad]))
    case.train(model, optimizer, 1)
    block = case.core(model).blocks[0]
    block.requires_grad_(True)
    optimizer.add_param_group({"params": list(block.parameters()), "lr": 0.05})
    return case.train(model, optimizer)


@use(I)
def teacher_is_a_deep_copy(case: Case):
    """A deep copy of the wrapped model gives targets, and follows it by `lerp_`"""
    model, optimizer = case.setup()
    teacher = copy.deepcopy(model)
    teacher.requires_grad_(False)
    start = case.parameters(model)
    for step in range(3):
        rows = case.rows(step)
        with torch.no_grad():
            target = teacher(rows + 0.1).float()
        (model(rows).float() - target - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, now in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.5)
    return case.moved(model, start)


@use(I)
def optimizer_state_is_cleared(case: Case):
    """`optimizer.state.clear()` between steps of AdamW"""
    model, optimizer = case.setup(None, lambda ps: torch.optim.AdamW(ps, lr=0.05, eps=0.05))
    case.train(model, optimizer, 2)
    optimizer.state.clear()
    return case.train(model, optimizer, 2, begin=2)


@use(I, columns=(*STRATEGIES, "shard_module"), slow=True)
def exported(case: Case):
    """`torch.export.export` of a wrapped model"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    program = torch.export.export(case.core(model).eval(), (case.rows(3),))
    return {"out": case.mean(program.module()(case.rows(3)).float().mean())}
