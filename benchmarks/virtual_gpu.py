"""A training step's demands on a device, engine beside engine, counted on the virtual GPU.

    python3 noxfile.py -s virtual-gpu -- python benchmarks/virtual_gpu.py    # 1b and 8b

further words: sizes, --world 64, --recompute.

Rank 0 of a world plays a Llama in plain torch, 1 x 8,192 tokens, bf16 over fp32, fused AdamW,
clipping. The other ranks do not exist. Memory is what torch's caching allocator takes. Seconds
are of the virtual clock, whose rates are data sheets' and not calibrated. Megatron-FSDP takes part
where `pip install megatron-fsdp==0.6.1` was run in `.nox/virtual-gpu`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys

ENGINES = ("fsdp2", "megatron-fsdp", "lamina-3")


def row(engine: str, size: str, more: list[str]) -> dict[str, object]:
    command = [sys.executable, __file__, "--engine", engine, "--size", size, *more]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode or not answer.stdout.strip():
        last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        return {"engine": engine, "size": size, "failed": last[:200]}
    return json.loads(answer.stdout.splitlines()[-1])


def line(one: dict) -> str:
    name = f"| {one['size']}, {one['engine']} |"
    if reason := one.get("failed") or one.get("out_of_memory"):
        return f"{name} {reason.splitlines()[0][:160]} |"
    cells = [
        f"{one['allocated_gib']:.1f} / {one['reserved_gib']:.1f} ({one['retries']})",
        f"{one['launches']:,}; {one['gathers']}; {one['reductions']}",
        f"{one['event_records']} / {one['event_waits']}",
        f"{one['host_waits']}",
        f"{one['python_calls']:,}",
        f"{one['virtual_seconds']:.3f}",
    ]
    return " ".join([name, *(f"{cell} |" for cell in cells)])


def table() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--world", default="8")
    parser.add_argument("--recompute", action="store_true")
    words = parser.parse_args()
    if importlib.util.find_spec("lamina_virtual_gpu") is None:
        print("no virtual GPU in this environment: python3 noxfile.py -s virtual-gpu makes one")
        return
    more = ["--world", words.world, *(["--recompute"] if words.recompute else [])]
    print(
        "| | allocated / reserved, GiB (retries) | launches; gathers; reductions "
        "| events recorded / waited for | host waits | calls in Python | virtual step, s |"
    )
    print("|" + " --- |" * 7)
    for size in words.sizes:
        for engine in ENGINES:
            print(line(row(engine, size, more)), flush=True)


if __name__ == "__main__":
    if "--engine" in sys.argv:
        from virtual_gpu_step import main

        main()
    else:
        table()
