"""The same bits on any number of ranks: one SHA-256 for all strategies, beside torch's spread.

    python benchmarks/bits.py [--steps 10] [--ranks 1 2 3 4] [--width 192] [--layers 4]
                              [--sequences 12]

The main job's GPT (4 layers, 192 wide, bytes of Python's own library) is trained on each number of
ranks. A smaller one makes many steps in an hour. It is trained by
`fully_shard(reproducible=True)` under strategies 0 to 3, HSDP and HFSDP, and for comparison without
`reproducible`, by torch's DDP and by torch's FSDP2. A step has the same number of sequences,
however many ranks share them. Losses are sums over tokens, gradients are clipped, AdamW steps.

The script prints one SHA-256 of all parameters after steps 1, 100 and the last for each system,
and the largest difference of a parameter from the same system on the first number of ranks. It
fails if a reproducible system has another SHA-256 than the others. Other machines have other
kernels, and so perhaps another SHA-256, but one for all systems.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from local_ranks import start_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lamina.checkpoint import cut_batch
from lamina.ddp import clip_grad_norm, finalize_grads, full_parameters
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, Runtime, init_distributed
from lamina.models import GPTModel, TransformerBlock, TransformerConfig

LENGTH = 128  # a power of two: a mean times it is the sum, with the same bits
LEARNING_RATE, WARMUP, CLIP = 2e-3, 60, 1.0

Step = Callable[[list[tuple[torch.Tensor, int]]], None]
"""Trains on this rank's sequences, one microbatch for each, that count 1 or 0."""


@dataclass(frozen=True)
class Job:
    """The model's width and layers, and the sequences of a step (5 ranks share 12 unevenly)."""

    width: int = 192
    layers: int = 4
    sequences: int = 12


@dataclass
class Built:
    """A system on this rank: how it makes a step, and its whole parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    whole: Callable[[], Mapping[str, torch.Tensor]]


@dataclass
class Outcome:
    """What one system did on one number of ranks."""

    seconds: float = 0.0
    hashes: dict[int, str] = field(default_factory=dict)
    parameters: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


def model_and_optimizer(job: Job) -> tuple[GPTModel, torch.optim.Optimizer]:
    config = TransformerConfig(
        vocab_size=256,
        hidden_size=job.width,
        num_layers=job.layers,
        num_heads=6,
        max_sequence_length=LENGTH,
    )
    model = GPTModel(config, seed=1234)
    return model, adamw(model)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))


def by_lamina(
    job: Job, *, replicas: int = 1, reproducible: bool = True, **strategies: Any
) -> Built:
    mesh = ParallelLayout(dp_replicate=replicas).build("cpu")
    model, optimizer = fully_shard(
        *model_and_optimizer(job),
        device_mesh=mesh,
        fsdp_unit_modules=[TransformerBlock],
        calculate_per_token_loss=True,
        reproducible=reproducible,
        **strategies,
    )

    def step(mine: list[tuple[torch.Tensor, int]]) -> None:
        for place, (text, counted) in enumerate(mine):
            last = place == len(mine) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (model(text[:, :-1], labels=text[:, 1:]) * (LENGTH * counted)).backward()
        finalize_grads(model, mesh, num_tokens=sum(counted for _, counted in mine) * LENGTH)
        clip_grad_norm(model, CLIP, mesh)

    return Built(model, optimizer, step, lambda: full_parameters(model))


def by_ddp(job: Job, ranks: int) -> Built:
    model, optimizer = model_and_optimizer(job)
    wrapped = TorchDDP(model)

    def step(mine: list[tuple[torch.Tensor, int]]) -> None:
        for place, (text, counted) in enumerate(mine):
            last, weight = place == len(mine) - 1, counted * ranks / job.sequences
            with contextlib.nullcontext() if last else wrapped.no_sync():
                (wrapped(text[:, :-1], labels=text[:, 1:]) * weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    return Built(wrapped, optimizer, step, lambda: dict(model.named_parameters()))


def by_fsdp2(job: Job, ranks: int) -> Built:
    model, _ = model_and_optimizer(job)
    mesh = torch.distributed.init_device_mesh("cpu", (ranks,))
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            torch_fully_shard(module, mesh=mesh)
    sharded: Any = torch_fully_shard(model, mesh=mesh)

    def step(mine: list[tuple[torch.Tensor, int]]) -> None:
        for text, counted in mine:
            weight = counted * ranks / job.sequences
            (sharded(text[:, :-1], labels=text[:, 1:]) * weight).backward()
        nn.utils.clip_grad_norm_(sharded.parameters(), CLIP)

    def whole() -> dict[str, torch.Tensor]:
        return {name: each.full_tensor() for name, each in sharded.named_parameters()}

    return Built(sharded, adamw(sharded), step, whole)


def systems(job: Job, ranks: int) -> dict[str, Callable[[], Built]]:
    """What runs on a number of ranks. Those called `lamina` are to have one SHA-256."""
    by = functools.partial
    sharded = by(by_lamina, job, zero_dp_strategy=3)
    made: dict[str, Callable[[], Built]] = {
        f"lamina {number}": by(sharded, zero_dp_strategy=number) for number in range(4)
    }
    if ranks % 2 == 0:
        for outer, name in enumerate(("HSDP", "HFSDP")):
            both = by(sharded, replicas=2, outer_dp_sharding_strategy=outer)
            made[f"lamina {name} 2x{ranks // 2}"] = both
    made["without reproducible, 3"] = by(sharded, reproducible=False)
    made["torch DDP"] = by(by_ddp, job, ranks)
    made["torch FSDP2"] = by(by_fsdp2, job, ranks)
    return made


@functools.cache
def text_windows() -> torch.Tensor:
    """Bytes of Python's asyncio, cut to rows of LENGTH + 1."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / "asyncio"
    text = b"\0".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens.unfold(0, LENGTH + 1, LENGTH)


