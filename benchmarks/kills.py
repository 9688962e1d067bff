"""Kill a job, resume it on other ranks under another strategy, and end at the same bits.

    python benchmarks/kills.py [--kills 5] [--steps 20]

The job is that of `bits.py` with `reproducible=True`. It saves after every step, in the background.
A moment after a checkpoint appears, all ranks are ended with SIGKILL. The job starts again on
another number of ranks, under another strategy, and goes on from the newest checkpoint that is
whole. In the end one SHA-256 of all parameters is compared with that of a job that was never
interrupted. Moments, ranks and strategies follow from `--seed`.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bits import by_lamina, sha256, train_step
from local_ranks import environments

from lamina.checkpoint import CheckpointManager
from lamina.mesh import init_distributed

SYSTEMS = {
    "strategy 0": {"zero_dp_strategy": 0},
    "strategy 1": {"zero_dp_strategy": 1},
    "strategy 2": {"zero_dp_strategy": 2},
    "strategy 3": {"zero_dp_strategy": 3},
    "HSDP": {"zero_dp_strategy": 3, "replicas": 2},
    "HFSDP": {"zero_dp_strategy": 3, "replicas": 2, "outer_dp_sharding_strategy": 1},
}


def run_rank(settings: argparse.Namespace) -> None:
    """Be one rank: go on where the newest checkpoint ends."""
    torch.set_num_threads(1)
    with init_distributed() as runtime:
        built = by_lamina(runtime.world_size, **SYSTEMS[settings.system])
        state = {"model": built.model, "optimizer": built.optimizer}
        manager = CheckpointManager(settings.directory, keep_last=2, async_save=True)
        done = manager.restore(state, default=0)
        for number in range(done, settings.steps):
            train_step(built, runtime, number)
            manager.save(number + 1, state)
        manager.close()
        digest = sha256(built.whole())
        if runtime.is_main:
            Path(settings.directory, "digest").write_text(digest)


def start(
    system: str, ranks: int, folder: Path, settings: argparse.Namespace
) -> list[subprocess.Popen[bytes]]:
    words = [__file__, "--steps", str(settings.steps), "--system", system]
    program = [sys.executable, *words, "--directory", str(folder)]
    return [subprocess.Popen(program, env=env) for env in environments(ranks)]


def finish(started: list[subprocess.Popen[bytes]], folder: Path) -> str:
    codes = [rank.wait() for rank in started]
    if any(codes):
        raise SystemExit(f"a rank failed: exit codes {codes}")
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
        if all(rank.poll() is not None for rank in started):
            return False
        time.sleep(0.05)
    time.sleep(choices.uniform(0, 1))
    ended = all(rank.poll() is not None for rank in started)
    for rank in started:
        rank.send_signal(signal.SIGKILL)
    for rank in started:
        rank.wait()
    print(f"kill: {system} on {ranks} ranks, checkpoint {newest(folder)} is whole", flush=True)
    return not ended


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.system:
        run_rank(settings)
        return
    choices = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as often:
        wanted = finish(start("strategy 3", 2, Path(once), settings), Path(once))
        print(f"never interrupted, strategy 3 on 2 ranks, step {settings.steps}: {wanted}")
        kills = 0
        for _ in range(settings.kills):
            system = choices.choice(list(SYSTEMS))
            ranks = choices.choice([2, 4] if "replicas" in SYSTEMS[system] else [1, 2, 3, 4])
            kills += killed(system, ranks, Path(often), settings, choices)
        found = finish(start("strategy 1", 1, Path(often), settings), Path(often))
        print(f"killed {kills} times, ended by strategy 1 on 1 rank: {found}")
    if found != wanted:
        raise SystemExit("the parameters differ")


if __name__ == "__main__":
    main()
