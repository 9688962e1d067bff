"""Where a case's program runs: on the ranks of a wrapper, or in one process of plain PyTorch.

A program is a function of its place. It builds, wraps and trains a model, and says through the
place where gradients of all ranks are to be there (`sync`). On ranks the wrapper has seen to that.
In one process every rank has a replica of the model, and the replicas run one at a time, in turns.
At each `sync` the gradients of their local batches are summed as law 2 of the design says.
This file is the oracle. It shares no code with Lamina, and a script that the fuzzer writes
has its source.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Records = list[tuple[str, dict[str, Tensor]]]


def plain_name(name: str) -> str:
    """A qualified name without what wrappers and compilers put into it."""
    return name.removeprefix("module.").replace("_orig_mod.", "").replace("module.", "")


def copies(named: Any) -> dict[str, Tensor]:
    return {plain_name(name): value.detach().clone() for name, value in named}


class Place:
    """What a program is given.

    Attributes:
        rank, world: of the data-parallel ranks.
        records: what is to be compared, in order.
    """

    plain = False

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.records: Records = []
        self._batches = 0

    def batch(self, rows: int = 3) -> Tensor:
        """This rank's next local batch."""
        self._batches += 1
        generator = torch.Generator().manual_seed(1000 * self._batches + self.rank)
        return torch.randn(rows, 8, generator=generator)

    def record(self, what: str, value: Tensor) -> None:
        """Something that this rank has computed."""
        value = value.detach().clone()
        # The dtype of a norm over several is nobody's promise.
        self.records.append((what, {"": value.float() if what == "norm" else value}))

    def start(self, program: Callable[[Any], None]) -> Records:
        torch.manual_seed(100 + self.rank)
        program(self)
        return self.records


