"""Profiles, several devices, NCCL for one rank of many, and several processes."""

from __future__ import annotations

import pytest

from lamina_virtual_gpu import PROFILES

SHOW = """
    import json, torch
    p = torch.cuda.get_device_properties(0)
    import lamina_virtual_gpu as virtual_gpu
    x = torch.empty(1 << 28, device="cuda")
    begun = virtual_gpu.now()
    x.add_(1)
    torch.cuda.synchronize()
    says = [p.name, p.major, p.multi_processor_count, p.total_memory, torch.cuda.device_count()]
    print(json.dumps([*says, virtual_gpu.now() - begun]))
"""


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.key)
def test_a_device_says_what_its_profile_says(program, profile):
    name, major, processors, memory, count, seconds = program(
        SHOW, VGPU_GPU=profile.key, VGPU_DEVICES=2
    )
    assert (name, major, processors, count) == (profile.name, profile.major, profile.processors, 2)
    assert memory == int(profile.memory_gib * (1 << 30))
    read_and_written = 2 * 4 * (1 << 28)
    assert seconds > read_and_written / profile.memory_gbs / 1e9


def test_an_unknown_profile_is_refused_with_the_known_ones(program):
    with pytest.raises(AssertionError, match="known are a100 h100 h200 b200 gb200"):
        program(SHOW, VGPU_GPU="h1000")


def test_eight_devices_reach_each_other(program):
    text = """
        import json, torch
        x = torch.arange(4.0).to("cuda:0")
        y = x.to("cuda:7")
        torch.cuda.synchronize(7)
        reached = [torch.cuda.can_device_access_peer(0, other) for other in range(1, 8)]
        used = [torch.cuda.memory_allocated(device) > 0 for device in range(8)]
        print(json.dumps([y.tolist(), all(reached), used.count(True)]))
    """
    assert program(text, VGPU_DEVICES=8) == [[0, 1, 2, 3], True, 2]


def test_one_rank_of_many_sends_and_takes_nccls_messages(program):
    text = """
        import json, os, torch, torch.distributed as dist, lamina_virtual_gpu as virtual_gpu
        import torch.testing._internal.distributed.fake_pg
        dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=64,
                                device_id=torch.device("cuda:0"))
        x, whole = torch.ones(4).cuda(), torch.empty(256, device="cuda")
        virtual_gpu.reset()
        work = dist.all_gather_into_tensor(whole, x, async_op=True)
        work.wait()
        large = torch.empty(1 << 28, device="cuda")
        begun = virtual_gpu.now()
        dist.all_reduce(large)
        torch.cuda.synchronize()
        print(json.dumps([sum(whole.tolist()), virtual_gpu.record().collectives,
                          virtual_gpu.now() - begun]), flush=True)
        os._exit(0)
    """
    total, messages, seconds = program(text)
    assert total == 256
    assert messages == {"ncclAllGather": [1, 1024], "ncclAllReduce": [1, 1 << 30]}
    assert seconds == pytest.approx(2 * 63 / 64 * (1 << 30) / 45e9, rel=0.01)


def test_torchrun_starts_ranks_that_have_a_device_each(program):
    text = """
        import json, os, torch, torch.distributed as dist
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
        names = [None, None]
        dist.all_gather_object(names, f"{dist.get_rank()} on {torch.cuda.current_device()}",
                               group=dist.new_group(backend="gloo"))
        dist.all_reduce(torch.ones(4, device="cuda"))
        dist.barrier()
        torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(json.dumps(names), flush=True)
        dist.destroy_process_group()
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    names = program(text, launcher=(*launcher, "--nproc-per-node=2"), VGPU_DEVICES=2)
    assert names == ["0 on 0", "1 on 1"]


def test_triton_compiles_and_launches(program):
    text = """
        import json, torch, triton, triton.language as tl, lamina_virtual_gpu as virtual_gpu

        @triton.jit
        def double_all(x, y, n, size: tl.constexpr):
            at = tl.program_id(0) * size + tl.arange(0, size)
            tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

        x = torch.randn(1000, device="cuda")
        double_all[(4,)](x, torch.empty_like(x), 1000, size=256)
        torch.compile(lambda a: (a * 2).relu())(x)
        names = virtual_gpu.record().kernels
        compiled = any(name.startswith("triton_") for name in names)
        print(json.dumps([names["double_all"][0], compiled]))
    """
    assert program(text, TORCHINDUCTOR_COMPILE_THREADS=1) == [1, True]
