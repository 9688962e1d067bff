"""A training step's demands on a device, engine beside engine, counted on the virtual GPU.

    python3 noxfile.py -s virtual-gpu -- python benchmarks/virtual_gpu.py    # all rows
    ... benchmarks/virtual_gpu.py 8b --engines fsdp2 lamina-3                # some

Rank 0 of a world plays a Llama in plain torch, 1 x 8,192 tokens, bf16 over fp32, fused AdamW,
clipping. 70b is cut over 8 ranks of tp, 30b-moe has 128 experts that a forced router loads evenly;
both compute each block again in backward. The other ranks do not exist. Memory is what torch's
caching allocator takes. Seconds are of the virtual clock, whose rates are data sheets' and not
calibrated. Peers take part where they are installed, in a copy of `.nox/virtual-gpu`:
`megatron-fsdp==0.6.1`, `deepspeed` (with `DS_BUILD_OPS=0 pip install --no-build-isolation`), and
torchtitan's sources in PYTHONPATH, with tyro and spmd_types. `--no-deps` keeps NVIDIA's libraries
out of the stand-ins' place.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys

ENGINES = ("fsdp2", "torchtitan", "megatron-fsdp", "deepspeed", "lamina-3")
# Size, ranks, further words of a step.
ROWS = (
    ("1b", 8, ()),
    ("8b", 8, ()),
    ("8b", 1024, ()),
    ("30b-moe", 16, ("--recompute",)),
    ("70b", 64, ("--tp", "8", "--recompute")),
    ("70b", 1024, ("--tp", "8", "--recompute")),
)


def row(engine: str, size: str, world: int, more: tuple[str, ...]) -> dict[str, object]:
    what = {"engine": engine, "size": size, "world": world}
    words = [f"--{name}={value}" for name, value in what.items()]
    command = [sys.executable, __file__, *words, *more]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode or not answer.stdout.strip():
        lines = [line for line in answer.stderr.splitlines() if "Error" in line] or ["no message"]
        return {**what, "failed": lines[-1][:200]}
    return {**what, **json.loads(answer.stdout.splitlines()[-1])}


def line(one: dict) -> str:
    name = f"| {one['size']} on {one['world']:,}, {one['engine']} |"
    if reason := one.get("failed") or one.get("out_of_memory"):
        return f"{name} {reason.splitlines()[0][:160]} |"
    cells = [
        f"{one['allocated_gib']:.1f} / {one['reserved_gib']:.1f} ({one['retries']})",
        f"{one['launches']:,}; {one['gathers']:,}; {one['reductions']:,}",
        f"{one['event_records']:,} / {one['event_waits']:,}",
        f"{one['host_waits']}",
        f"{one['python_calls']:,}",
        f"{one['virtual_seconds']:.3f}",
    ]
    return " ".join([name, *(f"{cell} |" for cell in cells)])


def table() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", help="such as 8b, or 8b@1024; all if none")
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    words = parser.parse_args()
    if importlib.util.find_spec("lamina_virtual_gpu") is None:
        print("no virtual GPU in this environment: python3 noxfile.py -s virtual-gpu makes one")
        return
    print(
        "| | allocated / reserved, GiB (retries) | launches; gathers; reductions "
        "| events recorded / waited for | host waits | calls in Python | virtual step, s |"
    )
    print("|" + " --- |" * 7)
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