class Ranks(Place):
    """This process is a rank. `mesh(...)` makes the meshes that wrappers are given."""

    def __init__(self, rank: int, world: int, mesh: Callable[..., Any], directory: Path) -> None:
        super().__init__(rank, world)
        self.mesh = mesh
        self._directory = directory
        self._saves = 0

    def wrap(self, build: Any, make: Any, wrapper: Any) -> Any:
        return wrapper(build(self.rank), make, self.mesh)

    def no_sync(self, model: Any) -> Any:
        return model.no_sync()

    def backward(self, loss: Tensor, last: bool = True, **how: Any) -> None:
        loss.backward(**how)

    def finish(self, model: Any) -> None:
        model.finish_grad_sync()

    def compile(self, module: Any) -> Any:
        return torch.compile(module, backend="eager")

    def sync(self, model: Any) -> None:
        from lamina.ddp import full_gradients

        self.records.append(("gradient", copies(full_gradients(model).items())))

    def parameters(self, model: Any) -> None:
        from lamina.ddp import full_parameters

        self.records.append(("parameter", copies(full_parameters(model).items())))

    def clip(self, model: Any, norm: float) -> None:
        from lamina.ddp import clip_grad_norm

        self.record("norm", clip_grad_norm(model, norm))

    def save(self, model: Any, optimizer: Any) -> None:
        from lamina.checkpoint import CheckpointManager

        # A checkpoint has one rank's buffers, and which is nobody's promise.
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
        self._saves += 1
        with CheckpointManager(self._directory / f"save{self._saves}") as manager:
            manager.save(0, {"model": model, "optimizer": optimizer})

    def load(self, model: Any, optimizer: Any) -> None:
        from lamina.checkpoint import CheckpointManager

        with CheckpointManager(self._directory / f"save{self._saves}") as manager:
            manager.restore({"model": model, "optimizer": optimizer})

    def state_of(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
        options = StateDictOptions(full_state_dict=True)
        return get_state_dict(model, optimizer, options=options)

    def set_state(self, model: Any, optimizer: Any, weights: Any, state: Any) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        options = StateDictOptions(full_state_dict=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=state,
            options=options,
        )


def make_mesh(kind: str, replicas: int, world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from lamina.mesh import ParallelLayout

    if kind == "layout":
        return ParallelLayout(dp_replicate=replicas).build("cpu")
    if replicas == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=names)


# -- one process ----------------------------------------------------------------------------------


class Stopped(BaseException):
    """Ends a replica whose peers have failed."""


class Replica(Place):
    """One rank's part of the program, in one process. It runs while no other replica does."""

    plain = True

    def __init__(self, rank: int, world: int, sums: dict[str, Any]) -> None:
        super().__init__(rank, world)
        self._sums = sums
        self.how: dict[str, Any] = {}
        self.compiles = False
        self.fenced: Callable[[nn.Module], Iterator[nn.Module]] | None = None
        self.weights: torch.dtype | None = None
        self.model: Any = None
        self.forward_of: Any = None
        self.asked = ""
        self.pieces: list[tuple[dict[str, Tensor | None], bool]] = []
        self.error: BaseException | None = None
        self.stopped = False
        self._go, self._paused = threading.Event(), threading.Event()
        self._random: Tensor | None = None

    # the driver's side

    def begin(self, program: Callable[[Any], None]) -> None:
        def run() -> None:
            self._go.wait()
            try:
                if not self.stopped:
                    self.start(program)
            except BaseException as error:
                self.error = error
            self.asked = "end"
            self._paused.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Run until the replica asks for something, or ends."""
        if self._random is not None:
            torch.set_rng_state(self._random)
        TURN[:] = [self]
        self._paused.clear()
        self._go.set()
        self._paused.wait()
        self._random = torch.get_rng_state()

    def stop(self) -> None:
        self.stopped = True
        self._go.set()
        self._thread.join()

    # the program's side

    def ask(self, what: str) -> None:
        self.asked = what
        self._go.clear()
        self._paused.set()
        self._go.wait()
        if self.stopped:
            raise Stopped

    def wrap(self, build: Any, make: Any, wrapper: Any) -> Any:
        self.how = self._sums[wrapper.__name__]
        self.model = model = build(0)
        for p in model.parameters() if self.weights else ():
            p.data = p.data.to(self.weights) if p.is_floating_point() else p.data
        if self.weights:
            model.register_forward_pre_hook(lambda _, args: (args[0].to(self.weights), *args[1:]))
        for module in self.fenced(model) if self.fenced else ():
            module.register_forward_pre_hook(fence)
        if self.how.get("buffers") and list(model.buffers()):
            model.register_forward_pre_hook(before_forward)
        return model, make(model)

    def no_sync(self, model: Any) -> Any:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, last: bool = True, **how: Any) -> None:
        weights = dict(self.model.named_parameters())
        before = {name: p.grad for name, p in weights.items()}
        for p in weights.values():
            p.grad = None
        loss.backward(**how)
        self.pieces.append(({name: p.grad for name, p in weights.items()}, last))
        for name, p in weights.items():
            p.grad = before[name]

    def finish(self, model: Any) -> None:
        pieces = self.pieces
        self.pieces = [*pieces[:-1], (pieces[-1][0], True)] if pieces else []

    def compile(self, module: Any) -> Any:
        return torch.compile(module, backend="eager") if self.compiles else module

    def sync(self, model: Any) -> None:
        self.ask("sum")
        found = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
        self.records.append(("gradient", copies(found)))

    def parameters(self, model: Any) -> None:
        self.records.append(("parameter", copies(model.named_parameters())))

    def clip(self, model: Any, norm: float) -> None:
        self.record("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), norm))

    def save(self, model: Any, optimizer: Any) -> None:
        self.forward_of = model
        self.ask("buffers")
        self._saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def load(self, model: Any, optimizer: Any) -> None:
        model.load_state_dict(self._saved[0])
        optimizer.load_state_dict(self._saved[1])

    def state_of(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.forward_of = model
        self.ask("buffers")
        return copy.deepcopy(get_state_dict(model, optimizer))

    def set_state(self, model: Any, optimizer: Any, weights: Any, state: Any) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def fence(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A node for each input, where gradients of what the module does with it meet.

    Wrappers have one at the inputs of a unit. Where a unit uses an input several times, and
    something after it uses it as well, three terms are added in another order for it.
    """
    return tuple(a.clone() if isinstance(a, Tensor) and a.requires_grad else a for a in args)


def parts_of(model: nn.Module) -> Iterator[nn.Module]:
    return model.children()


def holders(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold parameters of their own."""
    return (m for m in model.modules() if m is not model and list(m.parameters(recurse=False)))


def inner_modules(model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if m is not model)


FENCES = (parts_of, holders, inner_modules)
"""What may be a unit."""

TURN: list[Replica] = []
"""Whose turn it is."""


def before_forward(module: nn.Module, _: Any) -> None:
    """Ranks take the first one's buffers before a forward of training, and the first after it."""
    replica = TURN[0]
    if module.training or module.__dict__.get("written"):
        replica.forward_of = module
        replica.ask("buffers")
    module.__dict__["written"] = module.training


def in_one_process(
    program: Callable[[Any], None],
    world: int,
    sums: dict[str, Any],
    compiles: bool = False,
    weights: torch.dtype | None = None,
    fenced: Callable[[nn.Module], Iterator[nn.Module]] | None = None,
) -> tuple[list[Records], bool]:
    """Each rank's records, and whether law 2 promises their bits; `weights` is their dtype.

    `fenced` says which modules are behind a node of the autograd graph, as units are.
    """
    replicas = [Replica(rank, world, sums) for rank in range(world)]
    for replica in replicas:
        replica.compiles, replica.weights, replica.fenced = compiles, weights, fenced
    grad_enabled, random = torch.is_grad_enabled(), torch.get_rng_state()
    exact = True
    for replica in replicas:
        replica.begin(program)
    try:
        while True:
            for replica in replicas:
                replica.turn()
                if replica.error is not None:
                    raise replica.error
            asked = {replica.asked for replica in replicas}
            if len(asked) != 1:
                raise RuntimeError(f"replicas ask for {sorted(asked)}: the program differs")
            if asked == {"end"}:
                return [replica.records for replica in replicas], exact
            if asked == {"sum"}:
                exact &= sum_gradients(replicas)
            else:
                share_buffers(replicas)
    finally:
        for replica in replicas:
            replica.stop()
        torch.set_grad_enabled(grad_enabled)
        torch.set_rng_state(random)


def share_buffers(replicas: list[Replica]) -> None:
    with torch.no_grad():
        for name, value in replicas[0].forward_of.named_buffers():
            for other in replicas[1:]:
                other.forward_of.get_buffer(name).copy_(value)


def sum_gradients(replicas: list[Replica]) -> bool:
    """Give every replica the gradients of all; whether law 2 promises their bits."""
    how = replicas[0].how
    closings = [index for index, (_, last) in enumerate(replicas[0].pieces) if last]
    exact = closings == [len(replicas[0].pieces) - 1]
    weights = [dict(replica.model.named_parameters()) for replica in replicas]
    for name in weights[0]:
        local = [[piece.get(name) for piece, _ in replica.pieces] for replica in replicas]
        total = reduced(local, how, name) if local[0] else None
        if total is None:
            continue
        if how.get("mean", True):
            # Rounded to the sum's precision first: a product with 1/D in double differs.
            total = total * torch.tensor(1.0 / len(replicas), dtype=total.dtype)
        for of_replica in weights:
            p = of_replica[name]
            exact &= p.grad is None or not bool(p.grad.any())
            p.grad = total.clone() if p.grad is None else p.grad + total
    for replica in replicas:
        replica.pieces = []
    return exact


def reduced(local: list[list[Any]], how: dict[str, Any], name: str) -> Tensor | None:
    """The sum of `local[rank][microbatch]` of a parameter, in the order of law 2."""
    cadence = how["cadence"]
    if isinstance(cadence, list):
        cadence = next(word for pattern, word in cadence if fnmatch.fnmatchcase(name, pattern))
    if cadence == "reproducible":
        return tree([of_rank[m] for m in range(len(local[0])) for of_rank in local])
    inner = how.get("inner") or len(local)
    rows = [local[first : first + inner] for first in range(0, len(local), inner)]
    if cadence == "once":
        return tree([tree([in_order(of_rank) for of_rank in row]) for row in rows])
    return tree([in_order([tree(list(m)) for m in zip(*row, strict=True)]) for row in rows])


def tree(terms: list[Any]) -> Any:
    """A pairwise tree that splits at the largest power of two below the number of terms."""
    if len(terms) == 1:
        return terms[0]
    split = 1 << (len(terms) - 1).bit_length() - 1
    return add(tree(terms[:split]), tree(terms[split:]))


def in_order(terms: list[Any]) -> Any:
    total = None
    for term in terms:
        total = add(total, term)
    return total


def add(left: Any, right: Any) -> Any:
    if left is None:
        return right
    return left if right is None else left + right


# -- comparison -----------------------------------------------------------------------------------


WHOLE = ("parameter", "gradient")
"""The records that are the same on all ranks."""


def differences(
    expected: Records, found: Records, tolerance: float, narrow: bool = False
) -> Iterator[str]:
    """What is not the same; a tolerance of 0 asks for equal bits.

    Of what is kept in few bits (`narrow`) the first gradients are compared: models and optimizers
    amplify what is lost.
    """
    if [what for what, _ in expected] != [what for what, _ in found]:
        yield f"the records are {[w for w, _ in found]}, and in one process {expected}"
        return

    def rough(what: str) -> bool:
        """Frozen weights and outputs have the dtype that is computed in."""
        return narrow or what not in WHOLE

    start: dict[str, Tensor] = {}
    for number, ((what, theirs), (_, ours)) in enumerate(zip(expected, found, strict=True)):
        if theirs.keys() != ours.keys():
            yield f"{what} {number}: names differ: {sorted(theirs.keys() ^ ours.keys())}"
            continue
        moved = {n: v - start[n] if n in start else v for n, v in theirs.items()}
        sizes = [v.double().norm().item() for v in moved.values() if v.numel()]
        floor = 0.02 * max(sizes, default=0.0)
        for name, value in theirs.items():
            other = ours[name]
            label = f"{what} {number} {name}".strip()
            if narrow and (what != "gradient" or number > 1):
                continue
            if other.shape != value.shape or (other.dtype != value.dtype and not rough(what)):
                theirs_is = f"{value.dtype} {tuple(value.shape)}"
                yield f"{label} is {other.dtype} {tuple(other.shape)}, in one process {theirs_is}"
            elif tolerance == 0:
                if not torch.equal(other, value):
                    off = (other.double() - value.double()).abs().max().item()
                    yield f"{label} has other bits, off by at most {off:.2g}"
            elif value.numel():
                off = (other.double() - value.double()).norm().item()
                size = moved[name].double().norm().item() + floor
                # What rounding leaves of a parameter's own size is no difference.
                rounding = (1e-2 if narrow else 3e-7) * value.double().norm().item()
                relative = max(0.0, off - rounding) / (size + 1e-6)
                if not relative <= tolerance:  # NaN too
                    yield f"{label} is off by {relative:.2g} of its size"
        if what == "parameter" and not start:
            start = theirs
