"""Does a model train under `fully_shard` as it does in one process? Ask before a long run.

    python -m lamina.fsdp.check my.module:build --ranks 2

`build()` returns (model, loss, batch): the model with its values; `loss(model, batch)`, a scalar;
and `batch(step, rank)`, what a rank trains on in a step. The model is sharded and trained beside a
copy that every rank trains alone on all ranks' batches, in plain PyTorch. The first loss, gradient
or parameter that differs is named, with its step and rank.
"""

import argparse
import copy
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina.collectives.engine import all_reduce_small, broadcast
from lamina.ddp import full_gradients, full_parameters
from lamina.fsdp.api.fully_shard import fully_shard
from lamina.fsdp.module.sharded_module import ShardedModule
from lamina.mesh import ParallelLayout, init_distributed
from lamina.mesh.engine import MeshAxis

__all__ = ["Difference", "check_model"]

Build = Callable[[], tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any]]


@dataclass(frozen=True)
class Difference:
    """The first thing that differs from one process.

    Attributes:
        step: from 0.
        rank: whose loss it is, or who holds the worst element at rest.
        what: "loss", or "gradient of NAME", or "parameter NAME".
        worst: largest magnitude of the difference; infinite where one side has no value.
        limit: what was allowed.
    """

    step: int
    rank: int
    what: str
    worst: float
    limit: float

    def __str__(self) -> str:
        return (
            f"step {self.step}, rank {self.rank}: {self.what} is off by {self.worst:.3g} "
            f"(limit {self.limit:.3g})"
        )


def check_model(
    build: Build, *, steps: int = 3, tolerance: float = 1e-5, **settings: Any
) -> Difference | None:
    """Train a model sharded and alone, and compare; collective over the world.

    Args:
        build: see the module's text. Called once per rank; the first rank's values are used.
        steps: optimizer steps (SGD with momentum).
        tolerance: of a difference, relative to the tensor's largest magnitude (for gradients:
            at least a thousandth of the largest one's).
        settings: of `fully_shard`, such as `zero_dp_strategy`.

    Returns:
        None where nothing differs. The same on every rank.

    Raises:
        ValueError: for a model on the meta device.
    """
    axis = ParallelLayout().build().axis("dp")
    model, loss, batch = build()
    alone = _copy_of_first(model, axis)
    both = _Both(fully_shard(model, **settings), alone, loss, batch, axis, tolerance)
    # All ranks compare the same whole values, so all of them stop at the same difference.
    return next(both.train(steps), None)


def _copy_of_first(model: nn.Module, axis: MeshAxis) -> nn.Module:
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta:
        raise ValueError(f"{meta[0]} is on the meta device: build() has to give values to compare")
    alone = copy.deepcopy(model)
    for tensor in (*alone.parameters(), *alone.buffers()):
        broadcast(tensor.detach(), axis.group, src=0).wait()
    return alone


