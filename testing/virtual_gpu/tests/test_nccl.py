"""NCCL between processes and threads: bytes move, and ranks that do not meet wait for ever."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

import pytest

TORCH = tuple(int(part) for part in version("torch").split(".")[:2])
WITHOUT_ITS_BARRIER = pytest.mark.skipif(
    TORCH >= (2, 15), reason="torch 2.15 has a barrier by multicast, which is not modelled"
)
MOVES = {"VGPU_COMPUTE": "at-once", "VGPU_DEVICES": "8", "OMP_NUM_THREADS": "1"}
BEGIN = """
import json, os, sys, threading, torch, torch.distributed as dist
from datetime import timedelta
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=200))

def end(answer):
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 0:
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def on_ranks(program):
    """Run a program on some ranks, each with a device; what rank 0 gives `end` comes back."""

    def run(ranks: int, text: str, **settings: object):
        words = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")
        launcher = ("-m", "torch.distributed.run", *words)
        return program(BEGIN + text, launcher=launcher, **{**MOVES, **settings})

    return run


# What each rank has is known to all, so each says in plain words what it must get.
VALUES = """
from functools import reduce

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
WHOLE = [torch.int8, torch.uint8, torch.int32, torch.int64]
EIGHTHS = [torch.float8_e4m3fn, torch.float8_e5m2]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
wrong = []

def data(of, count, dtype):
    numbers = (torch.arange(count) * 7 + of * 13) % 11
    return (numbers if dtype in WHOLE else numbers / 4 - 1).to(dtype)

def wide(row):
    return row.float() if row.dtype in (torch.bfloat16, torch.float16) else row

def combined(name, rows):
    way = {"sum": torch.add, "avg": torch.add, "product": torch.mul,
           "min": torch.minimum, "max": torch.maximum}[name]
    total = reduce(way, [wide(row) for row in rows])
    if name == "avg":
        total = total / ranks
    return total.to(rows[0].dtype)

def check(what, got, wanted):
    torch.cuda.synchronize()
    bits = BITS[wanted.itemsize]
    if not torch.equal(got.cpu().view(bits), wanted.view(bits)):
        wrong.append(f"{what} {wanted.dtype}: {got.cpu()[:4].tolist()}, {wanted[:4].tolist()}")

def empty(count, dtype):
    return torch.empty(count, dtype=dtype, device=device)

def moving(count, dtype):
    own, all_ = data(rank, count, dtype).cuda(), [data(r, count, dtype) for r in range(ranks)]
    out = empty(count * ranks, dtype)
    dist.all_gather_into_tensor(out, own)
    check("all_gather_into_tensor", out, torch.cat(all_))
    out[rank * count : (rank + 1) * count].copy_(own)
    dist.all_gather_into_tensor(out, out[rank * count : (rank + 1) * count])
    check("all_gather in place", out, torch.cat(all_))
    outs = [empty(count, dtype) for _ in range(ranks)]
    dist.all_gather(outs, own)
    check("all_gather", outs[-1], all_[-1])
    out = own.clone() if rank == 1 else empty(count, dtype)
    dist.broadcast(out, 1)
    check("broadcast", out, all_[1])
    dist.gather(own, outs if rank == 0 else None, 0)
    if rank == 0:
        check("gather", outs[-1], all_[-1])
    out = empty(count, dtype)
    dist.scatter(out, [row.cuda() for row in all_] if rank == 1 else None, 1)
    check("scatter", out, all_[rank])
    whole = [data(r, count * ranks, dtype) for r in range(ranks)]
    pieces = [row.view(ranks, count)[rank] for row in whole]
    out = empty(count * ranks, dtype)
    dist.all_to_all_single(out, whole[rank].cuda())
    check("all_to_all_single", out, torch.cat(pieces))
    dist.all_to_all(outs, [row.cuda() for row in whole[rank].view(ranks, count)])
    check("all_to_all", outs[0], pieces[0])
    # Each rank r sends r + 1 elements, times the receiver's number, to each other one.
    ins = [(rank + 1) * to for to in range(ranks)]
    from_ = [(r + 1) * rank for r in range(ranks)]
    out = empty(sum(from_), dtype)
    dist.all_to_all_single(out, data(rank, sum(ins), dtype).cuda(), from_, ins)
    cut = [data(r, sum((r + 1) * to for to in range(ranks)), dtype) for r in range(ranks)]
    cut = [row[(r + 1) * sum(range(rank)) :][: (r + 1) * rank] for r, row in enumerate(cut)]
    check("all_to_all_single, uneven", out, torch.cat(cut))
    if rank < 2:
        out = empty(count, dtype)
        dist.send(own, 1) if rank == 0 else dist.recv(out, 0)
        if rank == 1:
            check("recv", out, all_[0])
    out, right, left = empty(count, dtype), (rank + 1) % ranks, (rank - 1) % ranks
    ring = [dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, out, left)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    check("ring", out, all_[left])

def reducing(name, count, dtype):
    op = getattr(dist.ReduceOp, name.upper())
    rows = [data(r, count, dtype) for r in range(ranks)]
    out = rows[rank].cuda()
    dist.all_reduce(out, op)
    check(f"all_reduce {name}", out, combined(name, rows))
    out = rows[rank].cuda()
    dist.reduce(out, 1, op)
    if rank == 1:
        check(f"reduce {name}", out, combined(name, rows))
    whole = [data(r, count * ranks, dtype) for r in range(ranks)]
    out, wanted = empty(count, dtype), combined(name, [row.view(ranks, -1)[rank] for row in whole])
    dist.reduce_scatter_tensor(out, whole[rank].cuda(), op)
    check(f"reduce_scatter {name}", out, wanted)
    inside = whole[rank].cuda()
    dist.reduce_scatter_tensor(inside.view(ranks, -1)[rank], inside, op)
    check(f"reduce_scatter in place {name}", inside.view(ranks, -1)[rank], wanted)
    dist.reduce_scatter(out, [row.cuda() for row in whole[rank].view(ranks, -1)], op)
    check(f"reduce_scatter of a list {name}", out, wanted)

for dtype in [*FLOATS, *WHOLE, *EIGHTHS, torch.bool]:
    moving(37, dtype if dtype is not torch.bool else torch.uint8)
for dtype in [*FLOATS, *WHOLE]:
    for name in ("sum", "product", "min", "max", *(["avg"] if dtype in FLOATS else [])):
        reducing(name, 37, dtype)
for dtype in FLOATS:  # a factor that the host gives, and one that lies on the device
    rows = [data(r, 37, dtype) for r in range(ranks)]
    # torch 2.13 reads a factor on the device as fp32 alone.
    narrow = torch.__version__ < "2.14" and dtype != torch.float32
    for factor in (0.5, *([] if narrow else [torch.tensor([0.5], dtype=dtype, device=device)])):
        out = rows[rank].cuda()
        dist.all_reduce(out, dist._make_nccl_premul_sum(factor))
        check("premultiplied sum", out, combined("sum", [(row * 0.5).to(dtype) for row in rows]))
# More than the slots of a channel hold, and no multiple of them.
moving(300_001, torch.float32)
reducing("sum", 300_001, torch.float32)
reducing("avg", 300_001, torch.bfloat16)
with dist._coalescing_manager(device=device, async_ops=True) as together:
    parts = [data(rank, 100, torch.float32).cuda() for _ in range(3)]
    for part in parts:
        dist.all_reduce(part)
together.wait()
check("coalesced", parts[2], combined("sum", [data(r, 100, torch.float32) for r in range(ranks)]))
everyone = [None] * ranks
dist.all_gather_object(everyone, wrong, dist.new_group(backend="gloo"))
end(everyone)
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_of_every_type_give_the_values_that_they_mean(on_ranks, ranks):
    assert on_ranks(ranks, VALUES) == [[]] * ranks


ADVERSARY = {"VGPU_COMPUTE": "adversarial", "VGPU_SEED": 3}


NO_ARITHMETIC = {"VGPU_COMPUTE": "none", "VGPU_SHARE": 1}


@pytest.mark.parametrize("order", [{"VGPU_COMPUTE": "late"}, ADVERSARY], ids=["late", "adversary"])
def test_values_are_the_same_when_streams_are_late(on_ranks, order):
    assert on_ranks(2, VALUES, **order) == [[]] * 2


def test_bytes_move_between_ranks_where_kernels_compute_nothing(on_ranks):
    assert on_ranks(2, VALUES, **NO_ARITHMETIC) == [[]] * 2
    alone = "x = torch.full((2,), rank + 1.0).cuda().add(1)\nend(x.tolist())"
    assert on_ranks(1, alone, **NO_ARITHMETIC) != [2.0, 2.0]


def test_a_call_returns_at_once_and_what_follows_on_its_stream_waits(on_ranks):
    text = """
