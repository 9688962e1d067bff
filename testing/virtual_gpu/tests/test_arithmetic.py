"""With `VGPU_COMPUTE` the virtual GPU computes, by the CPU's kernels over its own memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("arithmetic_programs.py")
ORDERS = ("at-once", "clock", "late", "adversarial")


@pytest.fixture(scope="module", params=ORDERS)
def differences(request: pytest.FixtureRequest) -> dict[str, float]:
    """How far each way to train on the GPU is from the same on the CPU."""
    env = {**os.environ, "VGPU_COMPUTE": request.param}
    command = [sys.executable, str(PROGRAMS)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def test_a_transformer_trains_on_the_gpu_with_the_bits_of_the_cpu(differences):
    ways = ("foreach", "one by one", "fused", "bf16", "autocast")
    assert {way: differences[way] for way in ways} == dict.fromkeys(ways, 0.0)


def test_a_backward_that_the_cpu_does_in_other_steps_is_as_near(differences):
    assert differences["rms, loss"] < 1e-5


def test_dropout_is_drawn_from_the_state_of_the_gpus_generator(differences):
    assert differences["recomputed dropout"] == differences["drawn again"] == 0.0
    assert differences["dropout does something"] > 1e-3


OPERATORS = """
    import json, torch, torch.nn.functional as F
    torch.manual_seed(0)

    def wide(shape, **how):
        return torch.randn(shape, **how)

    def both(function, *given):
        '''Outputs and gradients on the CPU and on the GPU.'''
        answers = []
        for device in ("cpu", "cuda"):
            there = [x.detach().to(device) if isinstance(x, torch.Tensor) else x for x in given]
            trained = [x.requires_grad_() for x in there
                       if isinstance(x, torch.Tensor) and x.is_floating_point()]
            out = function(*there)
            if isinstance(out, torch.Tensor) and out.requires_grad:
                grads = torch.autograd.grad(out.float().square().sum(), trained, allow_unused=True)
            else:
                grads = []
            parts = [*(out if isinstance(out, (tuple, list)) else [out]), *grads]
            answers.append([x.detach().cpu() for x in parts if x is not None])
        return max((float((a.double() - b.double()).abs().max()) if a.numel() else 0.0)
                   if a.shape == b.shape else 1e9 for a, b in zip(*answers, strict=True))

    x, mask = wide((6, 8)), wide((6, 8)) > 0
    places = torch.tensor([3, 1, 1])
    q, k, v = wide((2, 4, 24, 16)), wide((2, 2, 24, 16)), wide((2, 2, 24, 16))
    bias = wide((2, 4, 24, 24))
    def row_scaled(a, b):
        kind = torch.float8_e4m3fn
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(a.detach().to(kind), b.detach().to(kind).t(), one, one,
                                out_dtype=torch.bfloat16)
    def grouped(a, b, ends):
        return F.grouped_mm(a.bfloat16(), b.bfloat16(), offs=ends)
    def put(a, p):
        b = a.clone(); b[p] = 7.0; b[a > 0] *= 2; b[:, 1:3].add_(1); return b
    cases = {
        "masks": both(lambda a, m: a[m], x, mask),
        "writes": both(put, x, places),
        "nonzero": both(lambda m: m.nonzero(), mask),
        "unique": both(lambda p: torch.unique(p, return_counts=True), places),
        "sort": both(lambda a: torch.sort(a, 1), x),
        "topk": both(lambda a: torch.topk(a, 3), x),
        "index_add": both(lambda a, p: torch.zeros_like(a).index_add(0, p, a[:3]), x, places),
        "scan": both(lambda a: a.cumsum(1).logsumexp(0), x),
        "attention of few heads": both(
            lambda *a: F.scaled_dot_product_attention(*a, is_causal=True, enable_gqa=True),
            q, k, v),
        "attention with a bias": both(
            lambda a, m: F.scaled_dot_product_attention(a, a, a, attn_mask=m), q, bias),
        "a convolution": both(lambda a, w: F.conv2d(a, w), wide((2, 3, 9, 9)), wide((4, 3, 3, 3))),
        "of each channel": both(
            lambda a, w: F.conv1d(a, w, groups=3), wide((2, 3, 9)), wide((3, 1, 3))),
        "groups": both(grouped, wide((16, 16)), wide((2, 16, 16)), torch.tensor([4, 16]).int()),
        "fp8": both(row_scaled, wide((16, 32)), wide((16, 32))),
        "a solution": both(
            lambda a: torch.linalg.cholesky(a @ a.T + torch.eye(6, device=a.device)), x),
        "norms": both(lambda a: torch.stack(torch._foreach_norm([a, a * 2])), x),
    }
    def normed(training, dtype):
        def run(a, w):
            stats = a.new_full((8,), 0.3), a.new_full((8,), 2.0)
            out = F.batch_norm(a.to(dtype), *(s.to(dtype) for s in stats), w.to(dtype),
                               training=training)
            return out.float()
        return run
    for training in (True, False):
        cases |= {f"batch norm {training}": both(normed(training, torch.float32), x, x[0]),
                  f"batch norm bf16 {training}": both(normed(training, torch.bfloat16), x, x[0])}
    def recurrent(kind):
        def run(a, *weights):
            inside = kind(8, 4).to(a.device)
            return torch.func.functional_call(
                inside, dict(zip(dict(inside.named_parameters()), weights)), (a,))[0]
        return both(run, x, *(wide(w.shape) for w in kind(8, 4).parameters()))
    cases |= {kind.__name__: recurrent(kind) for kind in (torch.nn.GRU, torch.nn.LSTM)}
    cases["log sigmoid"] = both(F.logsigmoid, x * 5)
    def counted(a):  # steps of an optimizer, on the GPU and on the host
        steps = [torch.ones(()), torch.ones((), device=a.device), torch.ones(())]
        torch._foreach_add_(steps, 1.0)
        return steps
    cases["counts on both"] = both(counted, x)
    whole = torch.histc(torch.tensor([1, 3, 3, 0, 2], dtype=torch.int32).cuda(), 4, 0, 3)
    cases["histogram of whole numbers"] = abs(int(whole[3]) - 2) + (whole.dtype != torch.int32)
    flash = F.scaled_dot_product_attention(*(x.cuda().bfloat16() for x in (q, q, q)))
    wanted = F.scaled_dot_product_attention(q, q, q)
    cases["flash"] = float((flash.cpu().float() - wanted).abs().max()) - 0.05
    print(json.dumps({name: value for name, value in cases.items() if value > 1e-3}))
