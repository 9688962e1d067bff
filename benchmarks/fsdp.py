"""Lamina's fully_shard beside torch FSDP2 and DDP on one GPT: time, copies, wire, memory.

    torchrun --nproc_per_node=2 benchmarks/fsdp.py [--layers 8 --width 512] [--fused]

All systems are built in the same processes and take turns, a few steps each, so that a noisy
machine hits all alike: trust the ratios. Bytes copied are counted by a dispatch mode (law 3's
operators), peak memory from storages that operators make, both over one step of their own.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lamina.collectives import Ledger
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed
from lamina.models import GPTModel, TransformerBlock, TransformerConfig
from lamina_testing import Meter, live_bytes

VOCABULARY = 8192


@dataclass
class System:
    """One model under one wrapper."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    resident: int = 0
    copied: int = 0
    peak: int = 0
    sent: int = 0

    def step(self, tokens: torch.Tensor) -> None:
        self.model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(settings: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPTModel(
        TransformerConfig(
            vocab_size=VOCABULARY,
            hidden_size=settings.width,
            num_layers=settings.layers,
            num_heads=settings.width // 64,
        )
    )
    kind = {"fused": True} if settings.fused else {"foreach": True}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)


def local(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
    return System("no communication", *build(settings))


def ddp(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
    model, optimizer = build(settings)
    return System("torch DDP", TorchDDP(model, gradient_as_bucket_view=True), optimizer)


def fsdp2(reshard: bool) -> Callable[[argparse.Namespace, ParallelMesh], System]:
    def make(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
        model, _ = build(settings)
        for module in model.modules():
            if isinstance(module, TransformerBlock):
                torch_fully_shard(module, mesh=mesh["dp_shard"], reshard_after_forward=reshard)
        torch_fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=reshard)
        kind = {"fused": True} if settings.fused else {"foreach": True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kind)
        return System("torch FSDP2" + ("" if reshard else ", no reshard"), model, optimizer)

    return make


def lamina(strategy: int) -> Callable[[argparse.Namespace, ParallelMesh], System]:
    def make(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
        model, optimizer = fully_shard(
            *build(settings),
            device_mesh=mesh,
            fsdp_unit_modules=[TransformerBlock],
            zero_dp_strategy=strategy,
        )
        return System(f"lamina strategy {strategy}", model, optimizer)

    return make


MAKERS = {
    "local": local,
    "ddp": ddp,
    "fsdp2": fsdp2(True),
    "fsdp2-keep": fsdp2(False),
    "lamina3": lamina(3),
    "lamina2": lamina(2),
    "lamina1": lamina(1),
    "lamina0": lamina(0),
}


def account(system: System, tokens: torch.Tensor) -> None:
    """Count one step's copies, wire bytes and peak."""
    before = live_bytes()
    with Meter(min_numel=1024) as meter, Ledger() as ledger:
        system.step(tokens)
    system.copied = meter.bytes_copied
    system.peak = meter.peak_live_bytes - before
    system.sent = ledger.bytes()


def run(settings: argparse.Namespace) -> list[System]:
    mesh = ParallelLayout().build("cpu")
    generator = torch.Generator().manual_seed(dist.get_rank())

    def tokens() -> torch.Tensor:
        return torch.randint(
            VOCABULARY, (settings.batch, settings.sequence + 1), generator=generator
        )

    systems = []
    for name in settings.systems:
        gc.collect()
        before = live_bytes()
        system = MAKERS[name](settings, mesh)
        for _ in range(2):
            system.step(tokens())
        gc.collect()
        system.resident = live_bytes() - before
        account(system, tokens())
        systems.append(system)
    for _ in range(settings.rounds):
        for system in systems:
            for _ in range(settings.steps):
                dist.barrier()
                begin = time.perf_counter()
                system.step(tokens())
                system.seconds.append(time.perf_counter() - begin)
    return systems


def report(systems: Sequence[System], settings: argparse.Namespace) -> None:
    base = next((s for s in systems if s.name == "torch FSDP2"), systems[0])
    other = next((s for s in systems if s.name == "torch DDP"), systems[0])
    size = sum(p.numel() for p in build(settings)[0].parameters())
    print(f"{size / 1e6:.1f}M parameters, {dist.get_world_size()} ranks, fused={settings.fused}")
    print(
        f"{'system':<24}{'step ms':>9}{'/FSDP2':>8}{'/DDP':>7}{'copied MiB':>12}"
        f"{'sent MiB':>10}{'rest MiB':>10}{'step peak MiB':>14}"
    )
    middle = {s.name: statistics.median(s.seconds) for s in systems}
    for s in systems:
        mine = middle[s.name]
        sent = f"{s.sent / 2**20:.0f}" if s.sent else "-"
        print(
            f"{s.name:<24}{1e3 * mine:>9.0f}{mine / middle[base.name]:>8.2f}"
            f"{mine / middle[other.name]:>7.2f}{s.copied / 2**20:>12.0f}{sent:>10}"
            f"{s.resident / 2**20:>10.0f}{s.peak / 2**20:>14.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--systems", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    settings = parser.parse_args()
    torch.set_num_threads(1)
    with init_distributed() as runtime:
        systems = run(settings)
        if runtime.is_main:
            report(systems, settings)


if __name__ == "__main__":
    main()