def train_step(built: Built, runtime: Runtime, number: int, sequences: int) -> None:
    """One step; its sequences and learning rate follow from its number."""
    windows = text_windows()
    for group in built.optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARMUP)
    mine = []
    for part in cut_batch(sequences, runtime.rank, runtime.world_size, size=1):
        row = (sequences * number + part.samples[0]) % len(windows)
        mine.append((windows[row : row + 1], part.counted))
    built.step(mine)
    built.optimizer.step()
    built.optimizer.zero_grad()


def marks(steps: int) -> list[int]:
    """The steps after which parameters are compared."""
    return sorted({1, min(100, steps), steps})


def train(built: Built, runtime: Runtime, steps: int, sequences: int) -> Outcome:
    outcome, begin = Outcome(), time.perf_counter()
    for number in range(steps):
        train_step(built, runtime, number, sequences)
        if number + 1 in marks(steps):
            whole = {name: each.detach().clone() for name, each in built.whole().items()}
            outcome.hashes[number + 1] = sha256(whole)
            outcome.parameters[number + 1] = whole
    outcome.seconds = (time.perf_counter() - begin) / steps
    return outcome


def sha256(whole: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(whole):
        total.update(name.encode() + whole[name].contiguous().numpy().tobytes())
    return total.hexdigest()


def run_rank(settings: argparse.Namespace) -> None:
    """Be one rank: all systems in turn. Rank 0 writes what came out."""
    torch.set_num_threads(1)
    with init_distributed() as runtime:
        found = {}
        job = Job(settings.width, settings.layers, settings.sequences)
        for name, build in systems(job, runtime.world_size).items():
            found[name] = train(build(), runtime, settings.steps, job.sequences)
        if runtime.is_main:
            torch.save(found, settings.write)


def launch(ranks: int, settings: argparse.Namespace) -> dict[str, Outcome]:
    """Start this program as every rank of a world, and read what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.pt"
        given = ("steps", "width", "layers", "sequences")
        options = [each for name in given for each in (f"--{name}", str(getattr(settings, name)))]
        start_ranks(ranks, __file__, [*options, "--write", str(path)])
        found: dict[str, Outcome] = torch.load(path, weights_only=False)
        return found


def difference(found: Outcome, first: Outcome, step: int) -> float:
    pairs = [(found.parameters[step][name], one) for name, one in first.parameters[step].items()]
    return max(float((here - there).abs().max()) for here, there in pairs)


def report(outcomes: Mapping[int, Mapping[str, Outcome]], steps: int) -> bool:
    """Print a row for each system and number of ranks; return whether the bits are the same."""
    compared = marks(steps)
    firsts: dict[str, Outcome] = {}
    print(f"| system | ranks | {' | '.join(f'SHA-256, step {mark}' for mark in compared)} | "
          f"largest difference, step {steps} | s per step |")  # fmt: skip
    print(f"| --- | --- | {'--- | ' * len(compared)}--- | --- |")
    for ranks, found in outcomes.items():
        for name, one in found.items():
            family = "lamina" if name.startswith("lamina") else name
            first = firsts.setdefault(family, one)
            cells = [f"`{one.hashes[mark][:12]}`" for mark in compared]
            cells += [f"{difference(one, first, steps):.1e}", f"{one.seconds:.2f}"]
            print(f"| {name} | {ranks} | {' | '.join(cells)} |")
    alike = {
        tuple(one.hashes[mark] for mark in compared)
        for found in outcomes.values()
        for name, one in found.items()
        if name.startswith("lamina")
    }
    for hashes in sorted(alike):
        pairs = zip(compared, hashes, strict=True)
        print("\n" + "\n".join(f"reproducible, step {mark}: {value}" for mark, value in pairs))
    return len(alike) == 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--width", type=int, default=Job.width)
    parser.add_argument("--layers", type=int, default=Job.layers)
    parser.add_argument("--sequences", type=int, default=Job.sequences, help="per step")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.write:
        run_rank(settings)
        return
    outcomes = {ranks: launch(ranks, settings) for ranks in settings.ranks}
    if not report(outcomes, settings.steps):
        raise SystemExit("reproducible runs differ")


if __name__ == "__main__":
    main()
