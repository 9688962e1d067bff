"""Lamina's collectives beside torch's own, per backend, number of ranks and size.

    python benchmarks/collectives.py                        # gloo on CPU, 2 and 4 ranks
    python benchmarks/collectives.py --backend nccl         # one rank per GPU
    python benchmarks/collectives.py --mbit 2000 --hosts 4 --ranks 2    # namespaces (needs root)

Every repetition runs all contestants one after the other, so that a noisy neighbour hits all of
them; a contestant makes several calls in a row if they are short, and its time is that of the
slowest rank, divided by the calls. Printed are medians, and the median over repetitions of torch's
time divided by ours. "and norm": ours yields the squared norm, torch's does not. "messages only"
is what ranks of different hosts get (`use_messages`).

With `--mbit` hosts are network namespaces, each with a link of that speed. Ours then adds up the
ranks of a host first, and "one exchange" does not. After the table it says whether both have the
bits of the sum of one process, and how many bytes each sends to other hosts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lamina.collectives import Ledger, all_gather_into, all_reduce_fp32, reduce_scatter_fp32
from lamina.collectives.compat import all_gather_single, reduce_scatter_single
from lamina.collectives.engine import use_messages
from lamina.collectives.reduction.summation import reference_sum
from lamina.mesh import init_distributed, make_host_groups
from lamina.mesh.engine import environment
from lamina_testing.netns import shaped_link

Contest = tuple[str, Callable[[], object], dict[str, Callable[[], object]]]


def contests(
    numel: int, dtype: torch.dtype, device: torch.device, groups: dict[str, dist.ProcessGroup]
) -> list[Contest]:
    """Operation, torch's way and ours (by the route that Lamina takes itself, and by messages)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    piece = numel // world
    buffer = torch.randn(numel, device=device).to(dtype)
    shard, shard32 = buffer[:piece].clone(), torch.zeros(piece, device=device)
    torch_out, whole, whole32 = shard.clone(), buffer.clone(), torch.zeros(numel, device=device)
    own = whole[rank * piece : (rank + 1) * piece]

    def ours(function: Callable[[dist.ProcessGroup], object]) -> dict[str, Callable[[], object]]:
        return {name: (lambda g=g: function(g)) for name, g in groups.items()}

    def torch_all_reduce() -> None:
        dist.all_reduce(whole, group=group)

    return [
        (
            "reduce-scatter",
            lambda: reduce_scatter_single(torch_out, buffer, group=group),
            ours(lambda g: reduce_scatter_fp32(shard32, buffer, g, statistics=False)),
        ),
        (
            "reduce-scatter and norm",
            lambda: reduce_scatter_single(torch_out, buffer, group=group),
            ours(lambda g: reduce_scatter_fp32(shard32, buffer, g)),
        ),
        (
            "all-gather",
            lambda: all_gather_single(whole, shard, group=group),
            ours(lambda g: all_gather_into(whole, shard, g)),
        ),
        (
            "all-gather in place",
            lambda: all_gather_single(whole, own, group=group),
            ours(lambda g: all_gather_into(whole, own, g)),
        ),
        (
            "all-reduce",
            torch_all_reduce,
            ours(lambda g: all_reduce_fp32(whole32, buffer, g, statistics=False)),
        ),
    ]