other = dist.new_group(backend="gloo")
x, back = torch.full((4,), float(rank)).cuda(), torch.zeros(4, pin_memory=True)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    back.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    early = [done.query() for _ in range(500)]
    dist.barrier(other)         # rank 1 has not called yet
    done.synchronize()
    answer = [any(early), back.tolist(), done.query()]
else:
    dist.barrier(other)
    dist.all_reduce(x)
    answer = None
end(answer)
"""
    assert on_ranks(2, text) == [False, [1.0] * 4, True]


def test_a_rank_goes_on_in_nccl_while_its_host_waits_elsewhere(on_ranks):
    text = """
other = dist.new_group(backend="gloo")
x = torch.ones(1_000_000).cuda()
if rank == 0:
    dist.all_reduce(x, async_op=True)
    dist.barrier(other)         # rank 1 comes here when its sum has ended
else:
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier(other)
end(x.cpu().sum().item())
"""
    assert on_ranks(2, text) == 2_000_000


def test_groups_are_split_and_made_beside_the_world(on_ranks):
    text = """
groups = [dist.split_group(split_ranks=[[0, 1], [2, 3]])]
groups += [dist.new_group([0, 2]), dist.new_group([3, 1])]
x = torch.full((3,), float(rank)).cuda()
dist.all_reduce(x, group=groups[0])
y = torch.full((3,), float(rank)).cuda()
dist.all_reduce(y, group=groups[1 + rank % 2])
outs = [torch.empty(12, device=device) for _ in range(2)]
dist.all_gather_into_tensor(outs[0], x)
dist.all_gather_into_tensor(outs[1], y)
end([out.cpu()[::3].tolist() for out in outs])
"""
    assert on_ranks(4, text) == [[1, 1, 5, 5], [2, 4, 2, 4]]


NOT_MET = """
import time
says = os.environ["SAYS"]
os.dup2(os.open(says + str(rank), os.O_RDWR | os.O_CREAT), 2)

