"""A training step's demands on a device, engine beside engine, counted on the virtual GPU.

    python3 noxfile.py -s virtual-gpu -- python benchmarks/virtual_gpu.py    # all rows
    ... benchmarks/virtual_gpu.py 8b --engines fsdp2 lamina-3                # some

Rank 0 of a world plays a Llama in plain torch, 1 x 8,192 tokens, bf16 over fp32, fused AdamW,
clipping. 70b is cut over 8 ranks of tp, 30b-moe has 128 experts that a forced router loads evenly;
both compute each block again in backward. The other ranks do not exist. Memory is what torch's
caching allocator takes. Seconds are of the virtual clock, whose rates one H200 has judged
(docs/virtual-gpu.md). It is no better than a range, so it runs under several sets of rates at once:
links of 60 to 370 GB/s (a network between hosts of 22 to 45), kernels 20% faster and slower. What
is exposed is what the step takes longer than with links that are free; `--units` prints it for each
unit. The host's time is its processor's, in one step on this machine: compare engines of one run.
Peers take part where they are installed, in a copy of `.nox/virtual-gpu`: `megatron-fsdp==0.6.1`,
`deepspeed` (with `DS_BUILD_OPS=0 pip install --no-build-isolation`), and torchtitan's sources in
PYTHONPATH, with tyro and spmd_types.
`--no-deps` keeps NVIDIA's libraries out of the stand-ins' place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

ENGINES = {
    "fsdp2": ("fsdp2", {}),
    "fsdp2, blocks and root": ("fsdp2", {"ends": False}),
    "torchtitan": ("torchtitan", {}),
    "megatron-fsdp": ("megatron-fsdp", {}),
    "deepspeed": ("deepspeed", {}),
    "lamina-3": ("lamina-3", {}),
    "lamina-3-native": ("lamina-3", {"reduction": "native"}),
}
"""The engines of `virtual_gpu_step.py`, and their settings."""
LINKS = {"slow links": "link=60 network=22.5", "fast links": "link=370 network=45"}
FREE = "link=1e6 network=1e6"
KERNELS = {"slow kernels": 0.8, "kernels": 1.0, "fast kernels": 1.2}
# Size, ranks, further words of a step.
WORDS = {
    "1b": (),
    "8b": (),
    "30b-moe": ("--recompute",),
    "70b": ("--tp", "8", "--recompute"),
}
ROWS = (
    *((size, world, more) for size, more in WORDS.items() for world in (8, 64, 1024)),
    ("8b", 8, ("--recompute",)),
)


def sets_of_rates() -> str:
    """Return `VGPU_RATES`: each pair of links and kernels, and free links with each kernels."""
    sets = {"free": FREE}
    for kernels, speed in KERNELS.items():
        sets[f"free, {kernels}"] = f"{FREE} kernels={speed}"
        for links, rates in LINKS.items():
            sets[f"{links}, {kernels}"] = f"{rates} kernels={speed}"
    return "; ".join(f"{name}: {rates}" for name, rates in sets.items())


def row(name: str, size: str, world: int, more: tuple[str, ...]) -> dict[str, Any]:
    """What a step asks of the device, and how long it takes at each set of rates."""
    engine, settings = ENGINES[name]
    what = {"engine": engine, "size": size, "world": world, "settings": json.dumps(settings)}
    command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in what.items())]
    env = {**os.environ, "VGPU_RATES": sets_of_rates()}
    answer = subprocess.run([*command, *more], capture_output=True, text=True, env=env)
    if answer.returncode or not answer.stdout.strip():
        lines = [line for line in answer.stderr.splitlines() if "Error" in line] or ["no message"]
        made = {"failed": lines[-1][:200]}
    else:
        made = json.loads(answer.stdout.splitlines()[-1])
    job = f"{size} on {world:,}" + (", recomputed" if "--recompute" in more else "")
    return {**made, "engine": name, "job": job}


def steps(one: dict[str, Any]) -> list[float]:
    """Return a step's seconds at each pair of links and kernels."""
    return [one["seconds_at_rates"][f"{links}, {k}"] for k in KERNELS for links in LINKS]