@dataclass(frozen=True)
class _Both:
    """A model sharded over the ranks of `axis`, and one like it that each rank trains alone."""

    sharded: ShardedModule
    alone: nn.Module
    loss: Any
    batch: Any
    axis: MeshAxis
    tolerance: float

    def train(self, steps: int) -> Iterator[Difference]:
        """Train both, and yield what differs, in the order of a step."""
        models = (self.sharded, self.alone)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in models]
        # Running statistics and the like are each rank's own.
        buffers = [{n: b.clone() for n, b in self.alone.named_buffers()} for _ in self.axis.ranks]
        for step in range(steps):
            losses = self._losses(step)
            expected = torch.stack([self._loss_of(step, r, b) for r, b in enumerate(buffers)])
            limit = self.tolerance * max(float(expected.abs().max()), 1e-3)
            for rank, worst in enumerate((losses - expected).abs().tolist()):
                if not worst <= limit:  # NaN differs too
                    yield Difference(step, rank, "loss", worst, limit)
            named = dict(self.alone.named_parameters())
            grads = {name: p.grad for name, p in named.items() if p.grad is not None}
            largest = max((float(g.abs().max()) for g in grads.values() if g.numel()), default=0.0)
            whole = full_gradients(self.sharded)
            yield from self._differences(step, "gradient of", whole, grads, 1e-3 * largest)
            # Gradients are equal: if parameters are not after this, the step is what differs.
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            values = {name: p.detach() for name, p in named.items()}
            whole = full_parameters(self.sharded)
            yield from self._differences(step, "parameter", whole, values, 1e-3)

    def _losses(self, step: int) -> torch.Tensor:
        """One backward of the sharded model; every rank's loss, on every rank."""
        rank = self.axis.rank
        torch.manual_seed(_seed(step, rank))
        value = self.loss(self.sharded, self.batch(step, rank))
        value.backward()
        losses = torch.zeros(self.axis.size, dtype=torch.float64, device=value.device)
        losses[rank] = value.detach().double()
        all_reduce_small([losses], self.axis.group)
        return losses

    def _loss_of(self, step: int, rank: int, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        """A rank's backward in plain PyTorch, with its buffers; gradients add up to the mean."""
        for name, buffer in self.alone.named_buffers():
            buffer.copy_(buffers[name])
        torch.manual_seed(_seed(step, rank))
        value = self.loss(self.alone, self.batch(step, rank))
        (value / self.axis.size).backward()
        result: torch.Tensor = value.detach().double()
        for name, buffer in self.alone.named_buffers():
            buffers[name].copy_(buffer)
        return result

    def _differences(
        self,
        step: int,
        kind: str,
        tensors: dict[str, torch.Tensor],
        expected: dict[str, torch.Tensor],
        floor: float,
    ) -> Iterator[Difference]:
        for name in dict.fromkeys([*expected, *tensors]):
            if (name in tensors) is not (name in expected):
                what = f"{kind} {name} (one side has none)"
                yield Difference(step, 0, what, float("inf"), 0.0)
                continue
            # In fp64, so that the difference itself is not rounded away.
            off = (tensors[name].double() - expected[name].double()).abs().reshape(-1)
            if not off.numel():
                continue
            worst = float(off.max())
            limit = self.tolerance * max(float(expected[name].abs().max()), floor)
            if not worst <= limit:
                rank = self._holder(name, int(off.nan_to_num(torch.inf).argmax()))
                yield Difference(step, rank, f"{kind} {name}", worst, limit)

    def _holder(self, name: str, element: int) -> int:
        """The rank that holds an element of a parameter at rest; rank 0 where all do."""
        for group in self.sharded.parameter_groups():
            for index, ref in enumerate(group.refs):
                if ref.name == name and not group.main_weights.is_whole:
                    for span in group.layout.spans(index):
                        if span.start <= element < span.stop:
                            return group.axes.inner.ranks[span.shard % group.axes.inner.size]
        return 0


def _seed(step: int, rank: int) -> int:
    return 1_000_003 * step + rank


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m lamina.fsdp.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("build", help="my.module:function")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--strategy", default="3", help="zero_dp_strategy: 0..3 or a name")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if not given.as_rank:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--local-addr=127.0.0.1"]  # the machine's own name may have no address
        launcher += [f"--nproc-per-node={given.ranks}", "-m", "lamina.fsdp.check", "--as-rank"]
        rest = list(sys.argv[1:] if words is None else words)
        return subprocess.run([sys.executable, *launcher, *rest], check=False).returncode
    with init_distributed() as runtime:
        difference = check_model(
            _imported(given.build),
            steps=given.steps,
            tolerance=given.tolerance,
            zero_dp_strategy=given.strategy,
        )
        if runtime.is_main:
            ranks = f"{runtime.world_size} ranks"
            same = f"{given.build}: {given.steps} steps on {ranks} equal one process"
            print(same if difference is None else f"{given.build} differs: {difference}")
        return 0 if difference is None else 1


def _imported(path: str) -> Build:
    try:
        build: Build = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(
            f"{path!r} cannot be imported ({error}): give module:function, with the module on "
            "PYTHONPATH or in this directory"
        ) from error
    return build


if __name__ == "__main__":
    sys.exit(main())