def measure(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Milliseconds of the slowest rank, per call."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    slowest = torch.tensor((time.perf_counter() - begin) * 1e3 / calls, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def rank_main(rank: int, world: int, path: str, options: argparse.Namespace) -> None:
    """Program of one rank."""
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if options.mbit:
        init_distributed(device="cpu")
    else:
        dist.init_process_group(
            options.backend, init_method=f"file://{path}", rank=rank, world_size=world
        )
    assert dist.group.WORLD is not None
    groups = {"ours": dist.group.WORLD}
    make_host_groups(groups["ours"])
    if options.mbit:
        groups["one exchange"] = dist.new_group()  # without groups over hosts
    elif options.backend == "gloo":
        groups["messages"] = dist.new_group()
        use_messages(groups["messages"])
    dtype = getattr(torch, options.dtype)
    for mib in options.mib:
        numel = mib * 2**20 // dtype.itemsize // world * world
        for name, theirs, ours in contests(numel, dtype, device, groups):
            times: dict[str, list[float]] = {key: [] for key in ("torch", *ours)}
            for repetition in range(options.repeat + 2):
                for key, run in (("torch", theirs), *ours.items()):
                    spent = measure(run, device, max(1, 16 // mib))
                    if repetition >= 2:
                        times[key].append(spent)
            if rank == 0:
                print_row(options, world, mib, name, times)
    if options.mbit:
        compare(groups, dtype, options.mib[-1])
    dist.destroy_process_group()


def compare(groups: dict[str, dist.ProcessGroup], dtype: torch.dtype, mib: int) -> None:
    """Whether each group's sum has the bits of one process, and what it sends to other hosts."""
    world, rank = dist.get_world_size(), dist.get_rank()
    piece = mib * 2**20 // dtype.itemsize // world
    inputs = [
        torch.randn(world * piece, generator=torch.Generator().manual_seed(each)).to(dtype)
        for each in range(world)
    ]
    expected, output = torch.empty(piece), torch.empty(piece)
    own = slice(rank * piece, (rank + 1) * piece)
    reference_sum([each[own] for each in inputs], expected)
    for name, group in groups.items():
        with Ledger() as ledger:
            reduce_scatter_fp32(output, inputs[rank], group)
        same = torch.tensor(int(torch.equal(output, expected)))
        dist.all_reduce(same, op=dist.ReduceOp.MIN)
        if rank == 0:
            sent = ledger.bytes(between_hosts=True)
            print(f"{name}: bits of one process: {bool(same)}; to other hosts: {sent:,} bytes")


def print_row(
    options: argparse.Namespace, world: int, mib: int, name: str, times: dict[str, list[float]]
) -> None:
    """One line of the table: medians in ms, and ratios to torch."""
    cells = [options.backend, str(world), f"{mib} MiB", name]
    cells.append(f"{statistics.median(times['torch']):.2f}")
    for key in times:
        if key != "torch":
            ratio = statistics.median(
                theirs / ours for theirs, ours in zip(times["torch"], times[key], strict=True)
            )
            cells += [f"{statistics.median(times[key]):.2f}", f"{ratio:.1f}x"]
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Parse, start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 12, 48])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank (CPU)")
    parser.add_argument("--mbit", type=int, default=0, help="between network namespaces")
    parser.add_argument("--hosts", type=int, default=2, help="with --mbit; --ranks are of a host")
    parser.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.joined:
        env = environment()
        rank, world = (env.integer(name, minimum=0) for name in ("RANK", "WORLD_SIZE"))
        rank_main(rank or 0, world or 1, "", options)
        return
    worlds = options.ranks or ([2, 4] if options.backend == "gloo" else [torch.cuda.device_count()])
    print(f"torch {torch.__version__}, wire {options.dtype}; buffers of N MiB per rank; ms, median")
    heads = ["backend", "ranks", "buffer", "operation", "torch", "ours", "ratio"]
    if options.mbit:
        heads += ["one exchange", "ratio"]
    elif options.backend == "gloo":
        heads += ["ours, messages only", "ratio"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads), flush=True)
    if options.mbit:
        with shaped_link(bits_per_second=options.mbit * 10**6, namespaces=options.hosts) as link:
            program = [sys.executable, *sys.argv, "--joined"]
            per_host = (options.ranks or [2])[0]
            print(link.run_ranks(program, ranks_per_namespace=per_host, timeout=3600)[0], end="")
        return
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "rendezvous")
            mp.spawn(rank_main, args=(world, path, options), nprocs=world)


if __name__ == "__main__":
    main()
