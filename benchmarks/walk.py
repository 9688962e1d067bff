"""How far one training step walks through the source: Lamina beside torch's FSDP2.

    python benchmarks/walk.py [--strategies 0 1 3] [--files [--functions]]

A profile hook sees each call of a Python function during one step (forward, backward, the step of
AdamW, `zero_grad`) of a model of four units on two gloo ranks. For each system the table shows
the files entered, the functions entered, the calls, and the moves: calls that came from
another file. Rank 0 is printed.

- Lamina's rows count the layers mesh, buffers, collectives, ddp and fsdp. The row "torch FSDP2"
  counts torch's folder `_fully_shard`, and the row below it what the same step enters in the
  rest of `torch.distributed` (DTensor, c10d).
- The threads that Lamina starts for its communication are counted too.
- Five steps go before, in which memory and connections are made. Then twenty steps are counted,
  and the smallest count of each function is shown, because threads that wait for each other enter
  a few functions more or fewer each time. So the figures need no quiet machine; what is left of
  that difference is below ten calls.
- Figures of two versions of Python differ: before 3.12 a comprehension is a call.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from lamina.fsdp import fully_shard
from lamina_testing.walk import Profile, Walk, least, path_in_lamina

UNITS, WIDTH, RANKS = 4, 64, 2
DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep


class Block(nn.Module):
    """A unit of two products, as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(UNITS)))


def in_lamina(file: str) -> bool:
    return bool(path_in_lamina(file))


def in_distributed(file: str) -> bool:
    return file.startswith(DISTRIBUTED)


def in_fsdp2(file: str) -> bool:
    return file.startswith(os.path.join(DISTRIBUTED, "fsdp", "_fully_shard", ""))


def in_rest_of_distributed(file: str) -> bool:
    return in_distributed(file) and not in_fsdp2(file)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    batch = torch.randn(4, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def lamina_step(strategy: int) -> Callable[[], None]:
    plain = make_model()
    model, optimizer = fully_shard(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-3),
        device_mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",)),
        dp_shard_dim="dp_shard",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
    )
    return step_of(model, optimizer)


def torch_step() -> Callable[[], None]:
    model = make_model()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for module in (*model, model):
        torch_fully_shard(module, mesh=mesh)
    return step_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def walk_of(profile: Profile, step: Callable[[], None], *, counted: int = 20) -> Walk:
    """Return the smallest counts over `counted` steps, after five that are not counted."""
    for _ in range(5):
        step()
    walks = []
    for _ in range(counted):
        dist.barrier()
        with profile.walk() as walk:
            step()
        walks.append(walk)
    return least(walks)


def show_files(name: str, walk: Walk, *, functions: bool) -> None:
    print(f"\n{name}")
    for file in walk.files:
        inside = {f: n for f, n in walk.calls.items() if f.file == file}
        print(f"{sum(inside.values()):6}  {path_in_lamina(file)}")
        for function, n in sorted(inside.items(), key=lambda item: -item[1]):
            if functions:
                print(f"{n:14}  {function.name}")


def report(rank: int, store: str, settings: argparse.Namespace) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{store}")
    rows: list[tuple[str, Walk]] = []
    with Profile(lambda file: in_lamina(file) or in_distributed(file)) as profile:
        for strategy in settings.strategies:
            walk = walk_of(profile, lamina_step(strategy))
            rows.append((f"lamina, strategy {strategy}", walk.within(in_lamina)))
        peer = walk_of(profile, torch_step())
    dist.destroy_process_group()
    if rank:
        return
    print(f"one step, {UNITS} units, {RANKS} ranks; Python {platform.python_version()}")
    print(f"{'':34}{'files':>8}{'functions':>11}{'calls':>8}{'moves':>8}")
    beside = ("  and in torch.distributed", peer.within(in_rest_of_distributed))
    for name, walk in (*rows, ("torch FSDP2", peer.within(in_fsdp2)), beside):
        counts = len(walk.files), len(walk.calls), walk.calls.total(), walk.moves.total()
        print("{:34}{:8}{:11}{:8}{:8}".format(name, *counts))
    for name, walk in rows if settings.files or settings.functions else ():
        show_files(name, walk, functions=settings.functions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--strategies", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--files", action="store_true", help="list the files that were entered")
    parser.add_argument("--functions", action="store_true", help="list them with their functions")
    settings = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
            report, (str(Path(folder) / "rendezvous"), settings), nprocs=RANKS
        )


if __name__ == "__main__":
    main()
