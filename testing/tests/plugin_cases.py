"""Bodies that fail, die, hang or leave things behind: test_plugin.py runs pytest over a copy."""

import ctypes
import os
import subprocess
import sys
import time
import warnings

import pytest


@pytest.mark.ranks(2)
def test_assertion(ranks):
    import torch.distributed as dist

    print("said by", ranks.rank)
    if ranks.rank == 1:
        numbers = [1, 2]
        assert len(numbers) == 3
    dist.barrier()


@pytest.mark.ranks(2)
def test_killed(ranks):
    import torch.distributed as dist

    if ranks.rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()


@pytest.mark.ranks(1)
def test_crash():
    ctypes.string_at(0)


@pytest.mark.ranks(1)
def test_exit_code():
    os._exit(3)


@pytest.mark.ranks(1)
def test_system_exit():
    sys.exit(4)


@pytest.mark.ranks(2, timeout=1.5)
def test_hang(ranks):
    import torch.distributed as dist

    if ranks.rank == 1:
        time.sleep(1000)
    dist.barrier()


@pytest.mark.ranks(2)
def test_skip():
    pytest.skip("for a reason")


@pytest.mark.ranks(2)
def test_skip_for_all(ranks):
    if ranks.rank == 1:
        skip = pytest.skip.Exception("nothing was computed")
        skip.for_all_ranks = True
        raise skip
    time.sleep(1000)


@pytest.mark.ranks(2)
def test_failure_before_a_skip_for_all(ranks):
    assert ranks.rank == 1
    time.sleep(0.5)
    test_skip_for_all(ranks)


@pytest.mark.ranks(2)
def test_one_rank_passes_long_before_the_other(ranks, tmp_path):
    file = tmp_path / "pid"
    if ranks.rank == 0:
        file.write_text(str(os.getpid()))
        return
    time.sleep(0.5)
    with open(f"/proc/{file.read_text()}/stat") as stat:
        assert stat.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.ranks(2)
def test_teardown(ranks):
    import torch.distributed as dist

    def refuse():
        raise RuntimeError("cannot leave")

    if ranks.rank == 1:
        dist.destroy_process_group = refuse


@pytest.mark.ranks(2)
def test_xfail():
    pytest.xfail("known")


@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_marked_xfail():
    raise AssertionError


@pytest.mark.ranks(2)
def test_warning():
    warnings.warn("told once", DeprecationWarning, stacklevel=1)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("error")
def test_warning_is_error():
    warnings.warn("too much", stacklevel=1)


@pytest.mark.ranks(1)
def test_fixture_with_state(capsys):
    pass


def test_no_marker(ranks):
    pass


@pytest.mark.ranks(1)
def test_grandchild():
    child = subprocess.Popen(["sleep", "1000"])
    with open("grandchild", "w") as file:
        file.write(str(child.pid))


@pytest.mark.ranks(2, backend="nccl")
def test_gpus():
    pass


@pytest.mark.ranks(2, reuse=True)
@pytest.mark.parametrize("use", range(4))
def test_reuse(use, ranks):
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    with open(f"pid{use}.{ranks.rank}", "w") as file:
        file.write(str(os.getpid()))
    assert use != 1
