"""`python3 noxfile.py -s gpu` and `-s validate`, by the standard library alone.

They need no nox and no network where LAMINA_PYTHON names a Python that has torch: that one runs
everything, with the packages on its path. Otherwise `.nox/env` is made, as for every other task.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.bootstrap import HOUSE, LAYERS, ROOT
from tasks.hardware.plan import Step, choose, gpu, validate
from tasks.hardware.report import Report
from tasks.hardware.running import Outcome, run_all, run_step

PLANS = {"gpu": (gpu, 9.0), "validate": (validate, 240.0)}  # and minutes for all of it
RECORD = ROOT / "docs" / "records" / "hardware.json"
DRIVER = Path("/dev/nvidiactl")
VIRTUAL_GPUS = {"gpu": 1, "validate": 8}

PROBE = """
import importlib.metadata as m, json, platform, torch
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return "none"
names = ("triton", "transformers", "tyro", "megatron-fsdp", "pytest", "hypothesis")
cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
found = {"Python": platform.python_version(), "torch": torch.__version__,
         "CUDA": str(torch.version.cuda), **{name: version(name) for name in names}}
print(json.dumps({"cards": cards, "versions": found}))
"""


def main(name: str, words: Sequence[str]) -> int:
    """Run a plan; return 1 if a step failed or nothing can run."""
    options = parse(name, words)
    if not options.rehearse and not options.plan and (reason := no_driver()):
        print(f"{name}: {reason}. Without a GPU there is `-- --rehearse`.", file=sys.stderr)
        return 1
    make, _ = PLANS[name]
    try:
        choose(make(8), options.parts)  # before anything is made or imported
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if options.plan:
        show(make(8), choose(make(8), options.parts), options.rehearse)
        return 0
    virtual = options.rehearse and virtual_gpu()
    python = virtual or interpreter()
    variables = environment()
    if virtual:
        devices = str(VIRTUAL_GPUS[name])
        # Ranks are processes here, and open each other's memory.
        variables |= {"VGPU_VALUES": "unknown", "VGPU_DEVICES": devices, "VGPU_SHARE": "1"}
    machine, cards = look(python, variables)
    if not cards and not options.rehearse:
        torch, cuda = machine["torch"], machine["CUDA"]
        print(f"{name}: torch {torch} (CUDA {cuda}) of {python} sees no GPU", file=sys.stderr)
        return 1
    steps = choose(make(cards), options.parts)
    return run_plan(name, steps, options, python, machine, cards, variables)


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Return what stands behind `-s NAME --`."""
    parser = argparse.ArgumentParser(f"noxfile.py -s {name} --", allow_abbrev=False)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="parts or numbers of steps; all if none"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="on a virtual GPU, or tiny on a CPU"
    )
    parser.add_argument("--plan", action="store_true", help="show the commands and end")
    parser.add_argument("--minutes", type=float, default=PLANS[name][1], help="for all together")
    parser.add_argument("--out", type=Path, default=ROOT / ".hardware", help="for the reports")
    parser.add_argument("--keep", action="store_true", help="write docs/records/hardware.json too")
    return parser.parse_args(words)


def no_driver() -> str:
    """Return why no GPU can be here, or "". It takes no time: torch is not asked."""
    return "" if DRIVER.exists() else f"no NVIDIA driver is loaded ({DRIVER} does not exist)"


def show(plan: Sequence[Step], steps: Sequence[Step], rehearsal: bool) -> None:
    """Print steps of a plan, with their numbers in it."""
    for step in steps:
        words = shlex.join(step.command(rehearsal, "python", "OUT"))
        number = plan.index(step) + 1
        print(f"{number:>3} {step.part:<12}{step.limit:>5} s  {step.name}\n{'':<25}{words}")


def interpreter() -> str:
    """Return the Python that runs the steps; make `.nox/env` if none is named."""
    if named := os.environ.get("LAMINA_PYTHON", ""):
        found = shutil.which(named)
        if found is None:
            sys.exit(f"LAMINA_PYTHON={named} is no executable; give a Python that has torch")
        return found
    subprocess.run([sys.executable, str(ROOT / "noxfile.py"), "-s", "env"], check=True, cwd=ROOT)
    return str(HOUSE / "env" / "bin" / "python")


