"""torch's FSDP2 without Lamina: whether numbers that one process has not got are torch's own.

DTensors sum over ranks what one process sums in one product. That is rounding, unless an optimizer
enlarges it: torch's Muon works in bf16, and multiplies what is left of a zero by 485. Which numbers
the wrapper over FSDP2 has to have is then said by the same program with torch's calls in its place.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fuzz.case import Case
from fuzz.places import Ranks, Records, copies, make_mesh
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lamina.fsdp.compat import forget_groups
from lamina.fsdp.units.plan import plan_units
from lamina.mesh.engine import ends_with_groups


class Alone(Ranks):
    """A rank whose model is under torch's FSDP2, and nothing of Lamina's around it."""

    def __init__(self, rank: int, world: int, directory: Path, sums: dict[str, Any]) -> None:
        super().__init__(rank, world, lambda _, n: make_mesh("device", n, world), directory)
        self._sums = sums

    def wrap(self, build: Any, make: Any, wrapper: Any) -> Any:
        # Lamina sends the first rank's values, and its buffers if it is asked to. FSDP2 does not.
        model, optimizer = wrapper(build(0), make, self.mesh)
        if self._sums[wrapper.__name__].get("buffers"):
            model.register_forward_pre_hook(send_buffers)
        return model, optimizer

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def finish(self, model: Any) -> None:
        """FSDP2 has waited at the end of backward."""

    def sync(self, model: Any) -> None:
        grads = ((n, whole(p.grad)) for n, p in sharded(model) if p.grad is not None)
        self.records.append(("gradient", copies(grads)))

    def parameters(self, model: Any) -> None:
        self.records.append(("parameter", copies((n, whole(p)) for n, p in sharded(model))))

    def clip(self, model: Any, norm: float) -> None:
        self.record("norm", whole(torch.nn.utils.clip_grad_norm_(model.parameters(), norm)))


def send_buffers(module: nn.Module, _: Any) -> None:
    """Ranks take the first one's buffers before a forward of training, and the first after it."""
    if module.training or module.__dict__.get("written"):
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
    module.__dict__["written"] = module.training


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that optimizers step, whatever a forward has left in their places."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model.named_parameters()


def fsdp2(module: nn.Module, config: Any, mesh: Any, units: Any = None) -> nn.Module:
    """What is called in the place of `TorchFullyShardedDataParallel`.

    The units are those of the wrapper: another cut would sum over ranks in another order.
    """
    for plan in reversed(plan_units(module, units)):
        fully_shard(
            plan.module,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=config.mp_policy or MixedPrecisionPolicy(),
        )
    ends_with_groups(module, forget_groups)
    return module


def may_be_torchs(case: Case, outcome: str) -> bool:
    """Whether the numbers are those of FSDP2, so that it can be asked for its own."""
    return outcome == "wrong" and case.wrappers[0].kind == "torch"


def without_lamina(program: types.ModuleType, rank: int, world: int, directory: Path) -> Records:
    """What this rank records with torch's FSDP2 alone; nothing, if that cannot run the program."""
    vars(program)["TorchFullyShardedDataParallel"] = fsdp2
    try:
        return Alone(rank, world, directory, program.SUMS).start(program.program)
    except Exception:
        return []
