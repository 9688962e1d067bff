"""A training step on one GPU: plain PyTorch, torch FSDP2 and Lamina in turn, in one run.

    torchrun --nproc_per_node=1 benchmarks/gpu_step.py

A world of one over NCCL shows what a wrapper costs by itself: its copies, hooks and memory. bf16
weights, the same fused AdamW on them for all three. Prints the median step, the ratio to plain
PyTorch, and the peak memory.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from lamina.fsdp import MixedPrecisionPolicy, fully_shard
from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import GPTModel, TransformerBlock, TransformerConfig

VOCABULARY = 32_000


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_layers=layers, num_heads=width // 128
    )
    with torch.device("cuda"):
        return GPTModel(config).to(torch.bfloat16)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, adamw(model)


def fsdp2(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = ParallelLayout().build("cuda")["dp_shard"]
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            torch_fully_shard(module, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)
    return model, adamw(model)


def lamina(strategy: int) -> Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]:
    def wrap(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        return fully_shard(
            model,
            adamw(model),
            device_mesh=ParallelLayout().build("cuda"),
            fsdp_unit_modules=[TransformerBlock],
            zero_dp_strategy=strategy,
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
        )

    return wrap


SYSTEMS = {"plain": plain, "fsdp2": fsdp2, "lamina 3": lamina(3), "lamina 0": lamina(0)}


def measure(system: str, layers: int, width: int, batch: int, steps: int) -> tuple[float, float]:
    """Median milliseconds of a step and peak MiB of one system, built afresh."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, optimizer = SYSTEMS[system](build(layers, width))
    times = []
    for step in range(steps + 3):
        tokens = torch.randint(VOCABULARY, (batch, 1025), device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= 3:
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    with init_distributed():
        parameters = sum(p.numel() for p in build(settings.layers, settings.width).parameters())
        print(f"{torch.cuda.get_device_name()}, {parameters / 1e6:.0f}M parameters, bf16")
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
        for _ in range(settings.rounds):
            for name in SYSTEMS:
                found[name].append(
                    measure(name, settings.layers, settings.width, settings.batch, settings.steps)
                )
        base = statistics.median(time for time, _ in found["plain"])
        print(f"{'system':<10}{'step ms':>10}{'x plain':>9}{'peak MiB':>10}{'spread':>8}")
        for name, runs in found.items():
            middle = statistics.median(time for time, _ in runs)
            spread = (max(t for t, _ in runs) - min(t for t, _ in runs)) / middle
            peak = max(memory for _, memory in runs)
            print(f"{name:<10}{middle:>10.2f}{middle / base:>9.3f}{peak:>10.0f}{spread:>8.1%}")


if __name__ == "__main__":
    main()
