"""What importing and installing a layer may cost, and what it does cost.

`python -m tasks.release.budgets` measures in the environment at hand and fails above a budget;
`--keep` writes docs/records/budgets.md. The budgets are in `tasks/release/budgets.toml`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT
from tasks.clean_install import build_wheels, unpack
from tasks.release.packages import git

# Costs of the import beyond torch's own, which every user pays anyway: processor time, the best of
# some runs, since whatever else the machine does only adds to it.
PROBE = """
import sys, time
import torch, torch.distributed
before = set(sys.modules)
began = time.process_time()
import lamina.{layer}
print(time.process_time() - began, len(set(sys.modules) - before))
"""


PAGE = """\
# What a layer costs to import and to install

Made by `python3 noxfile.py -s budgets -- --keep` on {date} at commit `{commit}`, {machine}; don't
edit. In brackets the budget. Processor time (the best of five runs) and modules are those beyond
torch's own, with the layers beneath.

| layer | import | modules | installed |
| --- | --- | --- | --- |
{rows}
"""


@dataclass(frozen=True)
class Cost:
    """What one layer costs.

    Args:
        milliseconds: of a processor, for its import in a process that has torch.
        modules: that its import adds.
        kilobytes: of its own installed files, byte code left out.
    """

    milliseconds: float
    modules: int
    kilobytes: float


def installed_kilobytes(layer: str) -> float:
    """Return the size of what the layer's wheel installs."""
    with tempfile.TemporaryDirectory(prefix="lamina-size-") as name:
        site = unpack(build_wheels([layer], Path(name) / "wheels"), Path(name) / "site")
        return sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1024


def measure(layer: str, repeats: int = 5) -> Cost:
    """Import the layer in fresh processes, and build its wheel."""
    source = PROBE.format(layer=layer)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times, modules = [], 0
    for _ in range(repeats):
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        seconds, count = done.stdout.split()
        times.append(float(seconds))
        modules = int(count)
    return Cost(1000 * min(times), modules, installed_kilobytes(layer))


def over(cost: Cost, budget: Cost) -> list[str]:
    """Return what exceeds the budget, a sentence each."""
    return [
        f"{name}: {getattr(cost, name):.0f}, the budget is {getattr(budget, name):.0f}"
        for name in ("milliseconds", "modules", "kilobytes")
        if getattr(cost, name) > getattr(budget, name)
    ]


def budgets() -> dict[str, Cost]:
    """Return layer -> its budget."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {layer: Cost(**values) for layer, values in table.items()}


def main(words: Sequence[str]) -> int:
    """Measure, print, keep, and return 1 if a budget is exceeded."""
    rows, failed = [], False
    for layer in LAYERS:
        cost, budget = measure(layer), budgets()[layer]
        complaints = over(cost, budget)
        failed |= bool(complaints)
        cells = (
            f"{cost.milliseconds:.0f} ms ({budget.milliseconds:.0f})",
            f"{cost.modules} ({budget.modules})",
            f"{cost.kilobytes:.0f} KiB ({budget.kilobytes:.0f})",
        )
        rows.append(f"| {layer} | " + " | ".join(cells) + " |")
        print(rows[-1], "; ".join(complaints), flush=True)
    if "--keep" in words:
        path = ROOT / "docs" / "records" / "budgets.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        commit = git(ROOT, "rev-parse", "--short=12", "HEAD")
        path.write_text(
            PAGE.format(
                date=time.strftime("%Y-%m-%d"),
                commit=commit,
                machine=f"{os.cpu_count()} cores, Python {platform.python_version()}",
                rows="\n".join(rows),
            )
        )
        print(f"wrote {path.relative_to(ROOT)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
