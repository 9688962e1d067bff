"""Kill a job, resume it on other ranks under another strategy, and end at the same bits.

    python benchmarks/kills.py [--kills 5] [--steps 20]

The job is that of `bits.py` with `reproducible=True` and a smaller model. It saves after every
step, in the background. A moment after a checkpoint appears, all ranks are ended with SIGKILL, or
one of them, and then the others must end by themselves. The job starts again on another number of
ranks, under another strategy, and goes on from the newest checkpoint that is whole. In the end one
SHA-256 of all parameters is compared with that of a job that was never interrupted. Moments, ranks
and strategies follow from `--seed`. A step's 12 sequences are cut unevenly over 5 ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from bits import Job, by_lamina, sha256, train_step
from local_ranks import environments

from lamina.checkpoint import CheckpointManager
from lamina.mesh import init_distributed

LIMIT = 60  # seconds that survivors of a kill have for their end
JOB = Job(width=48, layers=2)  # starts and saves are to take longer than steps
SYSTEMS = {
    "strategy 0": {"zero_dp_strategy": 0},
    "strategy 1": {"zero_dp_strategy": 1},
    "strategy 2": {"zero_dp_strategy": 2},
    "strategy 3": {"zero_dp_strategy": 3},
    "HSDP": {"zero_dp_strategy": 3, "replicas": 2},
    "HFSDP": {"zero_dp_strategy": 3, "replicas": 2, "outer_dp_sharding_strategy": 1},
}


def run_rank(system: str, folder: Path, steps: int, environment: dict[str, str]) -> None:
    """Be one rank: go on where the newest checkpoint ends."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with init_distributed() as runtime:
        built = by_lamina(JOB, **SYSTEMS[system])
        state = {"model": built.model, "optimizer": built.optimizer}
        manager = CheckpointManager(folder, keep_last=2, async_save=True, progress=False)
        done = manager.restore(state, default=0)
        for number in range(done, steps):
            train_step(built, runtime, number, JOB.sequences)
            manager.save(number + 1, state)
        manager.close()
        digest = sha256(built.whole())
        if runtime.is_main:
            (folder / "digest").write_text(digest)


def start(system: str, ranks: int, folder: Path, settings: argparse.Namespace) -> list[BaseProcess]:
    """Fork the ranks of a job from this process, which has imported torch and used none of it."""
    fork: Any = multiprocessing.get_context("fork")
    started = [
        fork.Process(target=run_rank, args=(system, folder, settings.steps, environment))
        for environment in environments(ranks)
    ]
    for rank in started:
        rank.start()
    return started


def finish(started: list[BaseProcess], folder: Path) -> str:
    for rank in started:
        rank.join()
    if any(rank.exitcode for rank in started):
        raise SystemExit(f"a rank failed: exit codes {[rank.exitcode for rank in started]}")
    return (folder / "digest").read_text()


def newest(folder: Path) -> int:
    """The step of the newest whole checkpoint; only the job has a manager, which deletes files."""
    return max((int(one.parent.name[5:]) for one in folder.glob("step-*/manifest.json")), default=0)


def killed(
    system: str, ranks: int, folder: Path, settings: argparse.Namespace, choices: random.Random
) -> bool:
    """Start the job and kill it after some more checkpoints; False if it ended before."""
    wanted = newest(folder) + choices.randint(1, max(1, settings.steps // (2 * settings.kills)))
    started = start(system, ranks, folder, settings)
    while newest(folder) < wanted:
        if any(rank.exitcode is not None for rank in started):
            finish(started, folder)
            return False
        time.sleep(0.05)
    time.sleep(choices.uniform(0, 1))
    ended = all(rank.exitcode is not None for rank in started)
    alone = ranks > 1 and choices.random() < 0.5
    struck = [choices.choice(started)] if alone else started
    for rank in struck:
        rank.kill()
    begin = time.monotonic()
    for rank in started:
        rank.join(LIMIT)
        if rank.exitcode is None:
            raise SystemExit(f"a rank still runs {LIMIT} s after a kill of another one")
    what = f"one, the others ended after {time.monotonic() - begin:.1f} s" if alone else "all"
    print(f"kill of {what}: {system} on {ranks} ranks, checkpoint {newest(folder)} is whole",
          flush=True)  # fmt: skip
    return not ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    choices = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as often:
        wanted = finish(start("strategy 3", 2, Path(once), settings), Path(once))
        print(f"never interrupted, strategy 3 on 2 ranks, step {settings.steps}: {wanted}")
        kills = 0
        for _ in range(settings.kills):
            system = choices.choice(list(SYSTEMS))
            ranks = choices.choice([2, 4] if "replicas" in SYSTEMS[system] else [1, 2, 3, 4, 5])
            kills += killed(system, ranks, Path(often), settings, choices)
        found = finish(start("strategy 1", 1, Path(often), settings), Path(often))
        print(f"killed {kills} times, ended by strategy 1 on 1 rank: {found}")
    if found != wanted:
        raise SystemExit("the parameters differ")


if __name__ == "__main__":
    main()