def end_when_it_is_named():
    while "Watchdog caught" not in open(says + "0").read():
        time.sleep(0.1)
    os._exit(0)

dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
threading.Thread(target=end_when_it_is_named).start()
WHAT
torch.cuda.synchronize()
print(json.dumps("it has ended"), flush=True) if rank == 0 else None
threading.Event().wait()
"""


@pytest.mark.skipif(
    TORCH >= (2, 15),
    reason="NCCL of torch 2.15 ends the process, and its watchdog writes otherwise",
)
@pytest.mark.parametrize(
    "what",
    [
        "rank == 0 and dist.all_reduce(torch.ones(4).cuda())",
        "x = torch.ones(4).cuda(); dist.all_reduce(x) if rank == 0 else dist.broadcast(x, 0)",
        "x = torch.ones(4 + rank).cuda(); dist.all_reduce(x)",
    ],
    ids=["a missing rank", "another order", "another length"],
)
def test_ranks_that_do_not_meet_wait_until_the_watchdog_names_it(on_ranks, tmp_path, what):
    text, says = NOT_MET.replace("WHAT", what), tmp_path / "says"
    with pytest.raises(IndexError):  # no rank says that it has ended
        on_ranks(2, text, SAYS=says, NCCL_DEBUG="WARN", TORCH_NCCL_DUMP_ON_TIMEOUT=0)
    said = says.with_name("says0").read_text()
    assert "Watchdog caught collective operation timeout" in said
    assert "OpType=ALLREDUCE" in said
    said += says.with_name("says1").read_text()
    assert ("virtual NCCL WARN" in said) is not what.startswith("rank == 0 and")


def test_an_abort_ends_what_waits_for_another_rank(on_ranks):
    text = """
