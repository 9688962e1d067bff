"""The gallery of faults, played and written down: `python tests/faults/gallery.py [--write]`.

Each line is a fault, the phase it happens in and a wrapper. torch's FSDP2 plays some of them
beside, in the same run. `--write` writes docs/faults.md; with `--only` it replaces, or adds, the
tables of these faults, and says so beside them.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from play import Played, play

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"

ALL = ("ddp", "ddp_sharded", "zero1", "zero3", "shard_module")
SOME = ("ddp", "zero3")
GALLERY = {
    ("kill", "first_use"): ("ddp", "zero3"),
    ("kill", "forward"): ALL,
    ("kill", "backward"): ("ddp", "zero3", "shard_module"),
    ("kill", "step"): ("ddp_sharded", "zero3"),
    ("kill", "save"): ("zero3",),
    ("kill", "evaluation"): ("zero3",),
    ("exit0", "step"): SOME,
    ("exception", "forward"): ("ddp", "zero3"),
    ("exception", "backward"): ("zero3",),
    ("exception", "save"): ("zero3",),
    ("stop", "forward"): ("ddp", "zero3"),
    ("sleep", "step"): ("zero3",),
    ("sleep", "backward"): ("shard_module",),
    ("width", "wrap"): ALL,
    ("order", "wrap"): SOME,
    ("dtype", "wrap"): ("ddp", "shard_module"),
    ("frozen", "wrap"): ("zero1", "zero3"),
    ("optimizer", "wrap"): ("ddp_sharded", "zero3"),
    ("lr", "wrap"): ("ddp", "shard_module"),
    ("no_step", "step"): ("ddp", "ddp_sharded", "zero3"),
    ("lr_later", "step"): ("ddp", "zero3"),
    ("nan", "step"): ("ddp", "ddp_sharded", "zero1", "zero3"),
    ("skip_unit", "step"): ("zero3",),
    ("evaluate_alone", "step"): ("zero3",),
    ("directory", "save"): ("zero3",),
    ("save_step", "save"): ("ddp",),
    ("disk", "save"): SOME,
    ("kill", "before_wrap"): ("zero3",),
}
BESIDE_TORCH = {
    ("kill", "forward"),
    ("exit0", "step"),
    ("exception", "forward"),
    ("stop", "forward"),
    ("width", "wrap"),
    ("order", "wrap"),
    ("lr", "wrap"),
    ("no_step", "step"),
    ("nan", "step"),
    ("evaluate_alone", "step"),
}

WORDS = {
    "kill": "kill -9",
    "exit0": "exit with status 0",
    "exception": "an exception",
    "stop": "SIGSTOP",
    "sleep": "asleep in the user's code",
    "width": "another width",
    "order": "parameters registered in another order",
    "dtype": "another dtype",
    "frozen": "frozen parameters",
    "optimizer": "another optimizer",
    "lr": "another learning rate",
    "no_step": "no optimizer.step()",
    "nan": "NaN in the batch",
    "disk": "no room for the file",
    "lr_later": "the learning rate changes on one rank",
    "skip_unit": "a unit does not run",
    "evaluate_alone": "an evaluation on one rank only",
    "directory": "another directory of checkpoints",
    "save_step": "another step is saved",
}

INTRODUCTION = """\
One of two ranks misbehaves. Each table shows what the other rank, or both, were told. The columns
are the time from the fault to the first message, and the time until all ranks had ended. Of ranks
that are stopped or asleep, the second time is the one until they were told of. Then come the exit
statuses of rank 0 and rank 1, and the message. torch's FSDP2 played some of the faults in the same
run. The soft limit of the watchdog was 3 s (by default it is 30 s), and a job had 45 s from the
fault on. Status 70 is the watchdog's: the rank waited in code that cannot raise.
[Silent corruption](corruption.md) shows single bits that flip.""".splitlines()


def cells():
    """Every line: wrapper, fault, phase."""
    return [(w, fault, phase) for (fault, phase), wrappers in GALLERY.items() for w in wrappers]


def is_told(played: Played) -> bool:
    """Whether somebody was told of the other rank, and nothing hung."""
    paused = played.fault in ("stop", "sleep")
    ended = paused or None not in played.statuses
    return bool(ended and played.told is not None and "rank 1" in played.message)


def line_of(played: Played) -> str:
    """A row of the page."""
    message = played.message.replace(f"{ROOT}/", "")
    message = message if len(message) < 330 else message[:330] + " ..."
    statuses = ", ".join("hung" if one is None else str(one) for one in played.statuses)
    if played.fault in ("stop", "sleep") and played.told is not None:
        statuses = "the others wait"
    elif played.statuses == [0, 0]:
        statuses = "0, 0: nobody noticed"
    told = "never" if played.told is None else f"{played.told:.1f} s"
    # As code, since these are a program's words.
    message = message.replace("|", "/").replace("`", "'") or "(nothing)"
    return f"| {played.wrapper} | {told} | {played.seconds:.1f} s | {statuses} | `{message}` |"


def commit() -> str:
    """The commit that is played."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def tables(played: list[Played]) -> dict[str, list[str]]:
    """The table of each fault and phase, by its title."""
    found = {}
    for fault, phase in GALLERY:
        rows = [line_of(one) for one in played if (one.fault, one.phase) == (fault, phase)]
        if rows:
            head = [
                "| wrapper | told after | over after | exit statuses | message |",
                "| --- " * 5 + "|",
            ]
            where = "when the wrapper is made" if phase == "wrap" else phase.replace("_", " ")
            found[f"## {WORDS[fault]}: {where}"] = [*head, *rows]
    return found


