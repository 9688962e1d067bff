"""What the clock charges: the bytes that kernels move, and streams that share the device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import lamina_virtual_gpu as virtual_gpu

ELEMENTS = 1 << 28


def spent(*streams: torch.cuda.Stream) -> float:
    """Seconds of one addition on each of the streams, in this order."""
    source = torch.empty(ELEMENTS, device="cuda")
    result = torch.empty_like(source)
    torch.cuda.synchronize()
    begun = virtual_gpu.now()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.add(source, 1, out=result)
    torch.cuda.synchronize()
    return virtual_gpu.now() - begun


def test_streams_share_the_device():
    first, second, main = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()
    alone = spent(main)
    for together in ((main, first), (first, main), (first, second), (main, main)):
        assert spent(*together) == pytest.approx(2 * alone, rel=0.02)


def test_a_stream_that_only_waits_slows_none():
    waiting = torch.cuda.Stream()
    alone = spent(torch.cuda.default_stream())
    with torch.cuda.stream(waiting):
        torch.cuda._sleep(1000)
    assert spent(torch.cuda.default_stream()) == pytest.approx(alone, rel=0.02)


def test_a_sleep_lasts_as_many_cycles_as_it_is_told():
    def seconds(cycles: int) -> float:
        torch.cuda.synchronize()
        begun = virtual_gpu.now()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        return virtual_gpu.now() - begun

    assert seconds(20_000_000) == pytest.approx(2 * seconds(10_000_000), rel=0.01)


@pytest.mark.parametrize(
    ("kernel", "act", "width"),
    [
        ("FillFunctor", lambda wide, narrow: wide.fill_(1), 4),
        ("CUDAFunctorOnSelf_add", lambda wide, narrow: wide.add_(1), 8),
        ("CUDAFunctor_add", lambda wide, narrow: torch.add(wide, wide), 12),
        ("copy_kernel_cuda", lambda wide, narrow: wide.to(torch.bfloat16), 6),
        ("SoftMaxForward", lambda wide, narrow: wide.view(-1, 1 << 15).log_softmax(-1), 16),
        ("CatArray", lambda wide, narrow: torch.cat([wide, wide]), 16),
        ("CopyFunctor", lambda wide, narrow: torch._foreach_copy_([wide], [narrow]), 6),
    ],
)
def test_a_kernel_is_charged_what_it_moves(kernel, act, width):
    wide = torch.zeros(1 << 26, device="cuda")
    narrow = torch.zeros(1 << 26, device="cuda", dtype=torch.bfloat16)
    virtual_gpu.reset()
    act(wide, narrow)
    kernels = virtual_gpu.record().kernels
    seconds = sum(spent for name, (_, spent) in kernels.items() if kernel in name)
    rate = wide.numel() * width / seconds
    profile = next(one for one in virtual_gpu.PROFILES if one.key == "h100")
    assert 0.5 < rate / (profile.memory_gbs * 1e9) < 0.95


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [((1e9, 0.0), 1e9 / (0.87 * 3352e9)), ((1e6, 1e10), 1e10 / (0.66 * 67e12))],
    ids=["bytes", "operations in fp32"],
)
def test_what_a_program_tells_of_a_kernel_is_charged(costs, seconds):
    from lamina_virtual_gpu.recording import tell_kernel

    small = torch.zeros(8, device="cuda")
    virtual_gpu.reset()
    tell_kernel(*costs)
    small.add_(1)
    small.add_(1)
    (total,) = [spent for name, (_, spent) in virtual_gpu.record().kernels.items() if "add" in name]
    assert total == pytest.approx(seconds, rel=0.05)


OF_RATES = """
    import json, os, torch, torch.distributed as dist
    import lamina_virtual_gpu as virtual_gpu

    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = "8"
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=8, device_id=device)
    x = torch.zeros(1 << 26, device="cuda")
    whole = torch.empty(8 << 26, device="cuda")
    torch.cuda.synchronize()

    begun = virtual_gpu.now_at_rates()
    for _ in range(3):  # a gather beside additions; then both are waited for
        gather = dist.all_gather_into_tensor(whole, x, async_op=True)
        for _ in range(40):
            x + 1
        gather.wait()
    ends = virtual_gpu.stream_ends(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    now = virtual_gpu.now_at_rates()
    print(json.dumps([{n: now[n] - begun[n] for n in now}, {n: ends[n] - begun[n] for n in now}]))
    os._exit(0)
"""


def test_a_run_under_several_rates_takes_what_runs_of_their_own_take(program):
    def alone(**settings: float) -> float:
        return program(OF_RATES, **settings)[0]["own"]

    rates = "slow links: link=20; slow kernels: kernels=0.125 link=1e6"
    seconds, ends = program(OF_RATES, VGPU_RATES=rates)
    assert list(seconds) == ["own", "slow links", "slow kernels"]
    assert seconds["own"] == pytest.approx(alone(), rel=1e-6)
    assert seconds["slow links"] == pytest.approx(alone(VGPU_LINK_GBS=20), rel=1e-6)
    # Additions are bound by memory, so an eighth of its rate is that of slow kernels.
    slow_memory = 0.125 * 3352 * 0.87
    expected = alone(VGPU_LINK_GBS=1e6, VGPU_MEMORY_GBS=slow_memory)
    assert seconds["slow kernels"] == pytest.approx(expected, rel=0.01)
    assert seconds["slow links"] > 2 * seconds["own"]
    # The host waits for all streams, and this one has waited for the gathers.
    assert ends == pytest.approx(seconds, rel=1e-3)


def test_rates_that_mean_nothing_end_the_program():
    for rates in ("links of 60", "slow: link", "slow: speed=2"):
        answer = subprocess.run(
            [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').add_(1)"],
            env={**os.environ, "VGPU_RATES": rates},
            capture_output=True,
            text=True,
        )
        assert answer.returncode == 2
        assert rates in answer.stderr
        assert "Write" in answer.stderr
