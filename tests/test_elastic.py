"""A job that is killed and goes on elsewhere ends where an undisturbed one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lamina.checkpoint import compare_checkpoints
from lamina.checkpoint.storage.locations import LocalLocation
from lamina.checkpoint.storage.manifest import Manifest

PRETRAIN = Path(__file__).parents[1] / "examples" / "pretrain"
KILLS = Path(__file__).parents[1] / "benchmarks" / "kills.py"


@pytest.mark.slow
def test_random_kills_resumed_on_other_ranks_end_at_the_same_bits():
    kills = os.environ.get("LAMINA_TEST_KILLS", "6")
    command = [sys.executable, str(KILLS), "--kills", kills, "--steps", str(5 * int(kills))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    digests = {line.split()[-1] for line in done.stdout.splitlines() if "ranks, step" in line}
    digests |= {line.split()[-1] for line in done.stdout.splitlines() if "ended by" in line}
    assert len(digests) == 1
    assert f"killed {kills} times" in done.stdout


@pytest.mark.slow
def test_a_job_of_one_to_two_hosts_goes_on_without_the_host_that_is_lost(tmp_path):
    """Two torchrun agents play hosts, and one is killed with its ranks.

    It is not the one that serves the rendezvous: torchrun's own does not survive that.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [start_agent(tmp_path, port, number) for number in range(2)]
    try:
        saved = tmp_path / "torn" / "checkpoints"
        wait_until(lambda: len(list(saved.glob("step-*/manifest.json"))) >= 2, agents)
        lost = psutil.Process(agents[1].pid)
        for process in [lost, *lost.children(recursive=True)]:
            process.kill()
        assert agents[0].wait(200) == 0, (tmp_path / "agent0").read_text()[-6000:]
    finally:
        for agent in agents:
            if agent.poll() is None:
                for process in psutil.Process(agent.pid).children(recursive=True):
                    process.kill()
                agent.kill()
    whole = tmp_path / "whole"
    subprocess.run([sys.executable, *job(whole)], check=True, timeout=200, env=ONE_THREAD)
    last = f"checkpoints/step-{STEPS:08d}"
    worlds = [Manifest.read(LocalLocation(at)).world_size for at in sorted(saved.glob("step-*"))]
    assert (worlds[0], worlds[-1]) == (4, 2)
    differ = compare_checkpoints(tmp_path / "torn" / last, whole / last)
    # Losses that the monitor remembers are means of each rank's: equal to the last digits.
    assert not [one for one in differ if not one.name.startswith("health.recent.loss")]


STEPS = 40
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def job(directory: Path) -> list[str]:
    """The main job, whose 6 sequences 4 ranks cut unevenly."""
    options = {
        "data.path": PRETRAIN,
        "data.held-out": 0.2,
        "model.num-layers": 1,
        "model.hidden-size": 32,
        "model.num-heads": 2,
        "model.sequence-length": 32,
        "model.dropout": 0,
        "train.steps": STEPS,
        "train.batch-size": 6,
        "train.reproducible": 1,
        "eval.every": STEPS,
        "eval.tokens": 64,
        "eval.samples": 0,
        "checkpoint.every": 1,
        "checkpoint.keep": STEPS,
        "run.directory": directory,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(PRETRAIN / "train.py"), *words, "--log.no-tensorboard"]


def start_agent(directory: Path, port: int, number: int) -> subprocess.Popen[bytes]:
    serves = int(number == 0)
    words = [
        "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lamina", "--local-addr=127.0.0.1",
        f"--rdzv-conf=is_host={serves},last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
        "--monitor-interval=0.5",
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *words, *job(directory / "torn")]
    with (directory / f"agent{number}").open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=ONE_THREAD)


def wait_until(reached, agents, seconds=200):
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        assert all(agent.poll() is None for agent in agents)
        time.sleep(0.05)