x = torch.ones(4).cuda()
dist.all_reduce(x)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    before = work.is_completed()
    dist.group.WORLD._get_backend(device).abort()
    torch.cuda.synchronize()
    print(json.dumps([before, "it ended"]), flush=True)
os._exit(0)
"""
    assert on_ranks(2, text) == [False, "it ended"]


def test_threads_of_one_process_are_ranks_with_a_device_each(program):
    text = """
        import json, threading, torch, torch.distributed as dist

        store, sums = dist.HashStore(), [None] * 4

        def rank_of(rank):
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
            group = dist.ProcessGroupNCCL(store, rank, 4, dist.ProcessGroupNCCL.Options())
            x = torch.arange(3.0).add(rank).to(device)
            group.allreduce([x]).wait()
            torch.cuda.synchronize(device)
            sums[rank] = x.tolist()
            group.abort()

        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        several = [torch.arange(3.0).add(rank).to(f"cuda:{rank}") for rank in range(4)]
        torch.cuda.nccl.all_reduce(several)  # one thread makes and calls all ranks, in groups
        print(json.dumps([sums, [x.tolist() for x in several]]), flush=True)
    """
    assert program(text, **MOVES) == [[[6, 10, 14]] * 4] * 2


def test_nothing_is_left_of_processes_that_are_killed(on_ranks):
    text = """
import signal
x = torch.ones(1_000_000).cuda()
dist.all_reduce(x)
if rank == 0:
    dist.all_reduce(x)          # the other one never comes
os.kill(os.getpid(), signal.SIGKILL) if rank else os._exit(0)
"""
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(AssertionError, match="SIGKILL"):
        on_ranks(2, text)
    # Other programs of the machine may have files there, which they delete at their own ends.
    left, deadline = set(os.listdir("/dev/shm")) - before, time.monotonic() + 120
    while left & set(os.listdir("/dev/shm")):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


SYMMETRIC = """
import torch.distributed._symmetric_memory as symmetric

block = symmetric.empty(1000, dtype=torch.float32, device=device)
shared = symmetric.rendezvous(block, dist.group.WORLD)
"""


@WITHOUT_ITS_BARRIER
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_read_and_write_each_others_symmetric_memory(on_ranks, ranks):
    text = """
shared.barrier()
seen = []
for turn in range(3):
    block.copy_(torch.full((1000,), 10.0 * turn + rank))
    shared.barrier(channel=turn % 2)
    for peer in range(ranks):
        copy = torch.empty(4, device=device)
        copy.copy_(shared.get_buffer(peer, (4,), torch.float32, 996))
        seen.append(copy.cpu()[3].item())
    shared.barrier(channel=1)
right = shared.get_buffer((rank + 1) % ranks, (1000,), torch.float32)
shared.barrier()
right.copy_(torch.full((1000,), -1.0 - rank))
shared.barrier()
end([seen, block.cpu()[:2].tolist(), shared.multicast_ptr != 0])
"""
    # The ranks share multicast memory too, which only kernels can reach.
    turns = [10.0 * turn + rank for turn in range(3) for rank in range(ranks)]
    assert on_ranks(ranks, SYMMETRIC + text) == [turns, [-float(ranks)] * 2, True]


@WITHOUT_ITS_BARRIER
def test_a_signal_is_waited_for_and_a_barrier_without_a_peer_fails_after_its_time(on_ranks):
    text = """
if rank == 1:
    block.copy_(torch.full((1000,), 7.0))
    shared.put_signal(0)
    time.sleep(3)
else:
    shared.wait_signal(1)
    copy = torch.empty(1000, device=device)
    copy.copy_(shared.get_buffer(1, (1000,), torch.float32))
    seen = copy.cpu()[0].item()
    shared.barrier(timeout_ms=200)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(json.dumps([seen, str(error).splitlines()[0]]), flush=True)
os._exit(0)
"""
    seen, message = on_ranks(2, "import time\n" + SYMMETRIC + text)
    assert seen == 7
    assert "launch failure" in message
