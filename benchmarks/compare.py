"""Lamina beside torch DDP, FSDP2, DeepSpeed and plain PyTorch: one plain model, one table.

    python benchmarks/compare.py [--ranks 2] [--rounds 4] [--fused]
    python benchmarks/compare.py --mbit 2000   # between two network namespaces (needs root)

The model is torch's own `nn.TransformerEncoderLayer`s between an embedding and a head, and knows
nothing of any system. All systems start from the same values and see the same tokens. They are
built in the same processes and take turns, so a noisy machine hits all alike: read ratios.

- step: median over rounds of the slowest rank, divided by torch DDP's and by FSDP2's.
- peak: bytes of storages that operators make in one step, and what lies at rest.
- sent: bytes that a rank sends in one step, from Lamina's ledger or the operators torch calls.
- difference: the largest of any parameter after 10 steps, from plain PyTorch in one process that
  runs all ranks' batches one after the other, adds their gradients and steps.

DeepSpeed takes part where it is installed. With 2 ranks every order of two summands is the same
one, so differences show with 3 ranks and more.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from fsdp import Sent
from local_ranks import start_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lamina.collectives import Ledger
from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, ParallelMesh, init_distributed

sys.path.insert(0, str(Path(__file__).parent.parent / "testing" / "src"))
from lamina_testing import Meter, live_bytes
from lamina_testing.netns import shaped_link

VOCABULARY, BATCH = 4096, 2
COMPARED_AFTER = 10  # steps


class PlainGPT(nn.Module):
    """A decoder out of torch's own layers."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@dataclass
class System:
    """One wrapped model."""

    name: str
    model: nn.Module
    step: Callable[[torch.Tensor], None]
    whole: Callable[[], Mapping[str, torch.Tensor]]
    seconds: list[float] = field(default_factory=list)
    resident: int = 0
    peak: int = 0
    sent: int = 0
    difference: float = float("nan")


