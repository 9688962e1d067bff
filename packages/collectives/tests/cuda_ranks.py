"""Several ranks share one GPU over gloo, or one per GPU over NCCL: a program, run by tests.

    python cuda_ranks.py            # 2, 3, 2 x 2 ranks on GPU 0 over gloo, a world of one on NCCL
    python cuda_ranks.py nccl       # one rank per GPU, by messages and by reads of peers' memory
    python cuda_ranks.py cpu        # a rehearsal: 2, 2 x 2 ranks on the CPU over gloo

Checks bits against a sum made on the CPU, that streams are ordered without help from the host, and
that tensors may be dropped while their collective is in flight. Then the same through windows into
the other ranks' memory: ranks that share a GPU may have them, as a trial.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from native import all_reduce_native, reduce_scatter_native

from lamina.collectives import (
    Ledger,
    all_gather_into,
    all_reduce_fp32,
    all_to_all,
    reduce_scatter_fp32,
)
from lamina.collectives.compat import shared_block
from lamina.collectives.engine import all_reduce_small, broadcast, open_window
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.peer_windows import AREA_BYTES, PeerWindow
from lamina.mesh import make_host_groups
from lamina.mesh.engine import host_runs

CPU = "cpu" in sys.argv[1:]
DEVICE = torch.device("cpu" if CPU else "cuda")
PIECE = 1_003 if CPU else 100_003


def of_rank(rank: int, numel: int, wire: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(wire)


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    split = next(2**k for k in range(20, -1, -1) if 2**k < len(parts))
    return tree(parts[:split]) + tree(parts[split:])


def check_sums(group: dist.ProcessGroup, wire: torch.dtype, async_op: bool) -> None:
    world, rank = group.size(), group.rank()
    numel = world * PIECE
    total = tree([of_rank(place, numel, wire).float() for place in range(world)]).to(DEVICE)
    total *= torch.tensor(1 / 3)
    whole = of_rank(rank, numel, wire).to(DEVICE)
    shard = torch.zeros(PIECE, device=DEVICE)
    handle = reduce_scatter_fp32(shard, whole, group, scale=1 / 3, async_op=async_op)
    handle.wait()
    mine = total[rank * PIECE : (rank + 1) * PIECE]
    assert torch.equal(shard, mine)
    norm = mine.double().square().sum()
    assert abs(handle.squared_norm - norm) <= 1e-12 * norm
    assert not handle.nonfinite
    everything = torch.zeros(numel - 1, device=DEVICE)  # does not divide
    all_reduce_fp32(everything, whole[:-1], group, scale=1 / 3, async_op=async_op).wait()
    assert torch.equal(everything, total[:-1])
    for native, result in ((reduce_scatter_native, shard), (all_reduce_native, everything)):
        if native is all_reduce_native:
            native(result, whole[:-1], group, scale=1 / 3, async_op=async_op).wait()
        else:
            native(result, whole, group, scale=1 / 3, async_op=async_op).wait()
        expected = mine if native is reduce_scatter_native else total[:-1]
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)


def check_moves(group: dist.ProcessGroup) -> None:
    world, rank = group.size(), group.rank()
    whole = torch.empty(world * 1000, device=DEVICE)
    own = whole[rank * 1000 : (rank + 1) * 1000]
    own.fill_(rank)
    all_gather_into(whole, own, group, async_op=True).wait()
    expected = torch.arange(float(world), device=DEVICE).repeat_interleave(1000)
    assert torch.equal(whole, expected)
    rows = torch.full((2 * world + 1, 3), float(rank), device=DEVICE)
    splits = [2] * world
    splits[0] += 1  # everyone sends one row more to rank 0
    received = torch.empty((3 if rank == 0 else 2) * world, 3, device=DEVICE)
    counts = [3 if rank == 0 else 2] * world
    all_to_all(received, rows, group, output_splits=counts, input_splits=splits)
    assert torch.equal(
        received[:, 0], torch.arange(float(world), device=DEVICE).repeat_interleave(counts[0])
    )
    value = torch.full((5,), rank, device=DEVICE, dtype=torch.float32).to(torch.float8_e4m3fn)
    broadcast(value, group, src=world - 1)
    assert (value.float() == world - 1).all()
    small = [torch.tensor(rank, device=DEVICE), torch.tensor([0.5], device=DEVICE).double()]
    all_reduce_small(small, group)
    assert small[0] == world * (world - 1) // 2
    assert small[1] == world / 2


def check_streams(group: dist.ProcessGroup) -> None:
    """The input is still being computed at the call, and the output is used right after wait."""
    world = group.size()
    with Ledger() as ledger:
        for turn in range(5):
            whole = torch.ones(world * PIECE, device=DEVICE)
            delay()
            whole.mul_(turn + 1)
            shard = torch.empty(PIECE, device=DEVICE)
            handle = reduce_scatter_fp32(shard, whole, group, async_op=True)
            del whole  # nobody else holds it
            garbage = torch.full((world * PIECE,), -1.0, device=DEVICE)
            handle.wait()
            doubled = shard * 2
            assert (doubled == 2.0 * world * (turn + 1)).all()
            assert (garbage == -1).all()
        # Dropped without a wait: what is freed must not be written by others while in use.
        shard = torch.empty(PIECE, device=DEVICE)
        reduce_scatter_fp32(shard, torch.ones(world * PIECE, device=DEVICE), group, async_op=True)
        torch.full((world * PIECE,), -1.0, device=DEVICE)
        # A thread gives gloo's results to the GPU, so no barrier waits for them. It completes the
        # collectives of a group in their order: after a later one, the dropped one is complete.
        later = torch.empty(1, device=DEVICE)
        reduce_scatter_fp32(later, torch.ones(world, device=DEVICE), group, async_op=True).wait()
        if not CPU:  # on a CPU nobody waits for a handle that was dropped
            torch.cuda.synchronize()
            assert (shard == world).all()
    ledger.table()


def of_one_host() -> dist.ProcessGroup:
    """All ranks, whose GPUs are on one host: sums over hosts were checked in another group."""
    os.environ.pop("LAMINA_RANKS_PER_HOST", None)
    group = dist.new_group()
    assert host_runs(group).run == dist.get_world_size()
    return group


def check_windows(group: dist.ProcessGroup) -> None:
    """Sums and gathers that read the other ranks' memory, in several slices."""
    device = torch.device("cuda", torch.cuda.current_device())
    if "nccl" in sys.argv[1:]:
        group = of_one_host()
        open_window(group, device)
        assert lane_of(group).windows[device] is not None, "see the log for the reason"
    else:
        block, memory = shared_block(2 * AREA_BYTES, device, group)
        lane_of(group).windows[device] = PeerWindow(block, memory, group.rank(), 60.0)
    for wire in (torch.float32, torch.bfloat16):
        for async_op in (False, True):
            check_sums(group, wire, async_op)
    check_moves(group)
    shard = torch.full((AREA_BYTES // 4 + 5,), float(group.rank()), device=DEVICE)
    whole = torch.empty(group.size() * len(shard), device=DEVICE)
    all_gather_into(whole, shard, group, async_op=True).wait()
    assert (
        whole.view(group.size(), -1) == torch.arange(group.size(), device=DEVICE)[:, None]
    ).all()
    total = torch.zeros_like(shard)
    reduce_scatter_fp32(total, whole, group, async_op=True).wait()
    assert (total == group.size() * group.rank()).all()


def delay() -> None:
    """Keep the GPU busy for some milliseconds."""
    if not CPU:
        torch.cuda._sleep(20_000_000)


def rank_main(rank: int, world: int, backend: str, windows: bool, path: str) -> None:
    if not CPU:
        torch.cuda.set_device(rank if backend == "nccl" else 0)
    if world > 2 and world % 2 == 0:  # sums over hosts
        os.environ["LAMINA_RANKS_PER_HOST"] = "2"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    make_host_groups(group)
    if windows:
        check_windows(group)
    else:
        for wire in (torch.float32, torch.bfloat16):
            for async_op in (False, True):
                check_sums(group, wire, async_op)
        check_moves(group)
        check_streams(group)
        if CPU:
            of_one_host()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    worlds = [(2, "gloo"), (3, "gloo"), (4, "gloo"), (1, "nccl")]
    if "nccl" in sys.argv[1:]:
        worlds = [(torch.cuda.device_count(), "nccl")]
    if CPU:
        worlds = [(2, "gloo"), (4, "gloo")]
    # Windows last: where a machine cannot have them, all else has been seen.
    checks = [(*world, False) for world in worlds]
    checks += [(*world, True) for world in worlds if world[0] > 1 and not CPU]
    for world, backend, windows in checks:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "rendezvous")
            mp.spawn(rank_main, args=(world, backend, windows, path), nprocs=world)
        print(f"{world} ranks, {backend}{', windows' if windows else ''}: passed", flush=True)


if __name__ == "__main__":
    main()