def exposed(one: dict[str, Any]) -> list[float]:
    """Return what of these seconds is waiting for links."""
    at = one["seconds_at_rates"]
    return [at[f"{links}, {k}"] - at[f"free, {k}"] for k in KERNELS for links in LINKS]


def judged(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield how Lamina's ordered step stands at all these rates, beside the others of one job."""
    named = {one["engine"]: one for one in rows if "seconds_at_rates" in one}
    ordered = named.pop("lamina-3", None)
    if ordered is None:
        return
    native = named.pop("lamina-3-native", None)
    torch = [one for name, one in named.items() if name.startswith("fsdp2")]
    if torch:
        ratios = [
            own / min(all_) for own, *all_ in zip(steps(ordered), *map(steps, torch), strict=True)
        ]
        yield f"step over the better FSDP2's {min(ratios):.3f} to {max(ratios):.3f} (aim 1)"
        more = [
            own - min(all_)
            for own, *all_ in zip(exposed(ordered), *map(exposed, torch), strict=True)
        ]
        yield f"exposed beyond its least {min(more):+.4f} to {max(more):+.4f} s (aim 0)"
    if native:
        ratios = [a / b for a, b in zip(steps(ordered), steps(native), strict=True)]
        yield f"over native sums {min(ratios):.3f} to {max(ratios):.3f} (aim 1.01)"


def span(seconds: list[float], own: float) -> str:
    """Return seconds at the device's own rates, and the least and the most of all."""
    return f"{own:.4f} ({min(seconds):.4f} to {max(seconds):.4f})"


def line(one: dict[str, Any]) -> str:
    """Return a row of the table."""
    name = f"| {one['job']}, {one['engine']} |"
    if reason := one.get("failed") or one.get("out_of_memory"):
        return f"{name} {reason.splitlines()[0][:160]} |"
    cells = [
        f"{one['allocated_gib']:.1f} / {one['reserved_gib']:.1f} ({one['retries']})",
        f"{one['launches']:,}; {one['gathers']:,}; {one['reductions']:,}",
        f"{one['event_records']:,} / {one['event_waits']:,}",
        f"{one['host_waits']}",
        f"{one['python_calls']:,}; {one['host_processor_seconds']:.2f}",
        span(exposed(one), one["virtual_seconds"] - one["seconds_at_rates"]["free"]),
        span(steps(one), one["virtual_seconds"]),
    ]
    return " ".join([name, *(f"{cell} |" for cell in cells)])


def table() -> None:
    """Print the rows that the words choose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", help="such as 8b, or 8b@1024; all if none")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--units", action="store_true", help="exposed seconds until each unit too")
    words = parser.parse_args()
    if importlib.util.find_spec("lamina_virtual_gpu") is None:
        print("no virtual GPU in this environment: python3 noxfile.py -s virtual-gpu makes one")
        return
    print(
        "| | allocated / reserved, GiB (retries) | launches; gathers; reductions "
        "| events recorded / waited for | host waits | calls in Python; processor, s "
        "| exposed, s (all rates) | virtual step, s (all rates) |"
    )
    print("|" + " --- |" * 8)
    units = ("--units",) if words.units else ()
    verdicts: list[str] = []
    for size, world, more in ROWS:
        if not words.sizes or {size, f"{size}@{world}"} & set(words.sizes):
            rows = []
            for engine in words.engines:
                rows.append(row(engine, size, world, (*more, *units)))
                print(line(rows[-1]), flush=True)
                for unit, seconds in rows[-1].get("exposed_by_unit", ()):
                    print(f"    {unit}: {seconds:.5f} s exposed")
            verdicts += [f"{rows[0]['job']}: {text}" for text in judged(rows)]
    print("\nLamina's ordered step:\n", *(f"- {text}" for text in verdicts), sep="\n")


if __name__ == "__main__":
    if any(word.startswith("--engine=") or word == "--engine" for word in sys.argv):
        from virtual_gpu_step import main

        main()
    else:
        table()