def build(settings: argparse.Namespace) -> tuple[PlainGPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = PlainGPT(settings.layers, settings.width, settings.length)
    return model, adamw(model, settings)


def adamw(model: nn.Module, settings: argparse.Namespace) -> torch.optim.Optimizer:
    how = {"fused": True} if settings.fused else {"foreach": True}
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **how)


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    """The user's loop, the same for all but DeepSpeed."""

    def step(text: torch.Tensor) -> None:
        model(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
    model, optimizer = build(settings)
    step = stepping(model, optimizer)
    return System("plain PyTorch, no communication", model, step, lambda: named(model))


def ddp(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
    model, optimizer = build(settings)
    wrapped = TorchDDP(model)
    return System("torch DDP", wrapped, stepping(wrapped, optimizer), lambda: named(model))


def fsdp2(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
    model, _ = build(settings)
    for block in model.blocks:
        torch_fully_shard(block, mesh=mesh["dp_shard"])
    torch_fully_shard(model, mesh=mesh["dp_shard"])

    def whole() -> Mapping[str, torch.Tensor]:
        return {name: one.full_tensor() for name, one in model.named_parameters()}

    return System("torch FSDP2", model, stepping(model, adamw(model, settings)), whole)


def lamina(strategy: int) -> Callable[[argparse.Namespace, ParallelMesh], System]:
    def make(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
        model, optimizer = fully_shard(
            *build(settings), device_mesh=mesh, zero_dp_strategy=strategy
        )
        step = stepping(model, optimizer)
        return System(f"Lamina, strategy {strategy}", model, step, lambda: full_parameters(model))

    return make


def deepspeed(stage: int) -> Callable[[argparse.Namespace, ParallelMesh], System]:
    def make(settings: argparse.Namespace, mesh: ParallelMesh) -> System:
        import deepspeed as peer

        model, optimizer = build(settings)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # none, as in the other loops; left out, it is 1.0
        }
        engine, *_ = peer.initialize(model=model, optimizer=optimizer, config=config)

        def step(text: torch.Tensor) -> None:
            engine.backward(engine(text[:, :-1], text[:, 1:]))
            engine.step()

        def whole() -> Mapping[str, torch.Tensor]:
            with peer.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
                return {name: one.detach().clone() for name, one in model.named_parameters()}

        return System(f"DeepSpeed, ZeRO-{stage}", engine, step, whole)

    return make


MAKERS = {
    "plain": alone,
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{f"lamina{strategy}": lamina(strategy) for strategy in range(4)},
}
if importlib.util.find_spec("deepspeed") is not None:
    MAKERS |= {f"deepspeed{stage}": deepspeed(stage) for stage in range(4)}


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in model.named_parameters()}


def tokens(step: int, rank: int, settings: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, settings.length + 1), generator=generator)


def one_process(settings: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The parameters after COMPARED_AFTER steps of plain PyTorch on all ranks' batches."""
    model, optimizer = build(settings)
    ranks = dist.get_world_size()
    for number in range(COMPARED_AFTER):
        for rank in range(ranks):
            text = tokens(number, rank, settings)
            model(text[:, :-1], text[:, 1:]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / ranks)
        optimizer.step()
        optimizer.zero_grad()
    return named(model)


def measure(
    system: System, wanted: Mapping[str, torch.Tensor], before: int, settings: argparse.Namespace
) -> None:
    """Make the steps that are compared, and count one step's bytes."""
    for number in range(COMPARED_AFTER):
        system.step(tokens(number, dist.get_rank(), settings))
    found = {name: one.detach() for name, one in system.whole().items()}
    system.difference = max(float((found[name] - one).abs().max()) for name, one in wanted.items())
    del found
    gc.collect()
    system.resident = live_bytes() - before
    at_rest = live_bytes()
    with Sent() as others, Meter(min_numel=1024) as meter, Ledger() as ledger:
        system.step(tokens(COMPARED_AFTER, dist.get_rank(), settings))
    system.peak = system.resident + meter.peak_live_bytes - at_rest
    system.sent = ledger.bytes() or int(others.bytes)


def run(settings: argparse.Namespace) -> list[System]:
    mesh, wanted = ParallelLayout().build("cpu"), one_process(settings)
    systems = []
    for name in settings.systems:
        gc.collect()
        before = live_bytes()
        system = MAKERS[name](settings, mesh)
        measure(system, wanted, before, settings)
        systems.append(system)
    for number in range(settings.rounds):
        for system in systems:
            dist.barrier()
            text = tokens(100 + number, dist.get_rank(), settings)
            begin = time.perf_counter()
            system.step(text)
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)  # the slowest rank's
            system.seconds.append(float(took))
    return systems


def table(systems: list[System], settings: argparse.Namespace) -> str:
    times = {one.name: statistics.median(one.seconds) for one in systems}
    size = sum(one.numel() for one in build(settings)[0].parameters())
    lines = [
        f"{size / 1e6:.1f}M parameters, {dist.get_world_size()} ranks of one thread (gloo), "
        f"{f'{settings.mbit} mbit' if settings.mbit else 'loopback'}, fp32, "
        f"AdamW {'fused' if settings.fused else 'foreach'}, {BATCH} x {settings.length} tokens "
        f"per rank, {settings.rounds} rounds, torch {torch.__version__}",
        "",
        "| system | step | / torch DDP | / FSDP2 | at rest, MiB | peak, MiB | sent, MiB | "
        "difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in systems:
        took = times[one.name]
        peers = [times.get(name, math.nan) for name in ("torch DDP", "torch FSDP2")]
        mebibytes = [f"{value / 2**20:.0f}" for value in (one.resident, one.peak, one.sent)]
        plain = one.name.startswith("plain")  # it trains on its own batches
        lines.append(
            f"| {one.name} | {1e3 * took:.0f} ms | "
            f"{' | '.join(f'{took / peer:.2f}' for peer in peers)} | "
            f"{' | '.join(mebibytes)} | {'-' if plain else format(one.difference, '.1e')} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--systems", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    settings = parser.parse_args()
    if "RANK" not in os.environ and settings.mbit:
        with shaped_link(bits_per_second=settings.mbit * 10**6) as link:
            program = [sys.executable, __file__, *sys.argv[1:]]
            print(link.run_ranks(program, environment={"OMP_NUM_THREADS": "1"}, timeout=900)[0])
        return
    if "RANK" not in os.environ:
        start_ranks(settings.ranks, __file__, sys.argv[1:])
        return
    torch.set_num_threads(1)
    with init_distributed() as runtime:
        systems = run(settings)
        if runtime.is_main:
            print(table(systems, settings))


if __name__ == "__main__":
    main()
