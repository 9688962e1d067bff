"""Starting and ending: a world of one, worlds that are there already, and torchrun's restarts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lamina.mesh import HarmfulSettingWarning, ParallelLayout, init_distributed
from lamina.mesh.engine import EnvironmentVariableError
from lamina.mesh.watching.watchdog import EXIT_STATUS, end_process
from lamina_testing import device_type

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)


def test_without_a_launcher_a_world_of_one_starts_and_ends() -> None:
    for _ in range(2):  # twice: the end leaves nothing behind
        with init_distributed(device="cpu") as runtime:
            assert (runtime.rank, runtime.world_size, runtime.local_rank) == (0, 1, 0)
            assert (runtime.device, runtime.backend) == (torch.device("cpu"), "gloo")
            assert runtime.launcher == "none"
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 1.0
        assert not dist.is_initialized()


def test_the_timeout_reaches_the_groups_that_are_made_later() -> None:
    with init_distributed("fake", world_size=4, timeout=12.0):
        ParallelLayout(tp=2).build(device_type())
        from lamina.mesh.groups.process_groups import current_world

        assert current_world().timeout == timedelta(seconds=12)
    with pytest.raises(ValueError, match="timeout=-1"):
        init_distributed(timeout=-1)
    with pytest.raises(ValueError, match="timeout='10'"):
        init_distributed(timeout="10")


def test_a_group_that_is_there_is_adopted_and_left_alone() -> None:
    with init_distributed(device="cpu") as owner:
        with init_distributed() as guest:
            assert (guest.launcher, guest.owns_group) == ("existing", False)
            assert guest.backend == owner.backend
        assert dist.is_initialized()
        with pytest.raises(ValueError, match=r"backend='nccl' .* already runs with 'gloo'"):
            init_distributed("nccl")
    assert not dist.is_initialized()


def test_closing_twice_or_late_harms_no_other_world() -> None:
    first = init_distributed(device="cpu")
    first.close()
    first.close()
    with init_distributed(device="cpu"):
        first.close()
        assert dist.is_initialized()


def test_an_exception_inside_the_world_ends_it_and_is_raised() -> None:
    with pytest.raises(KeyError, match="mine"), init_distributed(device="cpu"):
        raise KeyError("mine")
    assert not dist.is_initialized()


def test_groups_have_their_timeout_to_end_and_little_time_after_an_error(monkeypatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr("lamina.mesh.runtime.PATIENCE", 0.1)
    monkeypatch.setattr("lamina.mesh.runtime._end_process", lambda *why: ended.append(why))
    destroy = dist.destroy_process_group

    def late() -> None:
        time.sleep(0.4)
        destroy()

    def fails() -> None:
        destroy()
        raise RuntimeError("planted")

    monkeypatch.setattr(dist, "destroy_process_group", late)
    with init_distributed(device="cpu"):
        pass
    monkeypatch.setattr(dist, "destroy_process_group", fails)
    with pytest.raises(RuntimeError, match="planted"), init_distributed(device="cpu"):
        raise KeyError("mine")
    time.sleep(0.4)
    assert ended == []
    monkeypatch.setattr(dist, "destroy_process_group", late)
    error = KeyError("mine")
    with pytest.raises(KeyError, match="mine"), init_distributed(device="cpu"):
        raise error
    assert ended == [(0.1, error)]


@pytest.mark.ranks(2)
def test_ranks_that_are_started_already_are_adopted(ranks) -> None:
    with init_distributed() as runtime:
        assert (runtime.rank, runtime.world_size) == (ranks.rank, 2)
        assert runtime.local_rank == ranks.rank
    assert dist.is_initialized()


def test_a_fake_world_has_any_size_and_only_a_fake_one_is_given_it() -> None:
    with init_distributed("fake", world_size=1000, rank=999) as runtime:
        assert (runtime.rank, dist.get_world_size()) == (999, 1000)
    with pytest.raises(ValueError, match="only a fake world is given these"):
        init_distributed(world_size=4)
    with pytest.raises(ValueError, match="rank=4 of a fake world of 4: ranks run from 0 to 3"):
        init_distributed("fake", world_size=4, rank=4)


def test_variables_that_cannot_be_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(EnvironmentVariableError, match="MASTER_ADDR is not set"):
        init_distributed(device="cpu")
    assert not dist.is_initialized()


def test_harmful_settings_are_warned_of_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with (
        pytest.warns(HarmfulSettingWarning, match="CUDA_DEVICE_MAX_CONNECTIONS is 1: .*Unset it"),
        init_distributed(device="cpu"),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without GPUs lacks")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    for arguments in ({"device": "cuda"}, {"backend": "nccl"}):
        with pytest.raises(RuntimeError, match=r"doctor"):
            init_distributed(**arguments)


def torchrun(script: str, *arguments: str, where: Path, timeout: float = 120) -> str:
    path = where / "program.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, str(path)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_was_printed_into_a_buffer_is_not_lost_with_a_process_that_is_ended(
    tmp_path: Path,
) -> None:
    said = tmp_path / "said"
    if (child := os.fork()) == 0:
        try:
            sys.stdout = said.open("w")
            print("printed into a buffer")
            end_process("it still waits")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_STATUS
    assert said.read_text() == "printed into a buffer\n"


FAILS_AT_FIRST = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from lamina.mesh import ParallelLayout, init_distributed

failed = Path(__file__).with_name("failed")
with init_distributed(timeout=60) as runtime:
    mesh = ParallelLayout(tp=2).build()
    total = torch.ones(1)
    for name in ("dp", "tp"):
        if mesh.group(name) is not None:
            dist.all_reduce(total, group=mesh.group(name))
    assert total.item() == runtime.world_size
    attempts = int(failed.read_text()) if failed.exists() else 0
    # Only some rank fails, between collectives: the others' agents learn of it on their own.
    if runtime.rank == runtime.world_size - 1 and attempts < 2:
        failed.write_text(str(attempts + 1))
        os._exit(7)
    dist.barrier()
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    sys.stdout.write(f"rank {runtime.rank} done after {count} restarts\\n")
"""


