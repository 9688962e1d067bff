"""A training step's demands on a device, engine beside engine, counted on the virtual GPU.

    python3 noxfile.py -s virtual-gpu -- python benchmarks/virtual_gpu.py    # all rows
    ... benchmarks/virtual_gpu.py 8b --engines fsdp2 lamina-3                # some

Rank 0 of a world plays a Llama in plain torch, 1 x 8,192 tokens, bf16 over fp32, fused AdamW,
clipping. 70b is cut over 8 ranks of tp, 30b-moe has 128 experts that a forced router loads evenly;
both compute each block again in backward. The other ranks do not exist. Memory is what torch's
caching allocator takes. Seconds are of the virtual clock, whose rates one H200 has judged
(docs/virtual-gpu.md). What is exposed is what the step takes longer than with links that are free
(a second run); `VGPU_LINK_GBS` sets those of the first. The host's time is its processor's, in one
step on this machine: compare engines of one run. Peers take part where they are installed, in a
copy of `.nox/virtual-gpu`: `megatron-fsdp==0.6.1`, `deepspeed` (with `DS_BUILD_OPS=0 pip install
--no-build-isolation`), and torchtitan's sources in PYTHONPATH, with tyro and spmd_types.
`--no-deps` keeps NVIDIA's libraries out of the stand-ins' place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys

ENGINES = {
    "fsdp2": ("fsdp2", {}),
    "torchtitan": ("torchtitan", {}),
    "megatron-fsdp": ("megatron-fsdp", {}),
    "deepspeed": ("deepspeed", {}),
    "lamina-3": ("lamina-3", {}),
    "lamina-3-native": ("lamina-3", {"reduction": "native"}),
}
"""The engines of `virtual_gpu_step.py`, and their settings."""
FREE_LINKS = {"VGPU_LINK_GBS": "1000000", "VGPU_NETWORK_GBS": "1000000"}
# Size, ranks, further words of a step.
ROWS = (
    ("1b", 8, ()),
    ("8b", 8, ()),
    ("8b", 1024, ()),
    ("30b-moe", 16, ("--recompute",)),
    ("70b", 64, ("--tp", "8", "--recompute")),
    ("70b", 1024, ("--tp", "8", "--recompute")),
)


def row(name: str, size: str, world: int, more: tuple[str, ...]) -> dict[str, object]:
    """What a step asks of the device, and how much longer it takes than with free links."""
    engine, settings = ENGINES[name]
    what = {"engine": engine, "size": size, "world": world, "settings": json.dumps(settings)}
    words = [*(f"--{key}={value}" for key, value in what.items()), *more]
    made = {**step(words, {}), "engine": name, "size": size, "world": world}
    if "virtual_seconds" in made:
        free = step(words, FREE_LINKS)["virtual_seconds"]
        made["exposed"] = made["virtual_seconds"] - free
    return made


def step(words: list[str], environment: dict[str, str]) -> dict:
    """Measure one step in a process of its own."""
    command = [sys.executable, __file__, *words]
    answer = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    if answer.returncode or not answer.stdout.strip():
        lines = [line for line in answer.stderr.splitlines() if "Error" in line] or ["no message"]
        return {"failed": lines[-1][:200]}
    return json.loads(answer.stdout.splitlines()[-1])


def line(one: dict) -> str:
    name = f"| {one['size']} on {one['world']:,}, {one['engine']} |"
    if reason := one.get("failed") or one.get("out_of_memory"):
        return f"{name} {reason.splitlines()[0][:160]} |"
    cells = [
        f"{one['allocated_gib']:.1f} / {one['reserved_gib']:.1f} ({one['retries']})",
        f"{one['launches']:,}; {one['gathers']:,}; {one['reductions']:,}",
        f"{one['event_records']:,} / {one['event_waits']:,}",
        f"{one['host_waits']}",
        f"{one['python_calls']:,}; {one['host_processor_seconds']:.2f}",
        f"{one['exposed']:.4f}",
        f"{one['virtual_seconds']:.4f}",
    ]
    return " ".join([name, *(f"{cell} |" for cell in cells)])


def table() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", help="such as 8b, or 8b@1024; all if none")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    words = parser.parse_args()
    if importlib.util.find_spec("lamina_virtual_gpu") is None:
        print("no virtual GPU in this environment: python3 noxfile.py -s virtual-gpu makes one")
        return
    print(
        "| | allocated / reserved, GiB (retries) | launches; gathers; reductions "
        "| events recorded / waited for | host waits | calls in Python; processor, s "
        "| exposed, s | virtual step, s |"
    )
    print("|" + " --- |" * 8)
    for size, world, more in ROWS:
        if not words.sizes or {size, f"{size}@{world}"} & set(words.sizes):
            for engine in words.engines:
                print(line(row(engine, size, world, more)), flush=True)


if __name__ == "__main__":
    if any(word.startswith("--engine=") or word == "--engine" for word in sys.argv):
        from virtual_gpu_step import main

        main()
    else:
        table()
