"""Signals, restarts, and the place in the data."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lamina.checkpoint import RESUME_EXIT_CODE, CheckpointManager, DataPosition, Preemption
from lamina.checkpoint.state import data_position


@settings(deadline=None)
@given(
    size=st.integers(1, 50),
    seed=st.none() | st.integers(0, 5),
    runs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4)), max_size=5),
)
def test_no_sample_is_repeated_or_skipped_when_ranks_and_batches_change(size, seed, runs):
    reference = DataPosition(size, seed)
    state, taken = reference.state_dict(), []
    for batch_size, ranks, steps in runs:
        positions = [DataPosition(size, seed) for _ in range(ranks)]
        for position in positions:
            position.load_state_dict(json.loads(json.dumps(state)))
        iterators = [p.batches(batch_size, r, ranks) for r, p in enumerate(positions)]
        for _ in range(steps):
            taken += itertools.chain.from_iterable(next(i) for i in iterators)
        state = positions[-1].state_dict()
    assert taken == reference.indices(len(taken))
    for epoch in range(len(taken) // size):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_an_epoch_of_shuffled_samples_visits_no_number_of_its_network_twice(monkeypatch):
    """The network permutes the numbers below the next power of four, with four sums for each."""
    mix, sums = data_position._mix, []
    monkeypatch.setattr(data_position, "_mix", lambda *given: sums.append(given) or mix(*given))
    for size in range(2, 66):
        sums.clear()
        assert sorted(DataPosition(size, seed=0).indices(size)) == list(range(size))
        assert len(sums) <= 4 * next(4**power for power in range(1, 5) if 4**power >= size)


def test_a_position_in_other_data_is_refused():
    with pytest.raises(ValueError, match="size 7, here it is 8"):
        DataPosition(8).load_state_dict(DataPosition(7).state_dict())
    with pytest.raises(ValueError, match="seed 1, here it is None"):
        DataPosition(7).load_state_dict(DataPosition(7, seed=1).state_dict())


def test_batches_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="batch_size is 0"):
        next(DataPosition(8).batches(0))
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank is {rank} of 2"):
            next(DataPosition(8).batches(4, rank, 2))


@pytest.mark.ranks(2)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    manager = CheckpointManager(tmp_path)
    with Preemption() as preemption:
        for step in range(100):
            if dist.get_rank() == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            if preemption.requested():
                manager.save(step, {"step": step})
                break
        assert preemption.received is (signal.SIGUSR1 if dist.get_rank() else None)
    assert manager.latest() == 3
    assert preemption.exit_code == RESUME_EXIT_CODE != 0
    assert signal.getsignal(signal.SIGUSR1) == before


def test_signals_are_for_the_main_thread():
    caught: list[BaseException] = []

    def make() -> None:
        try:
            Preemption()
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


PROGRAM = """
    import os, signal, sys
    import torch
    from lamina.checkpoint import CheckpointManager, DataPosition, PerRank, Preemption, RngState
    from lamina.mesh import init_distributed

    with init_distributed() as runtime, Preemption() as preemption:
        position = DataPosition(size=20, seed=3)
        torch.manual_seed(runtime.rank)
        total = torch.zeros(())
        state = {"total": total, "data": position, "rng": PerRank(RngState())}
        with CheckpointManager(sys.argv[1], async_save=True) as manager:
            done = manager.restore(state, default=0)
            total = state["total"]
            for indices in position.batches(4, runtime.rank, runtime.world_size):
                seen = torch.zeros(20)
                seen[indices] = 1 + torch.rand(())
                torch.distributed.all_reduce(seen)
                total += seen.sum()
                done += 1
                if done in (2, 5) and runtime.rank == done % 2 and not os.path.exists(
                    mark := f"{sys.argv[1]}.{done}"
                ) and sys.argv[2] == "preempted":
                    open(mark, "w").close()
                    os.kill(os.getpid(), signal.SIGTERM if done == 2 else signal.SIGUSR1)
                if preemption.requested():
                    manager.save(done, state)
                    manager.close()
                    raise SystemExit(preemption.exit_code)
                if done == 8:
                    break
            if runtime.is_main:
                print("total", repr(float(total)), position.samples, flush=True)
"""


@pytest.mark.slow
def test_torchrun_resumes_a_preempted_run_without_a_hand(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    outputs = {}
    for kind in ("whole", "preempted"):
        run = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc_per_node=2", "--max-restarts=3", str(program)),
                *(str(tmp_path / kind), kind),
            ],
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert run.returncode == 0, run.stderr
        outputs[kind] = [line for line in run.stdout.splitlines() if line.startswith("total")]
    assert (tmp_path / "preempted.2").exists()
    assert (tmp_path / "preempted.5").exists()
    assert outputs["preempted"] == outputs["whole"] != []


TOLD = """
    import itertools, sys, time
    from lamina.checkpoint import CheckpointManager, Preemption
    from lamina.mesh import init_distributed

    with init_distributed(), Preemption() as preemption:
        manager = CheckpointManager(sys.argv[1])
        for step in itertools.count():
            open(f"{sys.argv[1]}.training", "w").close()
            time.sleep(0.05)
            if preemption.requested():
                manager.save(step, {"step": step})
                raise SystemExit(preemption.exit_code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ()),
        (signal.SIGUSR1, ("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",)),
    ],
)
def test_a_signal_to_torchrun_reaches_its_ranks(tmp_path, number, options):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TOLD))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options]
    run = subprocess.Popen(
        [sys.executable, *words, str(program), str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_until_training(tmp_path / "run.training", run)
    run.send_signal(number)
    errors = run.communicate(timeout=300)[1]
    assert run.returncode == 1, errors  # torchrun's own, whatever its ranks' was
    assert CheckpointManager(tmp_path / "run").latest() is not None


@pytest.mark.slow
def test_the_lines_for_slurm_save_and_requeue(tmp_path):
    """The documentation's own lines, with srun and scontrol played by two scripts."""
    page = (Path(__file__).parents[3] / "docs" / "checkpoint.md").read_text()
    (lines,) = re.findall(r"```\n(#SBATCH.*?)```", page, re.DOTALL)
    (tmp_path / "program.py").write_text(textwrap.dedent(TOLD))
    for name, body in (("srun", 'exec "$@"'), ("scontrol", f'echo "$@" > {tmp_path}/requeued')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2"
    told = "torchrun ... examples/pretrain/train.py --run.directory runs/a"
    assert told in lines
    command = f"{torchrun} {tmp_path}/program.py {tmp_path}/run"
    (tmp_path / "job.sh").write_text("#!/bin/bash\n" + lines.replace(told, command))
    job = subprocess.Popen(
        ["bash", str(tmp_path / "job.sh")],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
        },
    )
    wait_until_training(tmp_path / "run.training", job)
    job.send_signal(signal.SIGUSR1)
    job.wait(timeout=300)
    assert CheckpointManager(tmp_path / "run").latest() is not None
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "7"]


def wait_until_training(mark: Path, run: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 100
    while not mark.exists():
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)


def test_the_order_of_samples_follows_from_the_seed():
    assert sorted(DataPosition(10, seed=1).indices(10)) == list(range(10))
    assert DataPosition(10, seed=1).indices(10) != DataPosition(10, seed=2).indices(10)
    assert torch.tensor(DataPosition(3).indices(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]