"""


@pytest.mark.parametrize("order", ["at-once", "adversarial"])
def test_operators_agree_with_the_cpu(program: Any, order: str) -> None:
    assert program(OPERATORS, VGPU_COMPUTE=order) == {}


@pytest.mark.parametrize("order", ORDERS)
def test_a_default_device_is_not_that_of_the_arithmetic(program, order):
    """A kernel that made tensors of the GPU would wait for the stream that waits for it."""
    text = """
        import json, torch, torch.nn.functional as F
        import lamina_virtual_gpu as virtual_gpu
        from torch.nn.attention import SDPBackend, sdpa_kernel
        torch.set_default_device("cuda")
        q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))

        def attend():
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.cuda.synchronize()  # in the order "late" all arithmetic is done here

        attend()
        virtual_gpu.reset()
        attend()
        print(json.dumps(virtual_gpu.record().copies))
        """
    # torch 2.15 fills the seed of a dropout that there is not.
    assert program(text, VGPU_COMPUTE=order) == program(text, VGPU_COMPUTE="none")


def test_a_kernel_that_no_operator_covers_is_refused_by_name(program):
    text = """
        import json, torch
        x = torch.ones(1000, device="cuda")
        try:
            source = "extern \\"C\\" __global__ void mine(float *x) {}"
            torch.cuda._compile_kernel(source, "mine")((1, 1, 1), (32, 1, 1), (x,))
            print(json.dumps("computed"))
        except Exception as error:
            print(json.dumps("refused"))
        """
    assert program(text, VGPU_COMPUTE="at-once") == "refused"


def test_a_product_of_cublas_that_no_operator_asks_for_is_refused(program):
    text = """
        import ctypes, json, torch
        x = torch.ones(4, 4, device="cuda")
        x @ x  # the handle is made
        with open("/proc/self/maps") as maps:
            (path,) = {line.split()[-1] for line in maps if "libcublas.so" in line}
        call, one = ctypes.CDLL(path).cublasSgemm_v2, ctypes.byref(ctypes.c_float(1.0))
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        at = ctypes.c_void_p(x.data_ptr())
        print(json.dumps(call(handle, 0, 0, 4, 4, 4, one, at, 4, at, 4, one, at, 4)))
        """
    assert program(text, VGPU_COMPUTE="at-once") == 15  # CUBLAS_STATUS_NOT_SUPPORTED
    assert program(text, VGPU_COMPUTE="none") == 0


def test_an_operator_without_arithmetic_raises_its_name(program):
    text = """
        import json, torch
        x = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
        try:
            torch.ops.aten._convert_weight_to_int4pack(torch.ones(16, 16, device="cuda").int(), 2)
        except NotImplementedError as error:
            print(json.dumps(str(error)))
        """
    assert "_convert_weight_to_int4pack has no arithmetic" in program(text, VGPU_COMPUTE="at-once")


TRITON = """
    import json, torch, triton, triton.language as tl

    @triton.jit
    def half(x):
        return x * 0.5

    @triton.jit
    def kernel(x, y, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        nothing = tl.sum(tl.zeros((4,), tl.float32))
        tl.store(y + at, half(tl.load(x + at, mask=at < count)) + nothing, mask=at < count)

    import lamina_virtual_gpu as virtual_gpu
    x, y = torch.arange(100.0, device="cuda"), torch.empty(100, device="cuda")
    for block in (64, 128):  # the second is compiled after the first has been interpreted
        kernel[(triton.cdiv(100, block),)](x, y, 100, BLOCK=block)
    print(json.dumps([y.tolist() == (x / 2).tolist(), virtual_gpu.record().kernels["kernel"][0]]))
"""


NUMBERS = """
    import json, torch, triton, triton.language as tl
    from torch.utils._python_dispatch import TorchDispatchMode

    @triton.jit
    def larger(a, b):
        return tl.where(a > b, a, b)

    @triton.jit
    def kernel(x, y, narrow, eighth, most, scanned, product, N: tl.constexpr):
        at = tl.arange(0, N)
        square = at[:, None] * N + at[None, :]
        a, b = tl.load(x + square), tl.load(y + square)
        tl.store(narrow + square, a.to(tl.bfloat16) + b.to(tl.bfloat16))
        tl.store(eighth + square, a.to(tl.float8e4nv))
        tl.store(most + at, tl.reduce(a, 1, larger))
        tl.store(scanned + square, tl.associative_scan(a, 1, larger))
        tl.store(product + square, tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16)))

    torch.manual_seed(0)
    N = 32
    x, y = 300 * torch.randn(N, N, device="cuda"), torch.randn(N, N, device="cuda")
    narrow, eighth = x.bfloat16(), x.to(torch.float8_e4m3fn)
    outs = [torch.empty_like(narrow), torch.empty_like(eighth), x[0].clone(), x.clone(), x.clone()]
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    with Watching():
        kernel[(1,)](x, y, *outs, N=N)
    wanted = [narrow + y.bfloat16(), x.clamp(-448, 448).to(torch.float8_e4m3fn), x.amax(1),
              x.cummax(1).values, narrow.float() @ y.bfloat16().float()]
    print(json.dumps([*(torch.equal(a.float(), b.float()) for a, b in zip(outs[:4], wanted)),
                      torch.allclose(outs[4], wanted[4], rtol=1e-4, atol=1e-2), not seen]))
