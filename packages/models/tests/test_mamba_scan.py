"""Mamba-2's scan against the recurrence that defines it, and the choice of its kernels."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from lamina.models.mamba import chunked_scan, scan_step
from lamina.models.mamba.scan import choose_path, kernel_scan
from lamina_testing import device_type


def recurrence(x, dt, rate, b, c, runs=None):
    """One token after the other, one head at a time: the definition (shares no code)."""
    batch, length, heads, width = x.shape
    rows = []
    for row in range(batch):
        outputs = []
        for head in range(heads):
            group = head * b.shape[2] // heads
            state = x.new_zeros(width, b.shape[3])
            of_head = []
            for t in range(length):
                if runs is not None and t and runs[row, t] != runs[row, t - 1]:
                    state = torch.zeros_like(state)
                step = dt[row, t, head]
                state = torch.exp(step * rate[head]) * state + step * torch.outer(
                    x[row, t, head], b[row, t, group]
                )
                of_head.append(state @ c[row, t, group])
            outputs.append(torch.stack(of_head))
        rows.append(torch.stack(outputs, dim=1))
    return torch.stack(rows)


def scan_inputs(length, batch=2, heads=4, groups=2, dtype=torch.float64):
    g = torch.Generator().manual_seed(length)
    x = torch.randn(batch, length, heads, 3, generator=g, dtype=dtype)
    dt = torch.rand(batch, length, heads, generator=g, dtype=dtype)
    rate = -torch.rand(heads, generator=g, dtype=dtype) * 3
    b, c = (torch.randn(batch, length, groups, 5, generator=g, dtype=dtype) for _ in range(2))
    return [tensor.requires_grad_() for tensor in (x, dt, rate, b, c)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (12, 4), (13, 4), (13, 64)])
def test_the_chunked_scan_equals_the_recurrence_with_its_gradients(length, chunk, documents):
    inputs = scan_inputs(length)
    runs = torch.tensor([[0] * 5 + [1] * 4 + [2] * 4, [0] * 8 + [1] * 5])[:, :length]
    runs = runs if documents else None
    weights = torch.randn(2, length, 4, 3, dtype=torch.float64)
    y, _ = chunked_scan(*inputs, chunk=chunk, runs=runs)
    expected = recurrence(*inputs, runs)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad((y * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for name, one, other in zip("x dt rate b c".split(), found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: n + m)


def test_a_scan_goes_on_from_a_state():
    x, dt, rate, b, c = scan_inputs(11)
    whole, last = chunked_scan(x, dt, rate, b, c, chunk=4)
    first, state = chunked_scan(x[:, :6], dt[:, :6], rate, b[:, :6], c[:, :6], chunk=4)
    second, end = chunked_scan(x[:, 6:], dt[:, 6:], rate, b[:, 6:], c[:, 6:], chunk=4, state=state)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)
    torch.testing.assert_close(end, last)
    for t in range(6, 11):
        y, state = scan_step(x[:, t], dt[:, t], rate, b[:, t], c[:, t], state)
        torch.testing.assert_close(y, whole[:, t])
    torch.testing.assert_close(state, last)


def test_long_sequences_keep_float32_precision():
    torch.manual_seed(0)
    x, dt, rate, b, c = (t.detach() for t in scan_inputs(1024, batch=1, dtype=torch.float64))
    exact, _ = chunked_scan(x, dt, rate, b, c, chunk=32)
    for chunk in (32, 128):
        y, _ = chunked_scan(*(t.float() for t in (x, dt, rate, b, c)), chunk=chunk)
        assert (y - exact).abs().max() < 3e-5 * exact.abs().max()


def test_half_precision_sums_in_float32():
    x, dt, rate, b, c = (t.detach() for t in scan_inputs(64))
    half = [t.bfloat16() for t in (x, dt, rate, b, c)]
    y, state = chunked_scan(*half, chunk=16)
    assert y.dtype == state.dtype == torch.float32
    with torch.autocast(device_type(), torch.bfloat16):
        assert all(map(torch.equal, chunked_scan(*half, chunk=16), (y, state)))
        stepped = scan_step(*(t if t.ndim == 1 else t[:, 0] for t in half), state)
    assert stepped[0].dtype == stepped[1].dtype == torch.float32
    again = scan_step(*(t if t.ndim == 1 else t[:, 0] for t in half), state)
    assert all(map(torch.equal, stepped, again))
    expected, _ = chunked_scan(*(t.double() for t in half), chunk=16)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def kernel_like_fla(q, k, v, g, *, scale, output_final_state, initial_state=None, cu_seqlens=None):
    """What chunk_simple_gla of flash-linear-attention 0.6 documents, one token at a time."""
    batch, length, heads, size = k.shape
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    state = k.new_zeros(batch, heads, size, v.shape[-1], dtype=torch.float32)
    state = state if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        if t in starts:
            state = torch.zeros_like(state)
        decayed = state * g[:, t, :, None, None].exp()
        state = decayed + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * scale, state))
    return torch.stack(outputs, dim=1).to(q.dtype), state if output_final_state else None


def test_the_kernel_is_called_by_its_documented_meaning(monkeypatch):
    module = types.ModuleType("fla.ops.simple_gla")
    module.chunk_simple_gla = kernel_like_fla
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", module)
    from lamina.models.mamba import scan as mamba_kernels

    mamba_kernels.fused_scan.cache_clear()
    x, dt, rate, b, c = (t.detach().float() for t in scan_inputs(13))
    y = kernel_scan(x, dt, rate, b, c)
    expected, _ = chunked_scan(x, dt, rate, b, c, chunk=4)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    runs = torch.tensor([[0] * 5 + [1] * 8, [0] * 13])
    y = kernel_scan(x, dt, rate, b, c, runs=runs)
    torch.testing.assert_close(
        y, chunked_scan(x, dt, rate, b, c, chunk=4, runs=runs)[0], rtol=1e-4, atol=1e-5
    )
    mamba_kernels.fused_scan.cache_clear()


def test_which_path_runs_is_decided_and_said_once(monkeypatch, caplog):
    from lamina.models.mamba import scan as mamba_kernels

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(mamba_kernels, "fused_scan", lambda: None)
    mamba_kernels._say.cache_clear()
    assert choose_path("auto", cpu, torch.float32) == "torch"
    assert not caplog.records
    for _ in range(3):
        assert choose_path("auto", gpu, torch.bfloat16) == "torch"
    assert [r.getMessage() for r in caplog.records] == [
        "Mamba's scan runs in torch: flash-linear-attention would be faster; it is not installed: "
        "pip install 'lamina-models[mamba]'"
    ]
    with pytest.raises(RuntimeError, match="it is not installed"):
        choose_path("fla", gpu, torch.bfloat16)
    with pytest.raises(RuntimeError, match="activations are on cpu: its kernels need CUDA"):
        choose_path("fla", cpu, torch.bfloat16)
    monkeypatch.setattr(mamba_kernels, "fused_scan", lambda: kernel_like_fla)
    assert choose_path("auto", gpu, torch.bfloat16) == "fla"
    assert choose_path("auto", gpu, torch.float32) == "torch"
    assert choose_path("fla", gpu, torch.float32) == "fla"
    assert choose_path("torch", gpu, torch.bfloat16) == "torch"
    mamba_kernels._say.cache_clear()
