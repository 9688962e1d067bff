"""Lamina's checkpoints beside plain DCP (sync and async) and torch.save, on one sharded state.

    torchrun --nproc-per-node=2 benchmarks/checkpoint.py [--model 110m|1b|tiny] [--rounds 3]
    torchrun --nproc-per-node=2 benchmarks/checkpoint.py --model 1b --optimizer sgd --one-by-one

All save the same model and optimizer state (strategy 3: each rank its part) into the same
directory's file system and take turns; with `--one-by-one` each does all its rounds and lets go of
its memory before the next begins, so that 1b with SGD's momentum (8.7 GB, and as much for one
system's copies) fits into 24 GiB. Reported per system: seconds that the caller is blocked, seconds
until the checkpoint is complete (async: the caller sleeps meanwhile), memory, bytes on disk, and
seconds of a load. Memory is the growth of the resident set at its peak (the kernel's VmHWM, reset
before) and what was kept since the save before (Lamina's staging buffers). torch.save writes each
rank's part to a file of its own, without an index: it cannot be resharded.
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
from functools import partial
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


def build(name: str, optimizer_name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    mesh = ParallelLayout().build("cpu")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPTModel(TransformerConfig(**MODELS[name]), seed=0)
    makes = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, momentum=0.9)}
    model, optimizer = fully_shard(
        model,
        makes[optimizer_name](model.parameters(), lr=1e-3),
        device_mesh=mesh,
        fsdp_unit_modules=[TransformerBlock],
    )
    for parameter in model.parameters():  # a step's state, without the step
        if optimizer_name == "sgd":
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
            continue
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


def measure(
    result: Result, begin: Callable[[], Callable[[], object]], directory: Path, kept: int = 0
) -> None:
    """Time one save: `begin` blocks, what it returns waits until the checkpoint is complete.

    `kept` are bytes that the system holds since its save before.
    """
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before, started = resident("VmRSS"), time.perf_counter()
    finish = begin()
    result.blocked.append(time.perf_counter() - started)
    finish()
    dist.barrier()
    result.total.append(time.perf_counter() - started)
    result.memory = max(result.memory, resident("VmHWM") - before + kept)
    result.size = sum(f.stat().st_size for f in directory.rglob("*") if f.is_file())


def timed(work: Callable[[], object]) -> float:
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


class Systems:
    """What is compared; each method saves and loads once."""

    def __init__(self, root: Path, model: str, optimizer: str) -> None:
        self.root, self.rank = root, dist.get_rank()
        self.model, self.optimizer = build(model, optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.group = dist.new_group(backend="gloo")  # DCP's async save needs one of its own
        self.managers = {
            a: CheckpointManager(root / f"lamina{a}", keep_last=1, async_save=a)
            for a in (False, True)
        }

    def plain(self) -> State:
        return plain(self.model, self.optimizer)

    def fresh(self, which: str) -> Path:
        if self.rank == 0:
            shutil.rmtree(self.root / which, ignore_errors=True)
            (self.root / which).mkdir()
        dist.barrier()
        return self.root / which

    def torch_save(self, result: Result, number: int) -> None:
        path = self.fresh("torch")
        file = path / f"{self.rank}.pt"

        def save() -> Callable[[], object]:
            torch.save(local(self.plain()), file)
            return lambda: None

        measure(result, save, path)
        result.load.append(timed(lambda: copy_into(self.plain(), torch.load(file))))

    def dcp(self, result: Result, number: int) -> None:
        path = self.fresh("dcp")

        def save() -> Callable[[], object]:
            dcp.save(self.plain(), checkpoint_id=path)
            return lambda: None

        measure(result, save, path)
        result.load.append(timed(lambda: dcp.load(self.plain(), checkpoint_id=path)))

    def dcp_async(self, result: Result, number: int) -> None:
        path = self.fresh("dcp-async")

        def save() -> Callable[[], object]:
            return dcp.async_save(self.plain(), checkpoint_id=path, process_group=self.group).result

        measure(result, save, path)

    def lamina(self, result: Result, number: int, *, in_background: bool = False) -> None:
        manager = self.managers[in_background]

        def save() -> Callable[[], object]:
            manager.save(number, self.state)
            return manager.wait

        measure(result, save, Path(manager.directory), manager.staged_bytes)
        result.load.append(timed(lambda: manager.restore(self.state)))

    def lamina_async(self, result: Result, number: int) -> None:
        self.lamina(result, number, in_background=True)

    def release(self) -> None:
        """Let go of buffers and files."""
        for manager in self.managers.values():
            manager.close()
        for name in ("torch", "dcp", "dcp-async"):
            self.fresh(name)


def run(root: Path, settings: argparse.Namespace) -> dict[str, Result]:
    systems = Systems(root, settings.model, settings.optimizer)
    works: dict[str, Callable[[Result, int], None]] = {
        "torch.save": systems.torch_save,
        "DCP": systems.dcp,
        "DCP async": systems.dcp_async,
        "Lamina": systems.lamina,
        "Lamina async": systems.lamina_async,
    }
    results = {name: Result() for name in works}
    rounds = range(settings.rounds)
    turns = [(name, number) for number in rounds for name in works]
    if settings.one_by_one:
        turns = [(name, number) for name in works for number in rounds]
    for name, number in turns:
        if systems.rank == 0:
            print(f"{name}, round {number + 1} of {settings.rounds}", flush=True)
        works[name](results[name], number)
        if settings.one_by_one and number + 1 == settings.rounds:
            systems.release()
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
        "| system | blocked, s | first | of DCP async | total, s | of DCP | memory, MiB "
        "| of DCP async | disk, MiB | of DCP | load, s | of DCP |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]

    def later(values: list[float]) -> float:
        return statistics.median(values[1:] or values)

    for name, result in results.items():
        load = later(result.load) if result.load else float("nan")
        lines.append(
            f"| {name} | {later(result.blocked):.2f} | {result.blocked[0]:.2f} "
            f"| {later(result.blocked) / later(base.blocked):.2f} | {later(result.total):.2f} "
            f"| {later(result.total) / later(results['DCP'].total):.2f} "
            f"| {result.memory / 2**20:.0f} | {result.memory / max(1, base.memory):.2f} "
            f"| {result.size / 2**20:.0f} | {result.size / results['DCP'].size:.2f} | {load:.2f} "
            f"| {load / later(results['DCP'].load):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and print the table of the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="110m")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument(
        "--one-by-one", action="store_true", help="a system does all rounds, then frees its memory"
    )
    parser.add_argument("--rounds", type=int, default=3, help="the first is reported apart")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    settings = parser.parse_args()
    with init_distributed() as runtime:
        place = [tempfile.mkdtemp(dir=settings.directory) if runtime.is_main else None]
        dist.broadcast_object_list(place, src=0)
        root = Path(str(place[0]))
        try:
            results = run(root, settings)
        finally:
            dist.barrier()
            if runtime.is_main:
                shutil.rmtree(root)
        if runtime.is_main:
            print(
                f"{settings.model}, {settings.optimizer}, {runtime.world_size} ranks, torch "
                f"{torch.__version__}"
            )
            print(table(results))


if __name__ == "__main__":
    main()
