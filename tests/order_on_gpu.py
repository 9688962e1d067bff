"""Records training steps on a CPU and on a GPU, and tells how their orders of streams differ.

    python tests/order_on_gpu.py                # the default scenarios; or their names
    python tests/order_on_gpu.py --stand-in     # what acts as CUDA takes the place of the GPU
    python3 noxfile.py -s virtual-gpu -- order --write order.json    # the virtual GPU's graphs
    python tests/order_on_gpu.py --beside order.json                 # on a GPU: those too

The GPU's own streams, events and autograd are recorded there (`lamina_testing.order`), for one of
four simulated ranks. Three things are told of each scenario: races on the GPU, what the order of
one device has and that of the other lacks, and which kernels differ. A race is a failure. The
others are for people to read, and so is how a virtual GPU's order differs. A GPU has other kernels
than a CPU, which allocate and free elsewhere; autograd waits there only where it must; and facts
that hosts agree on do not pass it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import order_scenarios as scenarios

from lamina_testing.order_graphs import OrderGraph, differences, other_kernels
from lamina_testing.recording import Recording

DEVICES = ("the CPU", "the GPU")
SCENARIOS = (
    "strategy 0", "strategy 1", "strategy 2", "strategy 3", "HSDP", "HFSDP", "slots", "bf16",
    "native sums", "reproducible sums", "sums in slices", "a stream of its own",
    "DDP, a branch beside a stream of its own", "a backward on another stream",
    "recomputation, a block used twice", "two forwards before their backwards", "DDP",
    "DDP, sharded optimizer", "dropped handles", "offload", "offload, one rank",
    "offloaded activations", "staged checkpoint", "tp 2", "1f1b, first stage",
)  # fmt: skip
MOST = 12  # lines of a kind that are shown of a scenario


@dataclass
class Comparison:
    """What is said of a scenario: failures, and differences of order and of kernels."""

    failures: list[str]
    order: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)


def compare(name: str, first: Recording, second: Recording) -> Comparison:
    """Compare a scenario's two recordings, and print a row about them."""
    graphs = OrderGraph.of(first), OrderGraph.of(second)
    compared = Comparison([f"race: {race}" for race in second.races])
    compared.order = [*dict.fromkeys(second.surprises), *differences(*graphs, DEVICES)]
    compared.kernels = other_kernels(*graphs, DEVICES)
    nodes = first.history.nodes, second.history.nodes
    counts = [len(second.races), len(compared.order), len(compared.kernels)]
    print("|", " | ".join(map(str, [name, *nodes, *counts])), "|")
    return compared


def record_all(names: Sequence[str], device: str) -> dict[str, Recording | Exception]:
    """Record scenarios; one that raises leaves the others."""
    found: dict[str, Recording | Exception] = {}
    for name in names:
        try:
            found[name] = scenarios.record(name, device=device)
        except Exception as error:
            found[name] = error
        gc.collect()
    return found


def show(title: str, lines: Sequence[str]) -> None:
    """Print some lines of many."""
    if lines:
        print(f"\n{title}")
        print(*(f"  {line}" for line in lines[:MOST]), sep="\n")
        if len(lines) > MOST:
            print(f"  and {len(lines) - MOST} more")


def write(path: Path, recordings: Mapping[str, Recording | Exception]) -> int:
    """Write the graphs of recordings; return 1 if a scenario raised."""
    graphs = {
        name: OrderGraph.of(each).as_json()
        for name, each in recordings.items()
        if isinstance(each, Recording)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(graphs))
    raised = {name: each for name, each in recordings.items() if name not in graphs}
    print(
        f"wrote {len(graphs)} graphs to {path}", *(f"{n} raised {e!r}" for n, e in raised.items())
    )
    return int(bool(raised))


def beside(path: Path, recordings: Mapping[str, Recording | Exception]) -> dict[str, list[str]]:
    """Return how the order of each scenario differs from that in a file of a virtual GPU."""
    if not path.exists():
        print(
            f"no graph of a virtual GPU in {path}: where no GPU is, "
            f"python3 noxfile.py -s virtual-gpu -- order --write {path}"
        )
        return {}
    graphs = json.loads(path.read_text())
    return {
        name: differences(
            OrderGraph.from_json(graphs[name]), OrderGraph.of(each), ("the virtual GPU", "this GPU")
        )
        for name, each in recordings.items()
        if isinstance(each, Recording) and name in graphs
    }


def main(words: Sequence[str]) -> int:
    """Print the table and the differences; return 1 if a scenario raised or has a race."""
    parser = argparse.ArgumentParser(description="compare the order of streams on CPU and GPU")
    parser.add_argument("names", nargs="*", help="scenarios of tests/order_scenarios.py")
    parser.add_argument("--stand-in", action="store_true", help="needs no GPU")
    parser.add_argument("--write", type=Path, help="write this GPU's graphs, and compare nothing")
    parser.add_argument("--beside", type=Path, help="graphs that a virtual GPU has written")
    options = parser.parse_args(words)
    names = options.names or SCENARIOS
    if options.write:
        return write(options.write, record_all(names, "cuda"))
    on_cpu = record_all(names, "cpu")  # before CUDA is initialised
    on_gpu = record_all(names, "cpu" if options.stand_in else "cuda")
    print("| scenario | nodes, CPU | nodes, GPU | races | order | kernels |")
    print("| --- | --- | --- | --- | --- | --- |")
    said: dict[str, Comparison] = {}
    for name in names:
        first, second = on_cpu[name], on_gpu[name]
        if isinstance(first, Exception) or isinstance(second, Exception):
            pair = zip(DEVICES, (first, second), strict=True)
            raised = [f"{where} raised {e!r}" for where, e in pair if isinstance(e, Exception)]
            said[name] = Comparison(raised)
            print(f"| {name} | raised | | | | |")
        else:
            said[name] = compare(name, first, second)
    apart = beside(options.beside, on_gpu) if options.beside else {}
    if apart:
        alike = sum(not lines for lines in apart.values())
        print(f"{alike} of {len(apart)} scenarios have the order of the virtual GPU")
    for name, compared in said.items():
        show(f"{name}: failures", compared.failures)
        show(f"{name}: order", compared.order)
        show(f"{name}: other kernels", compared.kernels)
        show(f"{name}: beside the virtual GPU", apart.get(name, []))
    return int(any(compared.failures for compared in said.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
