"""Lamina's checkpoints beside plain DCP (sync and async) and torch.save, on one sharded state.

    torchrun --nproc_per_node=2 benchmarks/checkpoint.py [--model 110m|1b|tiny] [--rounds 3]

All save the same model and AdamW state (strategy 3: each rank its part) into the same directory's
file system and take turns. Reported per system: seconds that the caller is blocked, seconds until
the checkpoint is complete (async: the caller sleeps meanwhile), growth of the resident set at its
peak, bytes on disk, and seconds of a load. Peak memory is the kernel's (VmHWM, reset before).
torch.save writes each rank's part to a file of its own, without an index: it cannot be resharded.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lamina.checkpoint import CheckpointManager
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, TransformerBlock, TransformerConfig

MODELS = {
    "tiny": {"vocab_size": 4096, "hidden_size": 256, "num_layers": 4, "num_heads": 4},
    "110m": {"vocab_size": 32768, "hidden_size": 768, "num_layers": 12, "num_heads": 12},
    "1b": {"vocab_size": 32768, "hidden_size": 2048, "num_layers": 19, "num_heads": 16},
}
State = dict[str, Any]


@dataclass
class Result:
    """Measurements of one system."""

    blocked: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    memory: int = 0
    size: int = 0
    load: list[float] = field(default_factory=list)


def build(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    mesh = ParallelLayout().build("cpu")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPTModel(TransformerConfig(**MODELS[name]), seed=0)
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        device_mesh=mesh,
        fsdp_unit_modules=[TransformerBlock],
    )
    for parameter in model.parameters():  # a step's state, without the step
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return model, optimizer


def plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The same tensors as a dict, as one gives them to DCP."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def local(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: local(value) for key, value in tree.items()}
    return tree.to_local() if hasattr(tree, "to_local") else tree


def resident(field_name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name):
            return int(line.split()[1]) * 1024
    return 0


def measure(result: Result, begin: Callable[[], Callable[[], object]], directory: Path) -> None:
    """Time one save: `begin` blocks, what it returns waits until the checkpoint is complete."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, started = resident("VmRSS"), time.perf_counter()
    finish = begin()
    result.blocked.append(time.perf_counter() - started)
    finish()
    dist.barrier()
    result.total.append(time.perf_counter() - started)
    result.memory = max(result.memory, resident("VmHWM") - before)
    result.size = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())


def timed(work: Callable[[], object]) -> float:
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def run(root: Path, name: str, rounds: int) -> dict[str, Result]:
    model, optimizer = build(name)
    state = {"model": model, "optimizer": optimizer}
    rank = dist.get_rank()
    names = ["torch.save", "DCP", "DCP async", "Lamina", "Lamina async"]
    results = {system: Result() for system in names}
    managers = {
        a: CheckpointManager(root / f"lamina{a}", keep_last=1, async_save=a) for a in (0, 1)
    }
    group = dist.new_group(backend="gloo")  # DCP's async save needs one of its own

    def fresh(which: str) -> Path:
        if rank == 0:
            shutil.rmtree(root / which, ignore_errors=True)
            (root / which).mkdir()
        dist.barrier()
        return root / which

    def done() -> None:
        return None

    for number in range(rounds):
        if rank == 0:
            print(f"round {number + 1} of {rounds}", flush=True)
        path = fresh("torch")

        def torch_save(path: Path = path) -> Callable[[], object]:
            torch.save(local(plain(model, optimizer)), path / f"{rank}.pt")
            return done

        measure(results["torch.save"], torch_save, path)
        file = path / f"{rank}.pt"
        results["torch.save"].load.append(
            timed(lambda file=file: copy_into(plain(model, optimizer), torch.load(file)))
        )
        path = fresh("dcp")

        def dcp_save(path: Path = path) -> Callable[[], object]:
            dcp.save(plain(model, optimizer), checkpoint_id=path)
            return done

        measure(results["DCP"], dcp_save, path)
        results["DCP"].load.append(
            timed(lambda path=path: dcp.load(plain(model, optimizer), checkpoint_id=path))
        )
        path = fresh("dcp-async")

        def dcp_async(path: Path = path) -> Callable[[], object]:
            return dcp.async_save(
                plain(model, optimizer), checkpoint_id=path, process_group=group
            ).result

        measure(results["DCP async"], dcp_async, path)
        for system, in_background in (("Lamina", 0), ("Lamina async", 1)):
            manager = managers[in_background]

            def lamina(manager: Any = manager, step: int = number) -> Callable[[], object]:
                manager.save(step, state)
                return manager.wait

            measure(results[system], lamina, Path(manager.directory))
            results[system].load.append(timed(lambda m=manager: m.restore(state)))
    return results


def copy_into(target: Any, source: Any) -> None:
    if isinstance(target, dict):
        for key in target:
            copy_into(target[key], source[key])
    elif isinstance(target, torch.Tensor):
        (target.to_local() if hasattr(target, "to_local") else target).detach().copy_(source)


def table(results: dict[str, Result]) -> str:
    base = results["DCP async"]
    lines = [
        "| system | blocked, s | first | of DCP async | total, s | of DCP | memory, MiB | disk "
        "| load, s | of DCP |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]

    def later(values: list[float]) -> float:
        return statistics.median(values[1:] or values)

    for name, result in results.items():
        load = later(result.load) if result.load else float("nan")
        lines.append(
            f"| {name} | {later(result.blocked):.2f} | {result.blocked[0]:.2f} "
            f"| {later(result.blocked) / later(base.blocked):.2f} | {later(result.total):.2f} "
            f"| {later(result.total) / later(results['DCP'].total):.2f} "
            f"| {result.memory / 2**20:.0f} | {result.size / 2**20:.0f} | {load:.2f} "
            f"| {load / later(results['DCP'].load):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and print the table of the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="110m")
    parser.add_argument("--rounds", type=int, default=3, help="the first is reported apart")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    settings = parser.parse_args()
    with init_distributed() as runtime:
        place = [tempfile.mkdtemp(dir=settings.directory) if runtime.is_main else None]
        dist.broadcast_object_list(place, src=0)
        root = Path(str(place[0]))
        try:
            results = run(root, settings.model, settings.rounds)
        finally:
            dist.barrier()
            if runtime.is_main:
                shutil.rmtree(root)
        if runtime.is_main:
            print(f"{settings.model}, {runtime.world_size} ranks, torch {torch.__version__}")
            print(table(results))


if __name__ == "__main__":
    main()
