"""A layer of experts beside a loop over experts and transformers' Mixtral block.

    torchrun --nproc-per-node=2 benchmarks/moe.py [--hidden 256 --inner 512 --experts 8]
    torchrun --nproc-per-node=1 benchmarks/moe.py --device cuda --dtype bfloat16 --tokens 8192

Route, dispatch, experts and combine, forward and backward, of this rank's tokens. All systems take
turns in one process, so trust the ratios. "Balanced" tokens are drawn at random; "skewed" ones
send most copies to the first two experts. Systems with ``ep`` hold 1/ranks of the experts and send
tokens; the others hold all of them. Lamina's layer over one rank and over all take the same tokens.
transformers' block takes part twice, with its loop over experts and with the ``grouped_mm`` that
its models take by default; ratios are to the faster of the two. Tables begin with what the routing
came to (the busiest expert's load over the mean; 1 is balanced). On a machine with other work to do
wall times say little: then read the columns of processor time, this rank's over all its threads. On
a GPU times are those of the device, waited for after each step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lamina.mesh import ParallelLayout, init_distributed
from lamina.models import MoEConfig, MoELayer, TransformerConfig

Step = Callable[[Tensor], None]
PEER = "transformers Mixtral"


class PlainLoop(nn.Module):
    """What one writes first: for each expert, its tokens."""

    def __init__(self, experts: int, hidden: int, inner: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Parameter(torch.randn(experts, hidden) * 0.02)
        self.up = nn.ParameterList(torch.randn(2 * inner, hidden) * 0.02 for _ in range(experts))
        self.down = nn.ParameterList(torch.randn(hidden, inner) * 0.02 for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.router).softmax(-1)
        weights, chosen = scores.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(chosen == expert)
            gate, inner = F.linear(x[token], up).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * inner, down)
            out = out.index_add(0, token, result * weights[token, place, None])
        return out


def systems(settings: argparse.Namespace, world: int) -> dict[str, nn.Module]:
    """Every contestant, whole or over the ranks."""
    torch.manual_seed(0)
    moe = MoEConfig(num_experts=settings.experts, top_k=2, ffn_size=settings.inner)
    config = TransformerConfig(
        vocab_size=8, hidden_size=settings.hidden, num_layers=1, num_heads=1, moe=moe
    )

    # grouped_mm has no kernel for float32 on CUDA: there the loop runs under both names.
    grouped = "auto" if settings.device == "cuda" and settings.dtype == "float32" else "grouped"

    def lamina(mesh: object = None, **changes: object) -> MoELayer:
        changed = MoEConfig(**{**vars(moe), **changes})  # type: ignore[arg-type]
        whole = TransformerConfig(**{**vars(config), "moe": changed})
        return MoELayer(whole, mesh)  # type: ignore[arg-type]

    found: dict[str, nn.Module] = {
        "loop over experts": PlainLoop(settings.experts, settings.hidden, settings.inner, 2),
        "lamina, grouped": lamina(experts=grouped),
        "lamina, loop": lamina(experts="loop"),
        "lamina, padded": lamina(capacity_factor=1.25, pad_to_capacity=True),
    }
    for path in ("eager", "grouped_mm"):
        block = mixtral(settings, path)
        if block is not None:
            found[f"{PEER}, {path}"] = block
    if world > 1:
        mesh = ParallelLayout(ep=world).build(settings.device)
        found[f"lamina, ep {world}"] = lamina(mesh)
        found[f"lamina, ep {world}, all_gather"] = lamina(mesh, dispatcher="all_gather")
        padded = {"capacity_factor": 1.25, "pad_to_capacity": True}
        found[f"lamina, ep {world}, padded"] = lamina(mesh, **padded)
    place = {"device": settings.device, "dtype": getattr(torch, settings.dtype)}
    return {name: module.to(**place) for name, module in found.items()}


def mixtral(settings: argparse.Namespace, path: str) -> nn.Module | None:
    """The block of transformers, if it is installed; a block by itself chooses no path."""
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return None
    config = MixtralConfig(
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_local_experts=settings.experts,
        num_experts_per_tok=2,
        experts_implementation=path,
    )
    block: nn.Module = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    return block


def step_of(module: nn.Module) -> Step:
    """Forward and backward on [tokens, hidden]."""
    batched = "Mixtral" in type(module).__name__

    def step(x: Tensor) -> None:
        x = x.requires_grad_()
        out = module(x[None])[0] if batched else module(x)
        out.backward(out.detach())
        module.zero_grad()

    return step


def route(module: nn.Module, skew: bool) -> None:
    """Make the first element of a token, which is 1, prefer the first two experts, or none."""
    routers = [p for n, p in module.named_parameters() if "router" in n or "gate.weight" in n]
    with torch.no_grad():
        for weight in routers:
            weight[:, 0] = 0.0
            if skew:
                weight[:2, 0] = 1.0


def measure(
    steps: Mapping[str, Step], tokens: Tensor, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of a step, by the clock and by the processor, all in turn."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for index in range(rounds + 2):
        for name, step in steps.items():
            x = tokens.clone()
            finish(tokens)
            if dist.is_initialized():
                dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            step(x)
            finish(tokens)
            if index >= 2:
                spent = time.perf_counter() - begin, time.process_time() - used
                seconds[name].append(spent)
    return {
        name: (statistics.median(s[0] for s in each), statistics.median(s[1] for s in each))
        for name, each in seconds.items()
    }


def finish(tokens: Tensor) -> None:
    """Wait for the device."""
    if tokens.is_cuda:
        torch.cuda.synchronize()


@torch.no_grad()
def imbalance(loop: nn.Module, tokens: Tensor, experts: int) -> float:
    """The busiest expert's load over the mean, on this rank, by the first system's router."""
    chosen = F.linear(tokens, loop.get_parameter("router")).topk(2).indices
    loads = torch.bincount(chosen.flatten(), minlength=experts).double()
    return float(loads.max() / loads.mean())


def main() -> None:
    """Print a table for balanced and one for skewed tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {
        "hidden": 256,
        "inner": 512,
        "experts": 8,
        "tokens": 1024,
        "rounds": 9,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    settings = parser.parse_args()
    with init_distributed(device="cpu" if settings.device == "cpu" else None) as runtime:
        modules = systems(settings, runtime.world_size)
        torch.manual_seed(runtime.rank)
        tokens = torch.randn(settings.tokens, settings.hidden)
        tokens[:, 0] = 1.0
        tokens = tokens.to(runtime.device, getattr(torch, settings.dtype))
        for kind in ("balanced", "skewed"):
            for module in modules.values():
                route(module, kind == "skewed")
            found = measure({n: step_of(m) for n, m in modules.items()}, tokens, settings.rounds)
            if runtime.is_main:
                peers = [spent for name, spent in found.items() if name.startswith(PEER)]
                peer = min(peers, default=(float("nan"),) * 2)
                busiest = imbalance(modules["loop over experts"], tokens, settings.experts)
                title = f"{kind}, busiest expert {busiest:.2f} of the mean"
                report(title, found, next(iter(found.values())), peer)


def report(
    kind: str,
    found: Mapping[str, tuple[float, float]],
    loop: tuple[float, float],
    peer: tuple[float, float],
) -> None:
    """Print a table in Markdown."""
    print(f"\n{kind}\n| system | ms | / loop | / transformers | CPU ms | / loop | / transformers |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, spent in found.items():
        cells = [
            f"{1e3 * value:.1f} | {value / first:.2f} | {value / other:.2f}"
            for value, first, other in zip(spent, loop, peer, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