@pytest.mark.slow
def test_torchrun_starts_ranks(tmp_path: Path) -> None:
    script = FAILS_AT_FIRST.replace("attempts < 2", "False")
    output = torchrun(script, "--standalone", "--nproc-per-node=4", where=tmp_path)
    assert sorted(output.split("\n"))[1:] == [
        f"rank {rank} done after 0 restarts" for rank in range(4)
    ]


@pytest.mark.slow
def test_torchrun_restarts_gloo_ranks(tmp_path: Path) -> None:
    arguments = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    output = torchrun(FAILS_AT_FIRST, *arguments, where=tmp_path)
    assert sorted(output.split("\n"))[1:] == [
        f"rank {rank} done after 2 restarts" for rank in range(2)
    ]


@pytest.mark.slow
def test_tasks_of_a_slurm_step_meet_without_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "from lamina.mesh import init_distributed\n"
        "with init_distributed(timeout=60, device='cpu') as runtime:\n"
        "    total = torch.ones(1)\n"
        "    dist.all_reduce(total)\n"
        "    print(runtime.launcher, runtime.rank, int(total))\n"
    )
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "OMP_NUM_THREADS": "1",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**os.environ, **step, "SLURM_PROCID": task, "SLURM_LOCALID": task},
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in ("0", "1")
    ]
    printed = [task.communicate(timeout=300)[0] for task in tasks]
    assert printed == ["slurm 0 2\n", "slurm 1 2\n"]


@pytest.mark.slow
def test_two_agents_whose_restart_counts_differ_restart_together(tmp_path: Path) -> None:
    # The agent whose worker failed counts a restart; the other one only sees it wait again and
    # counts none. A name made of TORCHELASTIC_RESTART_COUNT would part them for good.
    import socket
    from concurrent.futures import ThreadPoolExecutor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=lamina",
        "--local-addr=127.0.0.1",
        "--monitor-interval=0.2",
    )
    script = FAILS_AT_FIRST.replace("dist.barrier()", WAIT_LIKE_COMPUTE)
    with ThreadPoolExecutor(2) as pool:
        agents = [pool.submit(torchrun, script, *arguments, where=tmp_path) for _ in range(2)]
    lines = sorted(line for agent in agents for line in agent.result().split("\n") if line)
    assert [line.split(" after ")[0] for line in lines] == ["rank 0 done", "rank 1 done"]


# A rank that computes and doesn't talk notices nothing of the other's end.
WAIT_LIKE_COMPUTE = """
    if attempts < 2:
        import time
        time.sleep(60)
    dist.barrier()
"""
