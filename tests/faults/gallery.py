"""The gallery of faults, played and written down: `python tests/faults/gallery.py [--write]`.

Each line is a fault, the phase it happens in and a wrapper. torch's FSDP2 plays some of them
beside, in the same run. `--write` writes docs/faults.md; with `--only` it replaces, or adds, the
tables of these faults, and says so beside them.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from between_hosts import HOST_FAULTS, SURVIVED, PlayedOnHosts, play_on_hosts
from play import Played, play

sys.path.append(str(Path(__file__).resolve().parents[1]))
from source_trees import commit

from lamina_testing.netns import unavailable

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "faults.md"

ALL = ("ddp", "ddp_sharded", "zero1", "zero3", "shard_module")
SOME = ("ddp", "zero3")
WRAPPERS = ("ddp", "zero3", "shard_module")
PHASES = ("before_wrap", "first_use", "forward", "backward", "step", "save", "evaluation")
GALLERY = {
    **{("kill", phase): WRAPPERS for phase in PHASES},
    ("kill", "forward"): ALL,
    ("kill", "step"): (*WRAPPERS, "ddp_sharded"),
    **{("exception", phase): WRAPPERS for phase in PHASES},
    ("exit0", "step"): SOME,
    ("stop", "forward"): WRAPPERS,
    ("dead_store", "step"): SOME,
    ("stranger", "before_wrap"): SOME,
    ("sleep", "step"): ("zero3",),
    ("sleep", "backward"): ("shard_module",),
    ("width", "wrap"): ALL,
    ("order", "wrap"): SOME,
    ("dtype", "wrap"): ("ddp", "shard_module"),
    ("frozen", "wrap"): ("zero1", "zero3"),
    ("optimizer", "wrap"): ("ddp_sharded", "zero3"),
    ("lr", "wrap"): ("ddp", "shard_module"),
    ("mesh", "wrap"): ("zero3",),
    ("no_step", "step"): ("ddp", "ddp_sharded", "zero3"),
    ("lr_later", "step"): ("ddp", "zero3"),
    ("nan", "step"): ("ddp", "ddp_sharded", "zero1", "zero3"),
    ("skip_unit", "step"): ("zero3",),
    ("evaluate_alone", "step"): ("zero3",),
    ("directory", "save"): ("zero3",),
    ("save_step", "save"): ("ddp",),
    ("disk", "save"): SOME,
}
BESIDE_TORCH = {
    *(("kill", phase) for phase in PHASES),
    *(("exception", phase) for phase in PHASES),
    ("exit0", "step"),
    ("dead_store", "step"),
    ("stranger", "before_wrap"),
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
    "dead_store": "the store dies",
    "stranger": "a stranger on the sockets",
    "sleep": "asleep in the user's code",
    "width": "another width",
    "order": "parameters registered in another order",
    "dtype": "another dtype",
    "frozen": "frozen parameters",
    "optimizer": "another optimizer",
    "lr": "another learning rate",
    "mesh": "another mesh",
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
[Silent corruption](corruption.md) shows single bits that flip.
The last tables are of HSDP over two network namespaces, with a watchdog of the default limits, and
a job had 60 s, and 90 s over the slow link. There the first times are those of each host. Every job
between hosts is compared with one to which nothing happened, bit for bit.""".splitlines()


HARMLESS = ("stranger",)
"""What is to change nothing."""


def cells():
    """Every line: wrapper, fault, phase."""
    return [(w, fault, phase) for (fault, phase), wrappers in GALLERY.items() for w in wrappers]


def is_told(played: Played) -> bool:
    """Whether somebody was told of the other rank, and nothing hung."""
    if played.fault in HARMLESS:
        return played.statuses == [0, 0]
    paused = played.fault in ("stop", "sleep")
    ended = paused or None not in played.statuses
    blamed = "the store" if played.fault == "dead_store" else "rank 1"
    return bool(ended and played.told is not None and blamed in played.message)


def line_of(played: Played) -> str:
    """A row of the page."""
    message = played.message.replace(f"{ROOT}/", "")
    message = message if len(message) < 330 else message[:330] + " ..."
    statuses = ", ".join("hung" if one is None else str(one) for one in played.statuses)
    if played.fault in ("stop", "sleep") and played.told is not None:
        statuses = "the others wait"
    elif played.statuses == [0, 0]:
        statuses = f"0, 0: nobody {'was harmed' if played.fault in HARMLESS else 'noticed'}"
    told = "never" if played.told is None else f"{played.told:.1f} s"
    # As code, since these are a program's words.
    message = message.replace("|", "/").replace("`", "'") or "(nothing)"
    return f"| {played.wrapper} | {told} | {played.seconds:.1f} s | {statuses} | `{message}` |"


def line_of_hosts(played: PlayedOnHosts) -> str:
    """A row of the page: times by host."""
    told = [one for one in played.told if one is not None]
    statuses = ", ".join("hung" if one is None else str(one) for one in played.statuses)
    if played.resumed is not None:
        statuses += f"; went on at step {played.begun} on the other host"
    elif played.fault in SURVIVED:
        statuses += ": it went on"
    message = next((one for one in played.messages if "host node" in one), "")
    message = (message or next(filter(None, played.messages), "(nothing)")).replace("|", "/")
    times = " and ".join(f"{one:.1f} s" for one in told) or "never"
    return f"| {played.wrapper} | {times} | {played.seconds:.1f} s | {statuses} | `{message}` |"


