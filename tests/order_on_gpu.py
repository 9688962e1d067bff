"""Records training steps on a CPU and on a GPU, and tells how their orders of streams differ.

    python tests/order_on_gpu.py                # the default scenarios; or their names
    python tests/order_on_gpu.py --stand-in     # what acts as CUDA takes the place of the GPU

The GPU's own streams, events and autograd are recorded there (`lamina_testing.order`), for one of
four simulated ranks. Three things are told of each scenario: races on the GPU, what the order of
one device has and that of the other lacks, and which kernels differ. The last is no failure: a GPU
has other kernels.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

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


def compare(name: str, first: Recording, second: Recording) -> tuple[list[str], list[str]]:
    """Return what is wrong with a scenario's second recording, and notes on it, in words."""
    graphs = OrderGraph.of(first), OrderGraph.of(second)
    wrong = [f"race: {race}" for race in second.races]
    wrong += differences(*graphs, DEVICES)
    notes = [*dict.fromkeys(second.surprises), *other_kernels(*graphs, DEVICES)]
    nodes = first.history.nodes, second.history.nodes
    print("|", " | ".join(map(str, [name, *nodes, len(second.races), len(wrong), len(notes)])), "|")
    return wrong, notes


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


def main(words: Sequence[str]) -> int:
    """Print the table and the differences; return 1 if there are any in the order, or a race."""
    parser = argparse.ArgumentParser(description="compare the order of streams on CPU and GPU")
    parser.add_argument("names", nargs="*", help="scenarios of tests/order_scenarios.py")
    parser.add_argument("--stand-in", action="store_true", help="needs no GPU")
    options = parser.parse_args(words)
    names = options.names or SCENARIOS
    on_cpu = record_all(names, "cpu")  # before CUDA is initialised
    on_gpu = record_all(names, "cpu" if options.stand_in else "cuda")
    print("| scenario | nodes, CPU | nodes, GPU | races | wrong | notes |")
    print("| --- | --- | --- | --- | --- | --- |")
    failed, told = False, []
    for name in names:
        first, second = on_cpu[name], on_gpu[name]
        notes: list[str] = []
        if isinstance(first, Exception) or isinstance(second, Exception):
            pair = zip(DEVICES, (first, second), strict=True)
            wrong = [f"{where} raised {e!r}" for where, e in pair if isinstance(e, Exception)]
            print(f"| {name} | raised | | | | |")
        else:
            wrong, notes = compare(name, first, second)
        failed = failed or bool(wrong)
        told.append((name, wrong, notes))
    for name, wrong, notes in told:
        show(f"{name}: wrong", wrong)
        show(f"{name}: other kernels", notes)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