def virtual_gpu() -> str:
    """Return the Python of the virtual GPU's environment, or "" where there is none."""
    python = HOUSE / "virtual-gpu" / "bin" / "python"
    return str(python) if python.exists() and "LAMINA_PYTHON" not in os.environ else ""


def environment() -> dict[str, str]:
    """Return the variables of every step: the packages on the path, and no cut output."""
    dropped = ("LAMINA_CLOSING_LINE", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    sources = [ROOT / "packages" / layer / "src" for layer in LAYERS]
    paths = [*map(str, sources), str(ROOT / "testing" / "src"), kept.get("PYTHONPATH", "")]
    # The plugin of the test bed is named on the command line, as it may not be installed.
    return {
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are here; the machine's name may lead nowhere
        **kept,
        "PYTHONPATH": ":".join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def look(python: str, variables: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """Return what the machine is, in words, and how many GPUs torch sees."""
    answer = subprocess.run(
        [python, "-c", PROBE], capture_output=True, text=True, env=dict(variables), cwd=ROOT
    )
    if answer.returncode:
        sys.exit(f"{python} cannot import torch:\n{answer.stderr.strip()}")
    found = json.loads(answer.stdout.splitlines()[-1])
    cards = found["cards"]
    words = [f"{cards.count(card)} x {card}" for card in dict.fromkeys(cards)]
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT) if has_git() else None
    machine = {
        "GPU": ", ".join(words) or "none",
        "cores": str(os.cpu_count()),
        "date": time.strftime("%Y-%m-%d"),
        "commit": (commit and commit.stdout.strip()) or "unknown",
        **found["versions"],
    }
    return machine, len(cards)


def has_git() -> bool:
    """Whether the tree is a clone and git is there to ask."""
    return shutil.which("git") is not None and (ROOT / ".git").exists()


def run_plan(
    name: str,
    steps: Sequence[Step],
    options: argparse.Namespace,
    python: str,
    machine: dict[str, str],
    cards: int,
    variables: Mapping[str, str] | None = None,
) -> int:
    """Run the steps, with a report after each; return 1 if one failed."""
    variables = environment() if variables is None else variables
    virtual = "VGPU_DEVICES" in variables
    folder = options.out.resolve() / (f"{name}-rehearsal" if options.rehearse else name)
    shutil.rmtree(folder, ignore_errors=True)  # the main job would go on where the last one ended
    (folder / "logs").mkdir(parents=True)
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    title = f"Rehearsal of `{name}`" if options.rehearse else f"What `{name}` found"
    report = Report(title, folder, machine, steps, before)
    report.write()
    numbers = {step.name: number for number, step in enumerate(steps, 1)}

    def run(step: Step, limit: float) -> Outcome:
        print(f"[{numbers[step.name]}/{len(steps)}] {step.part}: {step.name} ", end="", flush=True)
        small = options.rehearse and (step.arithmetic or not virtual)
        words = step.command(small, python, str(folder))
        log = folder / "logs" / f"{numbers[step.name]:02}.txt"
        settings = {**variables}
        if virtual and step.arithmetic:
            settings |= {"VGPU_COMPUTE": "at-once", "VGPU_VALUES": ""}
        elif virtual and not step.is_pytest:
            # Without arithmetic a script asserts in vain; tests tell what they say of values apart.
            settings["PYTHONOPTIMIZE"] = "1"
        return run_step(step, words, limit, log, settings, skips_count=options.rehearse)

    # A step's processes are a session of their own, which a signal to this process leaves alone.
    before_us = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for outcome in run_all(
            steps, run, seconds=60 * options.minutes, gpus=cards, rehearsal=options.rehearse
        ):
            report.outcomes.append(outcome)
            report.write()
            place = "" if outcome.seconds else f"{outcome.step.part}: {outcome.step.name} "
            print(f"{place}{outcome.state}, {outcome.seconds:.0f} s {outcome.reason}", flush=True)
    finally:
        signal.signal(signal.SIGTERM, before_us)
    print("\n".join(["", *report.news(), "", report.summary(), str(folder / "report.md")]))
    if options.keep and not options.rehearse:
        RECORD.write_text(json.dumps(report.record(), indent=1, sort_keys=True) + "\n")
    return int(any(outcome.state in ("failed", "stopped") for outcome in report.outcomes))