def good_of(played: list[Played]) -> str:
    """How many were told, in words."""
    mine = [one for one in played if one.wrapper != "torch_fsdp2"]
    return f"{sum(map(is_told, mine))} of {len(mine)}"


def page(played: list[Played], begun: str) -> str:
    """docs/faults.md."""
    software = f"torch {torch.__version__}, Python {platform.python_version()}"
    lines = [
        "# A gallery of faults",
        "",
        *INTRODUCTION,
        "",
        f"{good_of(played)} faults were told with the rank and ended in time. Written by",
        f"`python tests/faults/gallery.py --write` at {commit()}, {begun}, {software}, gloo,",
        "2 processes on a busy machine of 2 cores (times are upper bounds).",
    ]
    for title, table in tables(played).items():
        lines += ["", title, "", *table]
    return "\n".join(lines) + "\n"


def amended(text: str, played: list[Played], begun: str) -> str:
    """The page with the tables of some faults from a later run, which each of them names."""
    for title, table in tables(played).items():
        of_table = [one for one in played if line_of(one) in table]
        run = f"Played by themselves at {commit()}, {begun}: {good_of(of_table)} were told."
        before, _, rest = text.partition(f"\n{title}\n")
        _, found, after = rest.partition("\n## ")
        section = "\n".join(["", title, "", run, "", *table, ""])
        text = before + section + (found + after if found else "")
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/faults.md")
    parser.add_argument("--only", nargs="+", choices=WORDS, default=list(WORDS), help="faults")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are played side by side")
    given = parser.parse_args()
    begun = time.strftime("%Y-%m-%d")
    asked = []
    for (fault, phase), wrappers in GALLERY.items():
        if fault not in given.only:
            continue
        beside = ("torch_fsdp2",) if (fault, phase) in BESIDE_TORCH else ()
        asked += [(wrapper, fault, phase) for wrapper in (*wrappers, *beside)]
    found: list[Played] = []
    text, some = PAGE.read_text(), len(given.only) < len(WORDS)
    with ThreadPoolExecutor(given.jobs) as pool:
        for played in pool.map(lambda one: play(*one, limit=45), asked):
            found.append(played)
            print(line_of(played), flush=True)
            if given.write:
                PAGE.write_text(amended(text, found, begun) if some else page(found, begun))


if __name__ == "__main__":
    main()
