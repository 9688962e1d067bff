"""The Triton AdamW: interpreted against torch's, and compiled for real targets."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

COMPILED = Path(__file__).with_name("compile_adamw.py")
PROGRAM = """
import sys
import torch
from lamina.ddp.optimizer.adamw_cuda import fused_adamw

# Every two values meet; the interpreter is slow.
chosen = {(0, 0, 0), (0, 1, 1), (0, 0, 2), (1, 1, 0), (1, 0, 1), (1, 1, 2)}
for first, decoupled in enumerate((True, False)):
    for second, maximize in enumerate((False, True)):
        for third, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
            if "--all" not in sys.argv and (first, second, third) not in chosen:
                continue
            torch.manual_seed(0)
            n = 2500
            start = torch.randn(n)
            main, average, square = start.clone(), torch.zeros(n), torch.zeros(n)
            weights = torch.empty(n, dtype=dtype)
            reference = torch.nn.Parameter(start.clone())
            kind = torch.optim.AdamW if decoupled else torch.optim.Adam
            how = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, maximize=maximize)
            optimizer = kind([reference], foreach=True, **how)
            for step in range(1, 6):
                gradient = torch.randn(n) * 10.0 ** torch.randint(-6, 3, (n,))
                reference.grad = gradient.clone()
                optimizer.step()
                fused_adamw(main, gradient, average, square, weights, torch.tensor(float(step)),
                            decoupled=decoupled, **how)
            worst = float((main - reference.detach()).abs().max())
            assert worst <= 1e-6, (decoupled, maximize, dtype, worst)
            if dtype != torch.float16:
                assert torch.equal(weights, main.to(dtype)), (dtype, "rounding")
print("fine")
"""


IN_A_STEP = """
import torch
from torch import nn
from lamina.ddp import (
    DistributedDataParallel, DistributedDataParallelConfig, ShardedOptimizer, full_parameters,
)
from lamina.ddp.optimizer.flat_step import KERNELS, RunKernel, one_pass_adam
from lamina.mesh import ParallelLayout, init_distributed

calls = []

def counted(*arguments):
    done = one_pass_adam(*arguments)
    calls.extend([1] * done)
    return done

KERNELS["cpu"] = RunKernel(counted, writes_weights=True)  # where Triton is interpreted

def train(fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)).to(torch.bfloat16)
    mesh = ParallelLayout().build("cpu")
    how = {"fused": True} if fused else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **how)
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(), mesh)
    optimizer = ShardedOptimizer(optimizer, wrapped, mesh)
    for step in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        skipped = wrapped.module[2] if step == 3 else None
        hidden = wrapped(x)
        hidden.float().square().mean().backward()
        if skipped is not None:
            for group in wrapped.parameter_groups():
                for ref, main in zip(group.refs, group.main_parameters):
                    if ref.name.startswith("2."):
                        main.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for name, main in full_parameters(wrapped).items():
            held = wrapped.module.get_parameter(name)
            assert torch.equal(held.data, main.bfloat16()), (step, name)
    return full_parameters(wrapped), optimizer.state_dict()

with init_distributed():
    plain, plain_state = train(False)
    assert not calls
    fused, fused_state = train(True)
    # one run in the first three steps, also where the last layer is skipped; two once it lags
    assert len(calls) == 8, len(calls)
for name, value in plain.items():
    assert float((fused[name] - value).abs().max()) <= 2e-6, name
    steps = [float(s["state"][name]["step"]) for s in (plain_state, fused_state)]
    assert steps[0] == steps[1], (name, steps)
print("fine")
"""


def test_in_a_step_it_replaces_torchs_and_the_copy_to_the_weights():
    assert "fine" in run([sys.executable, "-c", IN_A_STEP], TRITON_INTERPRET="1")


def run(command, **changes):
    environment = {**os.environ, **changes}
    environment = {name: value for name, value in environment.items() if value}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "choice", [[], pytest.param(["--all"], marks=pytest.mark.slow)], ids=["choice", "all"]
)
def test_interpreted_it_is_torchs_foreach_adamw_within_1e_6_and_rounds_to_nearest_even(choice):
    assert "fine" in run([sys.executable, "-c", PROGRAM, *choice], TRITON_INTERPRET="1")


def test_compiled_it_does_not_spill_and_loads_16_bytes_at_a_time():
    lines = run([sys.executable, str(COMPILED), "80", "90", "100"], TRITON_INTERPRET="")
    assert lines.count(" 0 B stack") == 9


def test_tensors_that_do_not_fit_are_refused():
    from lamina.ddp.optimizer.adamw_cuda import fused_adamw

    flat = torch.zeros(8)
    with pytest.raises(ValueError, match="flat contiguous"):
        fused_adamw(
            flat,
            flat[:4],
            flat,
            flat,
            flat,
            torch.ones(()),
            lr=1.0,
            betas=(0.9, 0.9),
            eps=1e-8,
            weight_decay=0.0,
        )


def test_the_kernel_is_launched_on_the_gpu_of_its_tensors(monkeypatch):
    """Triton takes the current GPU. `device_of` makes it that of the tensors, for a while."""
    from lamina.ddp.optimizer import adamw_cuda

    there, seen = [], []

    @contextmanager
    def device_of(tensor):
        there.append(tensor)
        yield
        there.clear()

    class Kernel:
        def __getitem__(self, grid):
            return lambda main, *_, **__: seen.append(there[-1] is main)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(adamw_cuda, "adamw_kernel", Kernel())
    flat = [torch.zeros(8) for _ in range(5)]
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    adamw_cuda.fused_adamw(*flat, torch.ones(()), **settings)
    assert seen == [True]
