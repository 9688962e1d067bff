"""Says of every wait which scenario, seed and symptom shows that it was left out.

`.nox/virtual-gpu/bin/python tests/virtual_gpu/left_out_table.py [--keep]` runs the scenarios of
`left_out.py` under seed 0. What no scenario has shown is tried under further seeds, twenty in all.
`--keep` writes the table into the section "Waits left out" of docs/records/virtual-gpu.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "records" / "virtual-gpu.md"
HEADING, END = "### Waits left out\n", "<!-- end of the table of waits -->\n"
SEEDS = 20
SCENARIOS = (
    "strategy 3", "HSDP", "HFSDP", "slots", "bf16", "native sums", "dropped handles",
    "a stream of its own", "a backward on another stream",
    "DDP, a branch beside a stream of its own", "DDP, sharded optimizer",
    "recomputation, a block used twice", "offload", "tp 2", "sequence parallelism", "cp 2",
    "1f1b, first stage", "1f1b, last stage", "zbv_zero_bubble, first stage",
    "offloaded activations", "staged checkpoint", "FSDP2",
)  # fmt: skip


@dataclass
class Wait:
    """A line that waits: the scenarios that pass it, and what has shown that it was left out."""

    scenarios: list[str] = field(default_factory=list)
    shown: list[tuple[str, int, str]] = field(default_factory=list)


def row_of(name: str, seed: int, *arguments: str) -> dict[str, Any]:
    """Run `left_out.py` in a process of its own under a seed, and return its row."""
    program = str(Path(__file__).with_name("left_out.py"))
    order = {"VGPU_COMPUTE": "adversarial", "VGPU_SEED": str(seed), "VGPU_SHARE": "0"}
    answer = subprocess.run(
        [sys.executable, program, *arguments],
        env={**os.environ, **order},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if answer.returncode != 0:
        raise RuntimeError(f"{name} under seed {seed}: {answer.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    if row["says"]:
        raise RuntimeError(f"{name} with all its waits says {row['says']}")
    return row


def measure(name: str, seed: int, *only: str) -> dict[str, str]:
    """Run a scenario under a seed; return what its waits have shown."""
    shown: dict[str, str] = {}
    after = ""
    while True:
        row = row_of(name, seed, name, *only, "--after", after)
        shown |= row["shown"]
        after = row["failed"]
        if not after:
            return shown


def show_plant(plant: str, seed: int) -> str:
    """Plant a fault of history in its scenario; return what shows it under a seed."""
    shown: str = row_of(plant, seed, "--plant", plant)["shown"][plant]
    return shown


def table() -> dict[str, Wait]:
    """Try seed 0 on all scenarios, and further seeds on what none of them has shown."""
    waits: dict[str, Wait] = {}
    for scenario in SCENARIOS:
        print(scenario, file=sys.stderr, flush=True)
        for wait, how in measure(scenario, 0).items():
            entry = waits.setdefault(wait, Wait())
            entry.scenarios.append(scenario)
            entry.shown += [(scenario, 0, how)] if how else []
    for wait, entry in waits.items():
        for seed in range(1, SEEDS):
            if entry.shown:
                break
            line = wait.removeprefix("torch: ").split()[0]
            for scenario in entry.scenarios:
                how = measure(scenario, seed, "--only", line).get(wait)
                entry.shown += [(scenario, seed, how)] if how else []
    return waits


def page(waits: dict[str, Wait]) -> Iterator[str]:
    """Yield the section in Markdown."""
    git = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    yield HEADING
    yield f"`tests/virtual_gpu/left_out_table.py --keep` on {time.strftime('%Y-%m-%d')} at"
    yield f"`{commit}`: rank 0 of four, two steps. Each line that waits was left out in turn, and"
    yield f"the scenario ran again, under {SEEDS} seeds at most. With all waits no scenario says"
    yield "anything. Numbers are compared after steps of an optimizer alone.\n"
    yield f"{sum(bool(entry.shown) for entry in waits.values())} of {len(waits)} lines are shown."
    yield f"{len(SCENARIOS)} scenarios were tried.\n"
    yield "| line that waits | scenarios | shows it | first by |"
    yield "| --- | --- | --- | --- |"
    for wait, entry in sorted(waits.items()):
        where, seed, how = entry.shown[0] if entry.shown else ("", 0, "nothing")
        first = f"{where}, seed {seed}" if where else ""
        shows = f"{len(entry.shown)}" if not seed else "1"
        yield f"| `{wait}` | {shows} of {len(entry.scenarios)} | {how} | {first} |"


def main() -> None:
    """Print the table, or write it."""
    waits = table()
    text = "\n".join(page(waits))
    print(text)
    if "--keep" in sys.argv[1:]:
        before, heading, rest = RECORD.read_text().partition(HEADING)
        _, end, kept = rest.partition(END)
        if not (heading and end):
            raise RuntimeError(f"{RECORD} lacks {HEADING!r} or {END!r}")
        RECORD.write_text(f"{before}{text}\n\n{END}{kept}")


if __name__ == "__main__":
    main()
