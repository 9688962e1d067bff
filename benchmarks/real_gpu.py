"""What the virtual GPU says of a training step, beside what a GPU says of the same step.

    python benchmarks/real_gpu.py 1b 8b > seen.json              # on a GPU
    VGPU_GPU=h200 .nox/virtual-gpu/bin/python benchmarks/real_gpu.py 1b 8b --beside seen.json

The step is that of `virtual_gpu_step.py`: rank 0 of 8 plays a Llama in plain torch, 1 x 8,192
tokens, bf16 over fp32, fused AdamW, clipping. Its messages go to the network of
`simulated_group.py`, which copies on a stream and holds it for as long as the bytes would take at
`--gbyte`, so that one GPU is enough and both devices are asked for the same. Memory is what torch's
caching allocator took; calls are those of CUDA's runtime and driver in one step. A GPU's are
counted by torch's profiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from simulated_group import simulated_world

GIB = 1 << 30
VIRTUAL = importlib.util.find_spec("lamina_virtual_gpu") is not None
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
CALLS = {
    "launches": LAUNCHES,
    "events recorded": ("cudaEventRecord", "cudaEventRecordWithFlags"),
    "events waited for": ("cudaStreamWaitEvent",),
    "copies and fills": ("cudaMemcpyAsync", "cudaMemsetAsync"),
}
TIMED = 6


def say_heaviest(kernels: Iterable[tuple[int, float, str]]) -> None:
    """Write the kernels that take longest to stderr: how often, milliseconds, name."""
    for times, spent, name in sorted(kernels, key=lambda one: -one[1])[:40]:
        if spent:
            print(times, round(spent, 3), "ms", name[:150], file=sys.stderr)


def calls_of(step: Callable[[], None]) -> dict[str, int]:
    """Run a step and count the calls that it makes to CUDA."""
    if VIRTUAL:
        import lamina_virtual_gpu as virtual_gpu

        virtual_gpu.reset()
        step()
        seen = virtual_gpu.record()
        counts = Counter(seen.calls)
        say_heaviest(
            (times, spent * 1e3, name)
            for name, (times, spent) in [*seen.kernels.items(), *seen.products.items()]
        )
        return {
            name: seen.launches if name == "launches" else sum(counts[call] for call in calls)
            for name, calls in CALLS.items()
        }
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    counts = Counter(event.name for event in profile.events())
    averages = profile.key_averages()
    say_heaviest((one.count, one.self_device_time_total / 1e3, one.key) for one in averages)
    return {name: sum(counts[call] for call in calls) for name, calls in CALLS.items()}


def seconds_of(step: Callable[[], None]) -> tuple[float, float]:
    """Run steps and return the seconds of one, and of its host before it waits."""
    now: Callable[[], float] = time.perf_counter
    if VIRTUAL:
        import lamina_virtual_gpu as virtual_gpu

        now = virtual_gpu.now
    whole, host = [], []
    for _ in range(2 if VIRTUAL else TIMED):
        torch.cuda.synchronize()
        begun = now()
        step()
        host.append(now() - begun)
        torch.cuda.synchronize()
        whole.append(now() - begun)
    return statistics.median(whole), statistics.median(host)


def of_step(step: Callable[[], None]) -> dict[str, object]:
    """Return what a steady step asks of the device."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds, host = seconds_of(step)
    stats = torch.cuda.memory_stats()
    return {
        "allocated, GiB": round(stats["allocated_bytes.all.peak"] / GIB, 3),
        "reserved, GiB": round(stats["reserved_bytes.all.peak"] / GIB, 3),
        "retries": stats["num_alloc_retries"],
        "seconds": round(seconds, 4),
        "seconds of the host": round(host, 4),
        **calls_of(step),
    }


def one_row(size: str, engine: str, world: int, gbyte: float) -> dict[str, object]:
    """Measure one engine in this process."""
    from virtual_gpu_step import measure, words_of

    torch.cuda.set_device(0)
    with simulated_world(world, gbyte, torch.device("cuda", 0)):
        words = words_of(["--size", size, "--engine", engine, "--world", str(world)])
        return measure(words, of_step)


def table(rows: Mapping[str, dict[str, object]], beside: Mapping[str, dict[str, object]]) -> str:
    """Return the figures of each row, and those of another run with what they differ by."""
    lines = ["| row | figure | virtual | real | virtual / real |", "|" + " --- |" * 5]
    for name, row in rows.items():
        for figure, value in row.items():
            other = beside.get(name, {}).get(figure)
            if isinstance(value, int | float) and isinstance(other, int | float):
                ratio = f"{value / other:.3f}" if other else "-"
                lines.append(f"| {name} | {figure} | {value:,} | {other:,} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Measure each size under each engine, in processes of their own, and print JSON or a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["1b"])
    parser.add_argument("--engines", nargs="+", default=["fsdp2", "lamina-3"])
    parser.add_argument("--beside", type=Path, help="JSON of a run on a GPU")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--gbyte", type=float, default=200.0, help="10^9 bytes a second and rank")
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "ENGINE"), help="in this process")
    words = parser.parse_args()
    if words.one:
        print(json.dumps(one_row(*words.one, words.world, words.gbyte)), flush=True)
        return
    rows: dict[str, dict[str, object]] = {}
    for size in words.sizes:
        for engine in words.engines:
            command = [sys.executable, __file__, "--one", size, engine]
            command += [f"--world={words.world}", f"--gbyte={words.gbyte}"]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            name = f"{size} on {words.world}, {engine}"
            if answer.returncode == 0:
                rows[name] = json.loads(answer.stdout.splitlines()[-1])
                print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    if words.beside:
        print(table(rows, json.loads(words.beside.read_text())["rows"]))
    else:
        device = torch.cuda.get_device_name()
        print(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