def is_told_on_hosts(played: PlayedOnHosts, digest: str) -> bool:
    """Whether each host that is left was told within 30 s, and the bits are those of no fault."""
    named = {"slow_rank": "rank 3", "slow_link": "the network is slow"}
    if played.fault in named:  # they take more steps, so the bits are others
        return named[played.fault] in played.messages[0]
    told = [one for one in played.told if one is not None]
    kept = {played.resumed, *played.digests} - {None} == {digest}
    needed = len(played.told) - played.fault.startswith("kill")
    return kept and (played.fault in SURVIVED or (len(told) >= needed and max(told) < 30))


HEAD = ["| wrapper | told after | over after | exit statuses | message |", "| --- " * 5 + "|"]


def tables(played: list[Played], on_hosts: list[PlayedOnHosts]) -> dict[str, list[str]]:
    """The table of each fault and phase, by its title."""
    found = {}
    for fault, phase in GALLERY:
        rows = [line_of(one) for one in played if (one.fault, one.phase) == (fault, phase)]
        if rows:
            where = "when the wrapper is made" if phase == "wrap" else phase.replace("_", " ")
            found[f"## {WORDS[fault]}: {where}"] = [*HEAD, *rows]
    for fault, words in HOST_FAULTS.items():
        rows = [line_of_hosts(one) for one in on_hosts if one.fault == fault]
        if rows:
            found[f"## {words}: 2 hosts of 2 ranks"] = [*HEAD, *rows]
    return found


def good_of(played: list[Played], on_hosts: list[PlayedOnHosts]) -> str:
    """How many were told, in words."""
    (digest, *_) = [*(one for each in on_hosts for one in each.digests), ""]
    good = [is_told(one) for one in played if one.wrapper != "torch_fsdp2"]
    good += [is_told_on_hosts(one, digest) for one in on_hosts if one.wrapper != "torch_fsdp2"]
    return f"{sum(good)} of {len(good)}"


def page(played: list[Played], on_hosts: list[PlayedOnHosts], begun: str, jobs: int) -> str:
    """docs/faults.md."""
    software = f"torch {torch.__version__}, Python {platform.python_version()}"
    lines = [
        "# A gallery of faults",
        "",
        *INTRODUCTION,
        "",
        f"{good_of(played, on_hosts)} faults were told with the rank and ended in time, or did no "
        "harm.",
        f"Written by `python tests/faults/gallery.py --write --jobs {jobs}` at {commit()},",
        f"{begun}, {software}, gloo, on a machine of {os.cpu_count()} cores.",
    ]
    for title, table in tables(played, on_hosts).items():
        lines += ["", title, "", *table]
    return "\n".join(lines) + "\n"


def amended(text: str, played: list[Played], on_hosts: list[PlayedOnHosts], begun: str) -> str:
    """The page with the tables of some faults from a later run, which each of them names."""
    for title, table in tables(played, on_hosts).items():
        of_table = [one for one in played if line_of(one) in table]
        on_these = [one for one in on_hosts if line_of_hosts(one) in table]
        good = good_of(of_table, on_these)
        run = f"Played by themselves at {commit()}, {begun}: {good} were told."
        before, _, rest = text.partition(f"\n{title}\n")
        _, found, after = rest.partition("\n## ")
        section = "\n".join(["", title, "", run, "", *table, ""])
        text = before + section + (found + after if found else "")
    return text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/faults.md")
    names = [*WORDS, *HOST_FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="faults")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are played side by side")
    given = parser.parse_args()
    begun = time.strftime("%Y-%m-%d")
    asked = []
    for (fault, phase), wrappers in GALLERY.items():
        if fault not in given.only:
            continue
        beside = ("torch_fsdp2",) if (fault, phase) in BESIDE_TORCH else ()
        asked += [(wrapper, fault, phase) for wrapper in (*wrappers, *beside)]
    between = [] if unavailable() else [fault for fault in HOST_FAULTS if fault in given.only]
    found: list[Played] = []
    on_hosts: list[PlayedOnHosts] = []
    text, some = PAGE.read_text(), len(given.only) < len(names)

    def write() -> None:
        if given.write:
            now = found, on_hosts, begun
            PAGE.write_text(amended(text, *now) if some else page(*now, given.jobs))

    with ThreadPoolExecutor(given.jobs) as pool:
        for played in pool.map(lambda one: play(*one, limit=45), asked):
            found.append(played)
            print(line_of(played), flush=True)
            write()
    for fault in between:
        beside = ("torch_fsdp2",) if fault in ("cut_link", "kill_host") else ()
        for wrapper in ("hsdp", *beside):
            on_hosts.append(play_on_hosts(fault, wrapper))
            print(line_of_hosts(on_hosts[-1]), flush=True)
            write()


if __name__ == "__main__":
    main()
