"""Optimizers of other libraries over shards on two ranks, each against one process.

It is run by hand, as the libraries are in no environment of the project, and makes
docs/records/optimizers.md with `--write`:

    pip install pytorch-optimizer schedulefree lion-pytorch prodigyopt
    torchrun --nproc-per-node=2 tests/optimizers_of_others.py [NAME ...]
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lamina.ddp import full_parameters
from lamina.fsdp import fully_shard, shard_module
from lamina.mesh import init_distributed

sys.path.insert(0, str(Path(__file__).parent))
from border.case import Block, Net

RECORD = Path(__file__).parents[1] / "docs" / "records" / "optimizers.md"
STEPS, ROWS = 4, 4
LEFT_OUT = {
    "demo": "it sends messages of its own, of sizes that ranks do not agree on",
    "kron": "it draws random numbers, other ones on each rank",
}
"""Not tried, with the reason."""
FOR_ONE_TENSOR = """\
`keep_tensors_whole` is for optimizers that look at one tensor at a time. AdaGC and Adai compute
over several tensors, and Gravity draws random numbers, so they are wrong with it, without a word.
The others of their kind are refused at the next backward, because their ranks' groups differ."""
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
Wrap = Callable[[Net, Make], tuple[nn.Module, Optimizer]]


def optimizers() -> dict[str, Make]:
    """Those that take nothing but parameters and a rate, by name."""
    library = importlib.import_module("pytorch_optimizer")
    names = [name for name in library.get_supported_optimizers() if isinstance(name, str)]
    found = {name: library.load_optimizer(name) for name in names}
    free = importlib.import_module("schedulefree")
    found |= {
        f"schedulefree.{n}": getattr(free, n) for n in ("AdamWScheduleFree", "SGDScheduleFree")
    }
    found["lion_pytorch.Lion"] = importlib.import_module("lion_pytorch").Lion
    found["prodigyopt.Prodigy"] = importlib.import_module("prodigyopt").Prodigy
    return {name: lambda p, c=cls: c(p, lr=1e-2) for name, cls in sorted(found.items())}


def model() -> Net:
    """The same weights at every call, and the same generator behind them."""
    torch.manual_seed(0)
    return Net()


def by_strategy(strategy: int, whole: bool = False) -> Wrap:
    """`fully_shard` is given the optimizer."""

    def wrap(net: Net, make: Make) -> tuple[nn.Module, Optimizer]:
        settings = {"zero_dp_strategy": strategy, "fsdp_unit_modules": [Block]}
        given = make(net.parameters())
        return fully_shard(net, given, keep_tensors_whole=whole, **settings)

    return wrap


def by_module(net: Net, make: Make) -> tuple[nn.Module, Optimizer]:
    """`shard_module` is not told of the optimizer."""
    for block in net.blocks:
        shard_module(block)
    return shard_module(net), make(net.parameters())


WRAPPERS: dict[str, Wrap] = {
    "strategy 1": by_strategy(1),
    "strategy 3": by_strategy(3),
    "`shard_module`": by_module,
    "strategy 1, `keep_tensors_whole`": by_strategy(1, whole=True),
    "strategy 3, `keep_tensors_whole`": by_strategy(3, whole=True),
}


def train(net: nn.Module, optimizer: Optimizer, parts: list[slice]) -> None:
    """Steps over the mean of the losses of parts of each batch."""
    generator = torch.Generator().manual_seed(5)
    begin = getattr(optimizer, "train", None)  # schedulefree's
    if callable(begin):
        begin()
    for _ in range(STEPS):
        x, y = (torch.randn(2 * ROWS, n, generator=generator) for n in (5, 3))
        optimizer.zero_grad()
        for part in parts:
            ((net(x[part]) - y[part]).square().mean() / len(parts)).backward()
        optimizer.step()


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest of all tensors, as a part of the tensor's norm."""
    norms = (((found[n] - w).norm() / w.norm().clamp(min=1e-6)).item() for n, w in wanted.items())
    return max(norms)


def alone(make: Make) -> tuple[dict[str, Tensor], float]:
    """What one process trains, and how far it is from itself where it adds two half batches."""
    results = []
    for parts in ([slice(None)], [slice(0, ROWS), slice(ROWS, None)]):
        net = model()
        train(net, make(net.parameters()), parts)
        results.append({name: p.detach() for name, p in net.named_parameters()})
    return results[0], difference(results[1], results[0])


def judged(make: Make, wrap: Wrap, rank: int, wanted: dict[str, Tensor], allowed: float) -> str:
    """What two ranks come to: right, wrong by how much, or an error's class."""
    try:
        net, optimizer = wrap(model(), make)
        train(net, optimizer, [slice(rank * ROWS, (rank + 1) * ROWS)])
        off = difference({n: p.detach() for n, p in full_parameters(net).items()}, wanted)
        own = "right" if off < allowed else f"wrong by {off:.1e}"
    except Exception as error:
        own = type(error).__name__
    of_ranks: list[str] = ["", ""]
    dist.all_gather_object(of_ranks, own)
    return max(of_ranks, key=lambda said: said != "right")


def tried(chosen: list[str], rank: int) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What each came to under each wrapper, and why others were not tried."""
    rows: dict[str, list[str]] = {}
    left = dict(LEFT_OUT)
    for name, make in optimizers().items():
        if name in left or (chosen and name not in chosen):
            continue
        try:
            wanted, own = alone(make)
        except Exception as error:
            left[name] = f"{type(error).__name__} in one process"
            continue
        allowed = max(1e-3, 3 * own)
        rows[name] = [judged(make, wrap, rank, wanted, allowed) for wrap in WRAPPERS.values()]
        if rank == 0:
            print(name, f"({own:.0e})", *rows[name], sep="; ", flush=True)
    return rows, left


def page(rows: dict[str, list[str]], left: dict[str, str]) -> str:
    """The record: optimizers that came to the same stand together."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, said in rows.items():
        names.setdefault(tuple(said), []).append(name)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True
    )
    distributions = ("pytorch-optimizer", "schedulefree", "lion-pytorch", "prodigyopt")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in distributions)
    lines = [
        "# Optimizers of other libraries\n",
        f"`tests/optimizers_of_others.py` on {datetime.date.today()} at {commit.stdout.strip()}, "
        f"torch {torch.__version__}, two ranks over gloo: {versions}.\n",
        f"Each trains a small model for {STEPS} steps. It is right if the parameters are those of "
        "one process to 1e-3 of a tensor's norm, or to three times what one process is off from "
        "itself where it adds the gradients of two half batches. Errors are named by their class, "
        "and `NotImplementedError` names the operation and `keep_tensors_whole`.\n",
        f"| {' | '.join(WRAPPERS)} | optimizers |",
        "| --- " * (len(WRAPPERS) + 1) + "|",
    ]
    for said, those in sorted(names.items(), key=lambda pair: -len(pair[1])):
        cells = " | ".join(f"`{word}`" if word.endswith("Error") else word for word in said)
        lines.append(f"| {cells} | {len(those)}: {', '.join(those)} |")
    lines += ["", FOR_ONE_TENSOR]
    lines += ["", "Not tried:", "", *(f"- {name}: {why}." for name, why in sorted(left.items()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try them, and print or write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    words = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with init_distributed("gloo") as runtime:
        rows, left = tried(words.names, runtime.rank)
        if runtime.is_main and words.write:
            RECORD.write_text(page(rows, left))


if __name__ == "__main__":
    main()
