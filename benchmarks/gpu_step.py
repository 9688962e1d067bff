"""A training step on one GPU: plain PyTorch, torch FSDP2, Lamina and Megatron-FSDP in one run.

    python benchmarks/gpu_step.py                       # a world of one, over NCCL
    python benchmarks/gpu_step.py --ranks 8 --gbyte 50  # rank 0 of 8 that are simulated
    python benchmarks/gpu_step.py --device cpu --layers 2 --width 128 --batch 1  # a dry run

A world of one shows what a wrapper costs by itself: its copies, hooks and memory. A simulated group
(see simulated_group.py) has the shapes, memory and overlap of one of many ranks. bf16 weights and
the same fused AdamW for all. Systems take turns; prints each one's median step, ratio to plain
PyTorch, bytes that were copied between tensors of parameters' size (no copies: Lamina's aim where
its layers write gradients themselves), bytes sent, peak memory, and whether the aims are met.
`megatron-fsdp` takes part in a world of one where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from simulated_group import SimulatedNetwork, simulated_world
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, TransformerBlock, TransformerConfig
from lamina_testing import Meter

VOCABULARY = 32_000
Wrapped = tuple[nn.Module, torch.optim.Optimizer]


def build(settings: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        num_layers=settings.layers,
        num_heads=max(settings.width // 128, 1),
    )
    with torch.device(settings.device):
        return GPTModel(config).to(torch.bfloat16)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(model: nn.Module, kind: str) -> Wrapped:
    return model, adamw(model)


def fsdp2(model: nn.Module, kind: str) -> Wrapped:
    mesh = ParallelLayout().build(kind)["dp_shard"]
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            torch_fully_shard(module, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model, adamw(model)


def lamina(strategy: int, reduction: str = "ordered") -> Callable[[nn.Module, str], Wrapped]:
    def wrap(model: nn.Module, kind: str) -> Wrapped:
        return fully_shard(
            model,
            adamw(model),
            device_mesh=ParallelLayout().build(kind),
            fsdp_unit_modules=[TransformerBlock],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
            reduction=reduction,
        )

    return wrap


def megatron(model: nn.Module, kind: str) -> Wrapped:
    import megatron_fsdp
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(kind, (1, 1), mesh_dim_names=("dp", "tp"))
    return megatron_fsdp.fully_shard(
        model,
        adamw(model),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",  # it looks for one where there is none
        fsdp_unit_modules=[TransformerBlock],
        zero_dp_strategy=3,
    )


SYSTEMS: dict[str, Callable[[nn.Module, str], Wrapped]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "lamina 3": lamina(3),
    "lamina 3, native": lamina(3, "native"),
    "lamina 0": lamina(0),
    "megatron-fsdp": megatron,
}


@dataclass
class Found:
    """What one system was measured to do, over all rounds."""

    steps: list[float] = field(default_factory=list)
    peak: float = 0.0
    copied: float = 0.0
    sent: float = 0.0

    @property
    def step(self) -> float:
        return statistics.median(self.steps)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(
    name: str, settings: argparse.Namespace, network: SimulatedNetwork | None, found: Found
) -> None:
    """Some steps of one system, built afresh; times, then copies in a step apart."""
    gc.collect()
    cuda = settings.device == "cuda"
    before = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model, optimizer = SYSTEMS[name](build(settings), settings.device)
    shape = (settings.batch, settings.sequence + 1)
    for number in range(settings.steps + settings.warmup):
        tokens = torch.randint(VOCABULARY, shape, device=settings.device)
        synchronize(settings.device)
        begin, sent = time.perf_counter(), network.sent if network else 0
        one_step(model, optimizer, tokens)
        synchronize(settings.device)
        if number >= settings.warmup:
            found.steps.append(1e3 * (time.perf_counter() - begin))
            found.sent = ((network.sent if network else 0) - sent) / 2**20
    if cuda:
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        found.peak = max(found.peak, peak)
    with Meter(min_numel=settings.width * settings.width) as meter:
        one_step(model, optimizer, tokens)
    found.copied = meter.bytes_copied / 2**20


def report(found: dict[str, Found], settings: argparse.Namespace) -> None:
    base = found["plain"]
    heads = ["system", "step ms", "/ plain", "/ bound", "copied MiB", "sent MiB", "peak MiB"]
    print("| " + " | ".join([*heads, "spread"]) + " |\n|" + " --- |" * (len(heads) + 1))
    for name, one in found.items():
        wire = one.sent * 2**20 / (settings.gbyte * 1e9) * 1e3 if settings.ranks > 1 else 0.0
        spread = (max(one.steps) - min(one.steps)) / one.step
        cells = [f"{one.step:.2f}", f"{one.step / base.step:.3f}"]
        cells += [f"{one.step / max(base.step, wire):.3f}", f"{one.copied:.1f}"]
        cells += [f"{one.sent:.1f}", f"{one.peak:.0f}", f"{spread:.1%}"]
        print(f"| {name} | {' | '.join(cells)} |")
    ours, peer = found["lamina 3"], found["fsdp2"]
    extra = ours.copied - base.copied
    aims = {"peak at most FSDP2's": ours.peak <= peer.peak, "no copies": extra <= 0}
    if settings.ranks == 1:
        aims["overhead over plain PyTorch under 2%"] = ours.step <= 1.02 * base.step
    else:
        wire = ours.sent * 2**20 / (settings.gbyte * 1e9) * 1e3
        price = ours.step / found["lamina 3, native"].step - 1
        print(f"ordered sums cost {price:.1%} of a step with native ones")
        aims["ordered sums cost at most 5% of a step"] = price <= 0.05
        aims["step at most FSDP2's"] = ours.step <= peer.step
        aims["within 1.15 of max(compute, wire)"] = ours.step <= 1.15 * max(base.step, wire)
    for aim, met in aims.items():
        print(f"{'met' if met else 'MISSED':<8}{aim}")


@contextlib.contextmanager
def world(settings: argparse.Namespace) -> Iterator[SimulatedNetwork | None]:
    """A world of one over the real backend, or rank 0 of a simulated one."""
    if settings.ranks > 1:
        device = torch.device(settings.device)
        with simulated_world(settings.ranks, settings.gbyte, device) as network:
            yield network
    else:
        with init_distributed(device=settings.device):
            yield None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of the simulated group; 1: NCCL")
    parser.add_argument("--gbyte", type=float, default=50.0, help="10^9 bytes a second and rank")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    settings = parser.parse_args()
    names = list(SYSTEMS)
    if settings.ranks > 1 or not importlib.util.find_spec("megatron_fsdp"):
        names.remove("megatron-fsdp")
    if settings.ranks == 1:  # nothing is summed over ranks
        names.remove("lamina 3, native")
    with world(settings) as network:
        parameters = sum(p.numel() for p in build(settings).parameters())
        place = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU (dry run)"
        group = (
            f"{settings.ranks} simulated ranks at {settings.gbyte:g} GB/s" if network else "NCCL"
        )
        print(
            f"{place}, {parameters / 1e6:.0f}M parameters, bf16, {group}, torch {torch.__version__}"
        )
        found = {name: Found() for name in names}
        for _ in range(settings.rounds):
            for name in names:
                measure(name, settings, network, found[name])
        report(found, settings)


if __name__ == "__main__":
    main()
