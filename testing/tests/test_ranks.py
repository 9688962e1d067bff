"""Bodies that use the plugin as the packages' tests do."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist

from lamina.collectives.engine import Job
from lamina_testing.rank import process_state


class Box:
    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_sum_over_ranks_is_the_sum_over_ranks(dtype, ranks):
    assert (ranks.rank, ranks.world_size) == (dist.get_rank(), dist.get_world_size())
    assert (ranks.backend, ranks.device) == ("gloo", torch.device("cpu"))
    tensor = torch.full((3,), ranks.rank + 1, dtype=dtype)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(1, ranks.world_size + 1))] * 3


@pytest.mark.ranks(3)
def test_world_sizes_need_not_be_powers_of_two():
    assert dist.get_world_size() == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [lambda x: x + 1, pytest.param(lambda x: 2 * x, id="double")])
@pytest.mark.parametrize(("box", "expected"), [(Box(1), 2)])
def test_lambdas_and_classes_of_the_module_are_parameters(function, box, expected):
    assert type(box) is Box
    assert function(box.value) == expected


@pytest.mark.ranks(2)
def test_the_temporary_path_is_shared(tmp_path, ranks):
    (tmp_path / str(ranks.rank)).touch()
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.ranks(64, backend="fake")
def test_the_fake_backend_is_one_process_in_a_large_world(ranks):
    assert (ranks.rank, dist.get_world_size(), dist.get_backend()) == (0, 64, "fake")


@pytest.mark.ranks(2, init=False)
def test_without_init_the_body_gets_torchruns_variables():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_with_init_torchruns_variables_are_absent():
    assert "RANK" not in os.environ
    assert "MASTER_PORT" not in os.environ


class TestClass:
    @pytest.mark.ranks(2)
    def test_methods_can_be_bodies(self):
        assert isinstance(self, TestClass)

    @staticmethod
    @pytest.mark.ranks(1)
    def test_static_methods_can_be_bodies():
        pass


@pytest.mark.ranks(1)
def test_a_body_may_expect_exceptions_and_warnings(monkeypatch):
    monkeypatch.setenv("LAMINA_TEST", "1")
    with pytest.raises(ValueError, match="known"):
        raise ValueError("known")
    with pytest.warns(UserWarning, match="expected"):
        warnings.warn("expected", stacklevel=1)


@pytest.mark.ranks(2)
def test_ranks_begin_with_the_same_random_state():
    numbers = [torch.empty(4) for _ in range(2)]
    dist.all_gather(numbers, torch.rand(4))
    assert torch.equal(*numbers)


@pytest.mark.ranks(2)
def test_ranks_run_on_one_thread():
    assert torch.get_num_threads() == 1


@pytest.mark.ranks(1)
def test_the_server_has_one_thread():
    # A fork copies only one; locks that others hold would stay locked for ever.
    assert len(os.listdir(f"/proc/{os.getppid()}/task")) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", range(3))
def test_each_test_of_shared_ranks_can_make_groups(case, ranks):
    total = torch.ones(())
    dist.all_reduce(total, group=dist.new_group())
    assert total == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", range(2))
def test_a_process_that_a_test_has_changed_runs_no_other_test(case, ranks):
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)


def becomes(state: tuple[object, ...]) -> bool:
    """Whether the process comes to be as it was; a thread that is done rests a moment later."""
    deadline = time.monotonic() + 10
    while process_state() != state and time.monotonic() < deadline:
        time.sleep(0.001)
    return process_state() == state


@pytest.mark.ranks(1)
def test_a_thread_of_a_lane_counts_only_while_it_works():
    before, begun, end = process_state(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert end.wait(60)

    job = Job(work)
    job.start()
    assert begun.wait(60)
    assert process_state() != before
    end.set()
    job.wait()
    assert becomes(before), "the thread rests, so the next test may have this process"


@pytest.mark.ranks(1)
def test_a_thread_that_nobody_knows_ends_the_process():
    before = process_state()
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="lamina-lane").start()
    assert process_state() != before


@pytest.mark.ranks(1)
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux")
def test_ranks_take_no_core_from_each_other():
    assert os.sched_getscheduler(0) == os.SCHED_BATCH


def test_a_look_at_the_process_keeps_nothing_that_threads_refer_to():
    looked, refers = threading.Event(), threading.Event()
    held: list[weakref.ref[Box]] = []

    def work() -> None:
        box = Box(1)
        held.append(weakref.ref(box))
        refers.set()
        looked.wait(60)

    gc.disable()
    try:
        thread = threading.Thread(target=work)
        thread.start()
        refers.wait(60)
        process_state()
        looked.set()
        thread.join()
        assert held[0]() is None
    finally:
        gc.enable()
