"""The kernels of lamina.collectives beside a device copy that moves as many bytes.

    PYTHONPATH=packages/mesh/src:packages/buffers/src:packages/collectives/src \
        python benchmarks/kernels.py

Needs one GPU. First the kernel's bits are compared with the plain reference for every case, then
it is timed: the median over replays of a CUDA graph, which leaves out the host. Exits with 1 if
bits differ or if a case of 64 MiB and more stays below 85% of the copy's bandwidth. `--rehearse`
runs the same on a CPU in Triton's interpreter, with small tensors, and says nothing about speed.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

REHEARSAL = "--rehearse" in sys.argv[1:]
if REHEARSAL:  # Triton reads this when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from triton.testing import do_bench_cudagraph

from lamina.collectives.reduction import triton_sum
from lamina.collectives.reduction.summation import reference_sum

DEVICE = "cpu" if REHEARSAL else "cuda"
LEAST_SHARE = 0.85
CASES = [
    # ranks, wire dtype, output dtype, added to the output
    (2, torch.float32, torch.float32, False),
    (2, torch.bfloat16, torch.float32, False),
    (4, torch.float32, torch.float32, True),
    (4, torch.bfloat16, torch.float32, True),
    (8, torch.float32, torch.float32, False),
    (8, torch.bfloat16, torch.float32, False),
    (8, torch.bfloat16, torch.float32, True),
    (8, torch.bfloat16, torch.bfloat16, False),
    (8, torch.float16, torch.float16, True),
    (16, torch.bfloat16, torch.float32, False),
    (32, torch.bfloat16, torch.float32, False),
    (64, torch.bfloat16, torch.float32, False),
]


def statistics() -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the squared norm and the flag."""
    norm = torch.empty((), dtype=torch.float64, device=DEVICE)
    return norm, torch.empty((), dtype=torch.bool, device=DEVICE)


def check(
    ranks: int, wire: torch.dtype, out: torch.dtype, accumulate: bool, numel: int
) -> list[str]:
    """Compare with the reference for every configuration that may be chosen; return failures."""
    chunks = torch.randn(ranks, numel, device=DEVICE).to(wire)
    before = torch.randn(numel, device=DEVICE).to(out)
    factor = torch.tensor(1 / 3, dtype=torch.float32).item()
    expected = before.clone()
    norm, _ = reference_sum(list(chunks), expected, factor, accumulate)
    failures = []
    for config in (None, *triton_sum.configs_for(ranks)):
        result, found = before.clone(), statistics()
        triton_sum.fused_sum(chunks, result, factor, accumulate, found, config)
        case = f"{ranks} ranks, {wire} to {out}, accumulate={accumulate}, {numel}, {config}"
        if not torch.equal(result, expected):
            failures.append(f"bits differ: {case}: {(result != expected).sum()} elements")
        if abs(found[0].item() / norm.item() - 1) > 1e-12 or found[1].item():
            failures.append(f"squared norm {found[0].item()}, expected {norm.item()}: {case}")
    chunks[ranks // 2][numel // 2] = float("inf")
    found = statistics()
    triton_sum.fused_sum(chunks, before, factor, accumulate, found)
    if not found[1].item():
        failures.append(f"an infinity went unseen: {ranks} ranks, {wire} to {out}")
    return failures


def median(call: Callable[[], object]) -> float:
    """Milliseconds of a call on the GPU; in a rehearsal of one call on the host."""
    if not REHEARSAL:
        with torch.cuda.stream(torch.cuda.Stream()):
            return do_bench_cudagraph(call, return_mode="median")
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def bandwidth(
    ranks: int, wire: torch.dtype, out: torch.dtype, accumulate: bool, mib: float
) -> tuple[float, float, float]:
    """Milliseconds of the sum, its GB/s and the GB/s of a copy that moves as many bytes."""
    numel = int(mib * 2**20) // (ranks * wire.itemsize) // 128 * 128
    chunks = torch.randn(ranks, numel, device=DEVICE).to(wire)
    output = torch.zeros(numel, dtype=out, device=DEVICE)
    moved = numel * (ranks * wire.itemsize + (2 if accumulate else 1) * out.itemsize)
    found = statistics()

    def run() -> None:
        triton_sum.fused_sum(chunks, output, 0.5, accumulate, found)

    run()
    source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    milliseconds = median(run)
    copy = median(lambda: target.copy_(source))
    return milliseconds, moved / milliseconds / 1e6, moved / copy / 1e6


def main() -> int:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    options = parser.parse_args()
    cases, sizes, pieces = CASES, options.mib, (1000, 1 << 16, (1 << 20) + 7)
    if REHEARSAL:
        cases, sizes, pieces = CASES[1:4], [1 / 32], (1000,)
    place = "CPU, interpreted" if REHEARSAL else torch.cuda.get_device_name()
    print(f"{place}, torch {torch.__version__}, triton {triton.__version__}")
    failures = [failure for case in cases for numel in pieces for failure in check(*case, numel)]
    print("bits equal the reference's in all cases" if not failures else "\n".join(failures))
    heads = ["ranks", "wire", "output", "adds", "received", "ms", "GB/s", "copy GB/s", "share"]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for mib in sizes:
        for ranks, wire, out, accumulate in cases:
            spent, ours, copy = bandwidth(ranks, wire, out, accumulate, mib)
            names = [str(dtype).removeprefix("torch.") for dtype in (wire, out)]
            cells = [str(ranks), *names, "yes" if accumulate else "no", f"{mib:g} MiB"]
            cells += [f"{spent:.3f}", f"{ours:.0f}", f"{copy:.0f}", f"{ours / copy:.0%}"]
            print("| " + " | ".join(cells) + " |", flush=True)
            if mib >= 64 and ours / copy < LEAST_SHARE:
                failures.append(f"below {LEAST_SHARE:.0%} of a copy: {cells}")
    for kind, config in triton_sum.measured_choices().items():
        print(f"tuned: {kind[1]} ranks, {kind[2]} to {kind[3]}, accumulate={kind[4]}: {config}")
    print("\n".join(failures) if failures else "all cases passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
