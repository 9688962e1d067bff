"""What a steady training step asks of the virtual GPU, held to budgets.

`python3 noxfile.py -s virtual-gpu -- budgets` measures each row of `budgets.json`, prints it beside
torch's FSDP2 of the same run, and fails where a figure is more than 2% above its budget. `--keep`
writes what was measured as the new budgets; other words choose, such as `1b-hsdp` or `lamina-3`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = Path(__file__).with_name("budgets.json")
STEP = ROOT / "benchmarks" / "virtual_gpu.py"
# What a budget is given for; the other figures of a step are shown or left to the benchmark.
COUNTED = (
    "launches",
    "gathers",
    "reductions",
    "all_reductions",
    "message_mib",
    "event_records",
    "event_waits",
    "host_waits",
    "allocated_gib",
    "reserved_gib",
    "retries",
    "device_allocations",
    "device_frees",
    "allocations",
    "python_calls",
    "virtual_seconds",
)
MORE = 1.02
ENGINES = ("fsdp2", "lamina-3", "torch-ddp", "lamina-1", "lamina-ddp")
SHARDED = ENGINES[:2]
HELD = tuple(engine for engine in ENGINES if engine.startswith("lamina"))  # torch's are shown

Row = Mapping[str, object]


@dataclass(frozen=True)
class Case:
    """A model on a layout, and the engines that are measured beside each other on it.

    `words` go to `benchmarks/virtual_gpu_step.py`.
    """

    name: str
    words: tuple[str, ...]
    engines: tuple[str, ...] = SHARDED


CASES = (
    Case("tiny", ("--size", "tiny"), ENGINES),
    Case("1b", ("--size", "1b"), ENGINES),
    Case("1b-hsdp", ("--size", "1b", "--copies", "2")),
    Case("1b-tp", ("--size", "1b", "--tp", "4")),
    Case("30b-moe", ("--size", "30b-moe", "--world", "16", "--recompute")),
)


def measure(case: Case, engine: str) -> dict[str, object]:
    """Run a step in a process of its own."""
    command = [sys.executable, str(STEP), "--engine", engine, *case.words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if answer.returncode or not answer.stdout.strip():
        raise RuntimeError(f"{engine} {case.name} failed:\n{answer.stderr[-3000:]}")
    row: dict[str, object] = json.loads(answer.stdout.splitlines()[-1])
    row["case"] = case.name
    copies: dict[str, tuple[int, int]] = row.get("copies", {})  # type: ignore[assignment]
    # Bytes by direction are budgets too; a step's pinned blocks come from a cache, by time.
    row |= {f"bytes {name}": n[1] for name, n in copies.items() if name != "pinned memory"}
    return row


def counted(row: Row) -> dict[str, float]:
    """Return the figures of a row that have budgets."""
    return {
        name: float(str(value))
        for name, value in row.items()
        if name in COUNTED or name.startswith("bytes ")
    }


def broken(row: Row, budget: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence for each figure that is above its budget by more than 2%."""
    for name, value in counted(row).items():
        limit = budget.get(name, 0)
        if value > limit * MORE:
            yield f"{row['engine']} {row['case']}: {name} {value:g}, budget {limit:g}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows of one case side by side."""
    names = list(dict.fromkeys(name for row in rows for name in counted(row)))
    lines = [f"{rows[0]['case']:<34}" + "".join(f"{row['engine']!s:>12}" for row in rows)]
    for name in names:
        figures = [counted(row).get(name, 0) for row in rows]
        lines.append(f"{name:<34}" + "".join(f"{figure:>12g}" for figure in figures))
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    """Measure the rows that the words choose, and return 1 if one is above its budget."""
    chosen = [word for word in words if word != "--keep"]
    cases = [case for case in CASES if case.name in chosen] or list(CASES)
    named = {engine for engine in ENGINES if engine in chosen} or set(ENGINES)
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    began = time.monotonic()
    complaints: list[str] = []
    better: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        for case in cases:
            engines = [engine for engine in case.engines if engine in named]
            rows = list(pool.map(lambda engine, case=case: measure(case, engine), engines))
            if not rows:
                continue
            print(table(rows), flush=True)
            for row in (row for row in rows if row["engine"] in HELD):
                key = f"{row['engine']} {case.name}"
                complaints += broken(row, budgets.get(key, {}))
                for name, value in counted(row).items():
                    if value * MORE < budgets.get(key, {}).get(name, 0):
                        better.append(f"{key}: {name} {value:g}, budget {budgets[key][name]:g}")
                if "--keep" in words:
                    budgets[key] = counted(row)
                for times, *lines in row["waits_at"]:  # type: ignore[attr-defined]
                    print(f"  {key} waits {times} times: {' < '.join(lines)}")
    if "--keep" in words:
        BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")
        return 0
    for line in better:
        print(f"better: {line}; `-- budgets --keep` lowers it")
    for line in complaints:
        print(f"above its budget: {line}")
    print(f"{len(complaints)} figures above their budgets, {time.monotonic() - began:.0f} s")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