"""


def test_narrow_numbers_in_a_kernel_round_as_on_a_gpu(program):
    """A mode of the program sees nothing of how they are computed."""
    assert program(NUMBERS, VGPU_COMPUTE="at-once") == [True] * 6


INDUCTOR = """
    import json, torch, torch.nn as nn, torch.nn.functional as F
    import lamina_virtual_gpu as virtual_gpu
    torch.manual_seed(0)

    def block(x, w):
        return torch.softmax(F.gelu(F.rms_norm(x, (64,), w)), -1) + x.sin()

    def trained(device, run):
        given = [t.to(device).requires_grad_() for t in (x, w)]
        out = run(*given)
        return [out, *torch.autograd.grad(out.square().sum(), given)]

    def apart(rows):
        global x, w
        x, w = torch.randn(rows, 64), torch.randn(64)
        pairs = zip(trained("cpu", block), trained("cuda", torch.compile(block, dynamic=False)))
        return max(float((a - b.cpu()).abs().max() / a.abs().max()) for a, b in pairs)

    # Of many rows the interpreter computes blocks at once. 1,000 is no power of two.
    near = [apart(rows) < 1e-6 for rows in (8, 1000)]
    kernels = virtual_gpu.record().kernels
    print(json.dumps([all(near), any("triton" in name for name in kernels)]))
"""


def test_blocks_that_inductor_compiles_are_computed(program, tmp_path):
    assert program(INDUCTOR, VGPU_COMPUTE="at-once") == [True, True]


CONSTANT = """
    import json, torch

    x = torch.tensor([3, -3], device="cuda")
    # Inductor computes this constant on the device, and writes it into its code.
    out = torch.compile(lambda x: torch.where(x > 0, x, torch.scalar_tensor(4, device="cuda")))(x)
    print(json.dumps(out.tolist()))
"""


def test_code_that_was_compiled_without_arithmetic_is_not_run_with_it(program, tmp_path):
    where = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "kept"}
    program(CONSTANT, **where)
    assert program(CONSTANT, VGPU_COMPUTE="at-once", **where) == [3, 4]


def test_a_kernel_of_triton_races_with_what_reads_its_output(program):
    text = (
        TRITON
        + """
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    virtual_gpu.forget_races()
    kernel[(2,)](x, y, 100, BLOCK=64)
    with torch.cuda.stream(side):
        x.sum()
    read = len(virtual_gpu.races())
    with torch.cuda.stream(side):
        y.sum()
    torch.cuda.synchronize()
    print(json.dumps([read, len(virtual_gpu.races())]))
    """
    )
    assert program(text, VGPU_COMPUTE="at-once", VGPU_RACES="report") == [0, 1]


def test_a_kernel_of_triton_is_compiled_launched_and_computed(program, tmp_path):
    assert program(TRITON, VGPU_COMPUTE="late") == [True, 2]
