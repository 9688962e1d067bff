"""H: what blocks are given and write to, hooks that refuse, and other threads and processes."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import torch
from border.case import OURS, TORCH, Block, Case, Net, sgd
from border.judge import use
from torch import Tensor, nn

H = "What blocks write, and who else comes"


class Appends(Block):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        out = super().forward(x)
        seen.append(out * x)
        return out


class Enters(Block):
    def forward(self, x: Tensor, notes: dict[str, Tensor]) -> Tensor:
        out = super().forward(x)
        notes["sum"] = notes["sum"] + out
        return out


class Listed(Net):
    """The loss is of what the blocks wrote."""

    block: type[Block] = Appends

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        seen = [x]
        for block in self.blocks:
            x = block(x, seen)
        return self.leave(torch.stack(seen).sum(0))


class Noted(Listed):
    block = Enters

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        notes = {"sum": x}
        for block in self.blocks:
            x = block(x, notes)
        return self.leave(notes["sum"])


@use(H)
def block_that_appends_to_a_list(case: Case):
    """A block appends to a list that it is given, and the model reads the list"""
    return case.train(*case.setup(case.net(Listed)))


@use(H)
def block_that_writes_into_a_dict(case: Case):
    """A block writes into a dict that it is given, and the model reads the dict"""
    return case.train(*case.setup(case.net(Noted)))


@use(H)
def step_hook_that_refuses_once(case: Case):
    """A step pre-hook of the user raises, is caught, and the step is made again (AdamW)"""
    model, optimizer = case.setup(None, lambda ps: torch.optim.AdamW(ps, lr=0.05, eps=0.05))
    attempts = []

    def refuse(*_: object) -> None:
        attempts.append(len(attempts))
        if attempts[-1] % 2 == 0:
            raise ArithmeticError

    getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(refuse)
    start = case.parameters(model)
    for step in range(3):
        case.loss(model, step).backward()
        with suppress(ArithmeticError):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return case.moved(model, start)


@use(H, says=("while a backward runs",))
def state_dict_in_a_thread_during_backward(case: Case):
    """`state_dict()` in another thread while a backward runs"""
    model, optimizer = case.setup()
    refused: list[BaseException] = []

    def save() -> None:
        try:
            model.state_dict()
        except RuntimeError as error:
            refused.append(error)

    def meanwhile(_: Tensor) -> None:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    def watch(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(meanwhile)

    case.core(model).blocks[0].register_forward_hook(watch)
    found = case.train(model, optimizer, 1)
    if refused:
        raise refused[0]
    return found


@use(H, says=("no rank",), refused=True, columns=OURS, dtypes=("fp32",))
def collective_in_a_forked_child(case: Case):
    """`full_parameters(model)` in a child that a rank has forked"""
    model, optimizer = case.setup()
    case.train(model, optimizer, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            case.loss(model, 1).backward()
            case.parameters(model)
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as told:
        message = told.read()
    os.waitpid(child, 0)
    if message:
        raise RuntimeError(message)
    return {}


@use(H, says=("wrapped or sharded already",), refused=True, columns=(*OURS, *TORCH))
def wrapped_twice(case: Case):
    """The wrapper around what it returned"""
    model, _ = case.setup()
    case.wrap_model(model)
    return {}


@use(H, says=("wrapped or sharded already",), refused=True, columns=OURS, dtypes=("fp32",))
def wrapped_by_torch_before(case: Case):
    """The wrapper around torch's `fully_shard`"""
    from torch.distributed.fsdp import fully_shard as torch_shard

    case.wrap_model(torch_shard(case.net(), mesh=case.mesh["dp_shard"]))
    return {}


@use(H)
def recurrent_module(case: Case):
    """A GRU between linear layers"""

    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.GRU(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.blocks[0](self.enter(x)[None])[0][0])

    return case.train(*case.setup(case.net(Recurrent), sgd))
