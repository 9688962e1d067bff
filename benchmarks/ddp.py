"""Lamina's DistributedDataParallel beside torch's on a 29M-parameter GPT, 2 ranks, in turn.

    python benchmarks/ddp.py                      # loopback
    python benchmarks/ddp.py --mbit 2000          # between two network namespaces (needs root)
    python benchmarks/ddp.py --mbit 400 --optimizer fused
    python benchmarks/ddp.py --price [--mbit 2000]  # what ordered sums cost, in % of a step

Every round runs one step of each contestant, one after the other, so that a noisy neighbour hits
all of them; a contestant's step time is that of the slowest rank. Printed are the median step,
and the median over rounds of the contestant's time divided by torch DDP's. Bytes copied are
counted by `lamina_testing.Meter`, bytes sent by `lamina.collectives.Ledger` (torch DDP sends
gradients times 2 (N - 1) / N); memory is the most bytes of live tensors within a step, activations
included, seen by the meter. A second table says where a step's time goes: medians of forward,
backward and optimizer, and how long of it the main thread waited for sums (in the backward) and
for updated weights (in the optimizer or the forward), by the ledger, in steps of their own.

`--price` runs ordered and native sums alone, strategies 0 and 1, and prints the median over rounds
of the ordered step's time beside the native one's, in % of a step, with the quartiles. The aim is
5%.

Between namespaces "bound" is the longer of the step without communication and the bytes sent over
the link's speed. Messages are forced there (`use_messages`): both namespaces are on one host, whose
ranks would otherwise read each other's memory past the link.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lamina.collectives import Ledger
from lamina.collectives.engine import use_messages
from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig, ShardedOptimizer
from lamina.mesh import ParallelLayout

sys.path.insert(0, str(Path(__file__).parent.parent / "testing" / "src"))
from lamina_testing import Meter, live_storages

WIDTH, DEPTH, VOCABULARY, BATCH, LENGTH = 512, 8, 8192, 2, 128


class GPT(nn.Module):
    """29.4M parameters: 8 blocks of width 512."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length] to the mean next-token loss."""
        x = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Contestant:
    """A model and its optimizer, ready to step."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: torch.Tensor) -> tuple[float, float, float]:
        """One training step; seconds of forward, backward and optimizer."""
        marks = [time.perf_counter()]
        loss = self.model(tokens)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        return marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]


def build() -> GPT:
    """The same weights for every contestant."""
    torch.manual_seed(0)
    return GPT()


def contestants(kind: str, price: bool = False) -> list[Callable[[], Contestant]]:
    """Makers of all contestants, or of those that show the price of ordered sums."""
    how: dict[str, Any] = {"lr": 1e-4, "foreach" if kind == "foreach" else "fused": True}

    def alone() -> Contestant:
        model = build()
        return Contestant("no communication", model, torch.optim.AdamW(model.parameters(), **how))

    def torch_ddp() -> Contestant:
        model = TorchDDP(build(), gradient_as_bucket_view=True)
        return Contestant("torch DDP", model, torch.optim.AdamW(model.parameters(), **how))

    def zero() -> Contestant:
        model = TorchDDP(build(), gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, **how
        )
        return Contestant("torch DDP + ZeroRedundancyOptimizer", model, optimizer)

    def lamina(name: str, sharded: bool, **settings: Any) -> Callable[[], Contestant]:
        def make() -> Contestant:
            model = build()
            mesh = ParallelLayout().build("cpu")
            optimizer = torch.optim.AdamW(model.parameters(), **how)
            config = DistributedDataParallelConfig(
                overlap_grad_reduce=True,
                overlap_param_gather=sharded,
                use_distributed_optimizer=sharded,
                num_buckets=16,
                **settings,
            )
            wrapped = DistributedDataParallel(model, config, mesh)
            if "LAMINA_MESSAGES" in os.environ:
                for purpose in ("gather", "reduce"):
                    use_messages(mesh.axis("dp_shard_cp").sibling(purpose))
            return Contestant(name, wrapped, ShardedOptimizer(optimizer, wrapped, mesh))

        return make

    if price:
        return [
            lamina(f"lamina {int(sharded)}, {how}", sharded, reduction=how)
            for sharded in (False, True)
            for how in ("ordered", "native")
        ]
    return [
        torch_ddp,
        lamina("lamina 0, ordered", False),
        lamina("lamina 0, native", False, reduction="native"),
        lamina("lamina 1", True),
        zero,
        alone,
    ]


def rank_program(rank: int, arguments: argparse.Namespace) -> None:
    """What both ranks run; rank 0 prints what was found."""
    torch.set_num_threads(1)
    makers = contestants(arguments.optimizer, arguments.price)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    facts = {}
    for make in makers:  # each alone, so that live bytes are its own
        gc.collect()
        before = sum(live_storages().values())
        one = make()
        for _ in range(2):
            one.step(tokens)
        facts[one.name] = counted(one, tokens, before)
        del one
    made = [make() for make in makers]
    times: dict[str, list[float]] = {one.name: [] for one in made}
    parts: dict[str, list[tuple[float, float, float]]] = {one.name: [] for one in made}
    for turn in range(2 + arguments.rounds):
        for one in made:
            dist.barrier()
            begin = time.perf_counter()
            spent = one.step(tokens)
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 2:
                times[one.name].append(float(took))
                parts[one.name].append(spent)
    for one in made:
        facts[one.name] |= waited(one, tokens)
    if rank == 0:
        print(json.dumps({"times": times, "parts": parts, "facts": facts}), flush=True)


def counted(one: Contestant, tokens: torch.Tensor, before: int) -> dict[str, float]:
    """Bytes of parameter size copied, bytes sent, and most live bytes, in one step."""
    with Meter(min_numel=65536) as meter, Ledger() as ledger:
        one.step(tokens)
    return {
        "copied": meter.bytes_copied,
        "sent": sum(record.bytes for record in ledger.records),
        "peak": meter.peak_live_bytes - before,
    }


def waited(one: Contestant, tokens: torch.Tensor, steps: int = 3) -> dict[str, float]:
    """Seconds a step that this rank waited for sums of gradients, and for updated weights."""
    dist.barrier()
    with Ledger() as ledger:
        for _ in range(steps):
            one.step(tokens)
    gathers = [record.op == "all_gather_into" for record in ledger.records]
    pairs = list(zip(ledger.records, gathers, strict=True))
    return {
        "sums": sum(record.exposed for record, gather in pairs if not gather) / steps,
        "weights": sum(record.exposed for record, gather in pairs if gather) / steps,
    }


def start(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )


def report(found: dict[str, Any], title: str, mbit: int) -> None:
    """Print both tables."""
    times, facts = found["times"], found["facts"]
    base = times["torch DDP"]
    alone = statistics.median(times["no communication"])
    # torch DDP tells no ledger: its gradients go out once, as half of them and half of the sums.
    facts["torch DDP"]["sent"] = 4 * sum(p.numel() for p in build().parameters())
    print(f"\n{title}")
    print(f"| | step | / torch DDP | / bound | copied | sent | memory |\n|{' --- |' * 7}")
    for name, series in times.items():
        ratio = statistics.median(a / b for a, b in zip(series, base, strict=True))
        fact, bound, sent = facts[name], "-", "-"
        if fact["sent"]:
            sent = f"{fact['sent'] / 2**20:.0f} MiB"
            wire = 8 * fact["sent"] / (mbit * 1e6) if mbit else 0.0
            bound = f"{statistics.median(series) / max(alone, wire):.2f}" if mbit else "-"
        print(
            f"| {name} | {1e3 * statistics.median(series):.0f} ms | {ratio:.2f} | {bound} | "
            f"{fact['copied'] / 2**20:.0f} MiB | {sent} | {fact['peak'] / 2**20:.0f} MiB |"
        )
    print("\n| ms | forward | backward | optimizer | waiting for sums | for weights |")
    print(f"|{' --- |' * 6}")
    for name, series in found["parts"].items():
        medians = [statistics.median(part) for part in zip(*series, strict=True)]
        waits = [facts[name][key] for key in ("sums", "weights")]
        seen = [f"{1e3 * value:.0f}" for value in waits] if "lamina" in name else ["-", "-"]
        print(f"| {name} | " + " | ".join([*(f"{1e3 * m:.0f}" for m in medians), *seen]) + " |")


def report_price(times: dict[str, list[float]], title: str) -> None:
    """Print what an ordered sum costs, in % of a step with the backend's own."""
    print(
        f"\n{title}\n| strategy | native step | ordered, in % more | quartiles |\n|{' --- |' * 4}"
    )
    for strategy in (0, 1):
        ordered, native = (times[f"lamina {strategy}, {how}"] for how in ("ordered", "native"))
        more = [100 * (a / b - 1) for a, b in zip(ordered, native, strict=True)]
        low, middle, high = statistics.quantiles(more, n=4)
        step = f"{1e3 * statistics.median(native):.0f} ms"
        print(f"| {strategy} | {step} | {middle:+.1f}% | {low:+.1f}% to {high:+.1f}% |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=["foreach", "fused"], default="foreach")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mbit", type=int, default=0)
    parser.add_argument("--price", action="store_true", help="what ordered sums cost, alone")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        start(int(os.environ["RANK"]), 2, int(os.environ["MASTER_PORT"]))
        rank_program(int(os.environ["RANK"]), arguments)
        dist.destroy_process_group()
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    program = [sys.executable, __file__, "--rank", "--optimizer", arguments.optimizer]
    program += ["--rounds", str(arguments.rounds), *(["--price"] if arguments.price else [])]
    if arguments.mbit:
        from lamina_testing.netns import shaped_link

        with shaped_link(bits_per_second=arguments.mbit * 10**6) as link:
            outputs = link.run_ranks(program, environment={"LAMINA_MESSAGES": "1"}, timeout=900)
        text = outputs[0]
    else:
        import subprocess

        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            subprocess.Popen(
                program, env={**environment, "RANK": str(r)}, stdout=subprocess.PIPE, text=True
            )
            for r in range(2)
        ]
        text = next(output for output in [process.communicate()[0] for process in ranks] if output)
    line = next(line for line in text.splitlines() if line.startswith("{"))
    where = f"namespaces, {arguments.mbit} mbit, messages" if arguments.mbit else "loopback"
    title = f"{where}, AdamW {arguments.optimizer}, {arguments.rounds} rounds"
    found = json.loads(line)
    if arguments.price:
        report_price(found["times"], title)
    else:
        report(found, title, arguments.mbit)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
