"""What a step costs the host when the world grows: Lamina on 8 to 65,536 simulated ranks.

    python benchmarks/scale.py [--ranks 8 64 1024 8192 65536] [--strategies 0 1 3]
    python benchmarks/scale.py --start llama3-405b --ranks 16384    # on meta tensors

One process plays rank 0 (see `lamina_testing.simulated`): its collectives move nothing, so what is
left is the host's own work. Counts come first, because they are no noise: the Python functions
entered per unit and step (torch's own included, the smallest count of five steps), PyTorch's
operators, the calls of the backend, the longest list of tensors that one call was given, messages
and those of them to other hosts, and bytes to ranks of the same host and to other hosts. Hosts have
8 ranks, and Lamina is told so: its ordered sums add up a host's ranks first. Then times: of a step
per unit (it still holds the arithmetic, on buffers that are padded to the number of ranks), of
building the mesh, and of the wrapper. Last what stays: process groups and descriptors. Torch's
FSDP2 stands beside it at the smallest number of ranks. Each row is a process of its own. With
`--start` it is the start of one job instead: a model on the meta device is described, sharded and
planned on one core, with the seconds of each and the most memory that the process has held.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from lamina.ddp import clip_grad_norm, memory_plan, wire_plan
from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, preset
from lamina_testing.simulated import Operations, simulated_world
from lamina_testing.walk import Profile, least

UNITS, WIDTH, STEPS = 4, 64, 5
FSDP2 = "FSDP2"
COUNTS = ("calls", "operators", "launches", "listed", "messages", "far", "inside", "between")
COSTS = ("step ms", "mesh s", "wrapper s", "groups", "descriptors")


class Block(nn.Module):
    """A unit of two products, as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def counted(file: str) -> bool:
    """Whether calls of functions in this file count: not those of the simulation itself."""
    return not file.endswith(("lamina_testing/simulated.py", "unittest/mock.py", "scale.py"))


def step_of(system: str, ranks: int, costs: dict[str, float]) -> Callable[[], None]:
    """Build the model's wrapper and return a function that runs one step with clipping."""
    begin = time.perf_counter()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    costs["mesh s"] = time.perf_counter() - begin
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(UNITS)))
    batch = torch.randn(4, WIDTH)
    begin = time.perf_counter()
    if system == FSDP2:
        for module in (*model.children(), model):
            torch_fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        model, optimizer = fully_shard(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            device_mesh=mesh,
            dp_shard_dim="dp_shard",
            fsdp_unit_modules=[Block],
            zero_dp_strategy=int(system),
        )
    costs["wrapper s"] = time.perf_counter() - begin

    def step() -> None:
        model(batch).square().mean().backward()
        if system == FSDP2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            clip_grad_norm(model, 1e9)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(system: str, ranks: int) -> dict[str, float]:
    """All figures of one system on one number of ranks."""
    costs: dict[str, float] = {}
    torch.set_num_threads(1)
    with simulated_world(ranks, hosts=True) as traffic, Profile(counted) as profile:
        step = step_of(system, ranks, costs)
        for _ in range(3):
            step()
        walks = []
        for _ in range(STEPS):
            with profile.walk() as walk:
                step()
            walks.append(walk)
        costs["calls"] = least(walks).calls.total() / UNITS
        traffic.clear()
        with Operations() as operations:
            step()
        costs["operators"] = operations.total / UNITS
        costs["launches"] = traffic.calls.total() / UNITS
        costs["listed"] = traffic.listed
        for name in ("messages", "far", "inside", "between"):
            costs[name] = getattr(traffic, name) / UNITS
        costs["groups"] = len(dist.distributed_c10d._world.pg_map)
        costs["descriptors"] = len(os.listdir("/proc/self/fd"))
    return costs | timed(system, ranks)


def timed(system: str, ranks: int) -> dict[str, float]:
    """Times without anybody watching, once all is imported: a step's is the fastest of some."""
    found, costs = [], {}
    with simulated_world(ranks, hosts=True):
        step = step_of(system, ranks, costs)
        gc.collect()
        for _ in range(3 + STEPS):
            begin = time.perf_counter()
            step()
            found.append(time.perf_counter() - begin)
    return costs | {"step ms": 1e3 * min(found) / UNITS}


def measured_apart(system: str, ranks: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--only", system, "--ranks", str(ranks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def start(name: str, ranks: int) -> None:
    """Print what the start of a job costs one rank on the host, without the memory of weights."""
    torch.set_num_threads(1)
    with simulated_world(ranks, hosts=True):
        times = [time.perf_counter()]
        mesh = ParallelLayout().build("cpu")
        times.append(time.perf_counter())
        with torch.device("meta"):
            model = GPTModel(preset(name), mesh, seed=0)
        times.append(time.perf_counter())
        sharded, _ = fully_shard(
            model,
            torch.optim.AdamW(model.parameters()),
            device_mesh=mesh,
            device=torch.device("meta"),
            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )
        times.append(time.perf_counter())
        plans = memory_plan(sharded), wire_plan(sharded)
        times.append(time.perf_counter())
    print(f"{name} on {ranks:,} ranks, strategy 3, bf16", *plans, sep="\n")
    took = zip(("mesh", "model", "wrapper", "plans"), times[1:], times, strict=False)
    print(", ".join(f"{what} {after - before:.2f} s" for what, after, before in took))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{times[-1] - times[0]:.1f} s in all, {most:.2f} GiB at most")


def show(title: str, names: tuple[str, ...], rows: dict[tuple[str, int], dict[str, float]]) -> None:
    print(f"\n{title}\n\n| system | ranks | " + " | ".join(names) + " |")
    print("| --- " * (2 + len(names)) + "|")
    for (system, ranks), found in rows.items():
        name = system if system == FSDP2 else f"lamina {system}"
        cells = (f"{found[n]:,.{2 if n.endswith((' s', ' ms')) else 0}f}" for n in names)
        print(f"| {name} | {ranks:,} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 8192, 65536])
    parser.add_argument("--strategies", nargs="+", default=["0", "1", "3"], choices="0123")
    parser.add_argument("--start", metavar="PRESET", help="the start of a job of this model")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.start:
        start(settings.start, settings.ranks[0])
        return
    if settings.only:
        print(json.dumps(measure(settings.only, settings.ranks[0])))
        return
    cases = [(FSDP2, min(settings.ranks))]
    cases += [(system, ranks) for system in settings.strategies for ranks in settings.ranks]
    rows = {case: measured_apart(*case) for case in cases}
    show(f"counts per unit and step, {UNITS} units, clipping by the norm", COUNTS, rows)
    show("costs (a step's time is per unit)", COSTS, rows)


if __name__ == "__main__":
    main()
