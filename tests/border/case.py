"""What a use of the border is given: a model and an optimizer under one of many wrappers.

The same use runs under each wrapper on two ranks, and once in one process of plain PyTorch on the
whole batch. The plain run is the oracle. It shares no code with what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_gradients,
    full_parameters,
)
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, shard_module

STRATEGIES = ("0", "1", "2", "3")
SHARDED = ("1", "2", "3")
OURS = (*STRATEGIES, "ddp", "ddp_sharded", "shard_module")
TORCH = ("fsdp2", "torch_ddp")
COLUMNS = (*OURS, *TORCH)
BF16 = (*STRATEGIES, "shard_module", "fsdp2")  # wrappers that are given fp32 models and a dtype
ROWS = 4
"""Of one rank's batch."""


class Block(nn.Module):
    """A residual MLP block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks between two linear layers."""

    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    """Whose steps are as linear in the gradients as can be."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


@dataclass
class Case:
    """One cell: a wrapper (or "plain"), a dtype, and this rank's place.

    Attributes:
        column: one of `COLUMNS`, or "plain".
        dtype: "fp32" or "bf16", in which the wrapped model computes.
        rank: of two.
        mesh: a `ParallelMesh` of both ranks.
        directory: the same on both ranks, empty at first.
    """

    column: str
    dtype: str
    rank: int
    mesh: Any
    directory: Path

    # -- wrapping ---------------------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        return self.column == "plain"

    @property
    def ours(self) -> bool:
        return self.column in OURS

    def setup(self, model: nn.Module | None = None, make: Any = sgd, **settings: Any) -> Any:
        """A wrapped model with its optimizer."""
        return self.wrap(model or self.net(), make, **settings)

    def net(self, cls: Callable[..., nn.Module] = Net, *args: Any, **kwargs: Any) -> nn.Module:
        """A model with the same values in every column and on every rank."""
        torch.manual_seed(0)
        return cls(*args, **kwargs)

    def wrap(self, model: nn.Module, make: Any = sgd, **settings: Any) -> Any:
        """The model and an optimizer for it, as a user of this column makes them."""
        if self.plain:
            return model, make(model.parameters())
        if self.column in STRATEGIES:
            optimizer = make(model.parameters())
            return fully_shard(model, optimizer, **self.settings(model, **settings))
        model = self.wrap_model(model, **settings)
        optimizer = make(model.parameters())
        if self.column == "ddp_sharded":
            optimizer = ShardedOptimizer(optimizer, model, self.mesh)
        return model, optimizer

    def wrap_model(self, model: nn.Module, **settings: Any) -> Any:
        """The model alone; its optimizer is made afterwards."""
        if self.plain:
            return model
        if self.column in STRATEGIES:
            return fully_shard(model, **self.settings(model, **settings))
        if self.column in ("ddp", "ddp_sharded"):
            sharded = self.column == "ddp_sharded"
            config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
            return DistributedDataParallel(model, config, self.mesh)
        if self.column == "torch_ddp":
            return nn.parallel.DistributedDataParallel(model)
        if self.column == "fsdp2":
            from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
            from torch.distributed.fsdp import fully_shard as torch_shard

            shard, mesh = torch_shard, self.mesh["dp_shard"]
            mp = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        else:
            shard, mesh, mp = shard_module, self.mesh, self.policy
        if self.dtype == "bf16":
            settings.setdefault("mp_policy", mp)
        for child in [m for m in model.modules() if isinstance(m, Block) and m is not model]:
            shard(child, mesh=mesh, **settings)
        shard(model, mesh=mesh, **settings)
        return model

    def settings(self, model: nn.Module, **given: Any) -> dict[str, Any]:
        """Arguments of `fully_shard`."""
        if any(isinstance(module, Block) for module in model.modules()):
            given.setdefault("fsdp_unit_modules", [Block])
        if self.dtype == "bf16":
            given.setdefault("mixed_precision_policy", self.policy)
        return {"device_mesh": self.mesh, "zero_dp_strategy": int(self.column), **given}

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Lamina's, for bf16."""
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def core(self, model: Any) -> Any:
        """The user's own module."""
        return model.module if hasattr(model, "module") else model

    # -- data and steps ---------------------------------------------------------------------------

    def rows(self, step: int, shape: tuple[int, ...] = (5,), rows: int = ROWS) -> Tensor:
        """This rank's batch; the plain run has both ranks'."""
        generator = torch.Generator().manual_seed(100 + step)
        whole = torch.randn(2 * rows, *shape, generator=generator)
        return whole if self.plain else whole[self.rank * rows :][:rows]

    def loss(self, model: Any, step: int, rows: int = ROWS) -> Tensor:
        """The mean over this rank's batch of a loss without a minimum at zero."""
        out = model(self.rows(step, rows=rows)).float()
        return (out - 1).square().mean()

    def train(
        self,
        model: Any,
        optimizer: Any,
        steps: int = 3,
        *,
        loss: Callable[[Any, int], Tensor] | None = None,
        begin: int = 0,
        **observed: Any,
    ) -> dict[str, Any]:
        """Steps of an ordinary loop; how far parameters moved, and the last step's gradients."""
        start = self.parameters(model)
        gradients: dict[str, Tensor] = {}
        for step in range(begin, begin + steps):
            (loss or self.loss)(model, step).backward()
            if step == begin + steps - 1:
                gradients = self.gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return {**self.moved(model, start), **gradients, **observed}

    def moved(self, model: Any, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """How far each parameter is from where it was."""
        now = self.parameters(model)
        return {f"moved {name}": value - start[name] for name, value in now.items()}

    def parameters(self, model: Any) -> dict[str, Tensor]:
        """Copies of whole main weights by name (collective)."""
        named = model.named_parameters()
        if self.ours:
            named = full_parameters(model).items()
        return {_plain_name(n): _whole(value).float() for n, value in named}

    def gradients(self, model: Any) -> dict[str, Tensor]:
        """Copies of whole gradients by name (collective)."""
        named = [(n, p.grad) for n, p in model.named_parameters()]
        if self.ours:
            named = list(full_gradients(model).items())
        found = {_plain_name(n): g for n, g in named if g is not None}
        return {f"gradient of {name}": _whole(g).float() for name, g in found.items()}

    def same_on_ranks(self, values: dict[str, Tensor]) -> bool:
        """Whether both ranks have these values (collective)."""
        if self.plain:
            return True
        mine = torch.cat([value.reshape(-1).double() for value in values.values()])
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        return bool(torch.equal(both[0], both[1]))

    def mean(self, value: Tensor) -> Tensor:
        """The mean over ranks of something that each has of its own batch."""
        value = value.detach().clone().float()
        if not self.plain:
            dist.all_reduce(value)
            value /= 2
        return value

    def barrier(self) -> None:
        if not self.plain:
            dist.barrier()


def _whole(value: Any) -> Tensor:
    if isinstance(value, DTensor) or hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone()


def _plain_name(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "")
