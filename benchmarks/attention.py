"""Causal attention by each backend that torch and this machine have: forward plus backward.

    python benchmarks/attention.py                       # heads of an 8b model (GPU)
    python benchmarks/attention.py --rehearse            # tiny, on a CPU

Rows: the backends of `scaled_dot_product_attention` one by one (flash, cuDNN, memory-efficient, the
plain formula), torch's choice among them, `flex_attention` compiled, torch's variable-length
kernel over documents, and FlashAttention's own package where it is installed. What cannot run says
why. The backends of sdpa are compared with the plain formula in float32 first, on a few heads, and
the output of each way with that of torch's choice. The last two columns are floating-point
operations per second, where only pairs that attend count, and their share of the rate of a large
matrix product of the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from operations import timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lamina.models.attention.kernels import Varlen

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {
    "sdpa, flash": SDPBackend.FLASH_ATTENTION,
    "sdpa, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "sdpa, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa, plain formula": SDPBackend.MATH,
}


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def forced(backend: SDPBackend) -> Attend:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    return run


def ways(length: int, batch: int, device: torch.device) -> dict[str, Attend]:
    """All contestants; each takes `[batch, heads, sequence, width]`."""
    found: dict[str, Attend] = {name: forced(backend) for name, backend in BACKENDS.items()}
    found["sdpa, torch's choice"] = sdpa

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention import flex_attention as module

        if not flexible:
            if device.type != "cuda":
                raise RuntimeError("it trains on CUDA only")
            mask = module.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=device.type
            )
            flexible.extend((torch.compile(module.flex_attention), mask))
        run, mask = flexible
        out: Tensor = run(q, k, v, block_mask=mask, enable_gqa=True)
        return out

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        scale = q.shape[-1] ** -0.5
        return Varlen(starts, length)(*rows, scale=scale, dropout=0.0).transpose(1, 2)

    flexible: list[object] = []
    found |= {"flex_attention": flex, "varlen, one document a row": varlen}
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_func

        def package(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = [x.transpose(1, 2) for x in (q, k, v)]
            out: Tensor = flash_attn_func(*rows, causal=True)
            return out.transpose(1, 2)

        found["flash_attn's package"] = package
    return found


def both(attend: Attend, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the output, and the gradients of queries, keys and values."""
    out = attend(*inputs)
    return out, *torch.autograd.grad(out, inputs, grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="queries', and keys'")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rehearse", action="store_true", help="tiny")
    given = parser.parse_args()
    if given.rehearse:
        given.batch, given.sequence, given.heads, given.width, given.rounds = 1, [64], [4, 2], 16, 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, {dtype}")
    size = 8192 if device.type == "cuda" and not given.rehearse else 256
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    rate = 2 * size**3 / timed(lambda: a @ b, device, given.rounds)
    print("| sequence | backend | forward + backward, us | TFLOP/s | of the matrix rate |")
    print("| --- | --- | --- | --- | --- |")
    for length in given.sequence:
        compare(length, given, device, dtype, rate)


def compare(
    length: int, given: argparse.Namespace, device: torch.device, dtype: torch.dtype, rate: float
) -> None:
    """Print a row for each backend."""
    queries, keys = given.heads
    drawn = [
        torch.randn(given.batch, heads, length, given.width, device=device, dtype=dtype)
        for heads in (queries, keys, keys)
    ]
    inputs = tuple(x.requires_grad_() for x in drawn)
    grad = torch.randn_like(inputs[0])
    # The formula keeps all pairs, so its float32 copy is of the first row and its first heads.
    few = (slice(1), slice(queries // keys), slice(min(length, 1024)))
    one = (slice(1), slice(1), few[2])
    small = tuple(
        x.detach()[part].contiguous().requires_grad_()
        for x, part in zip(inputs, (few, one, one), strict=True)
    )
    wide = tuple(x.detach().float().requires_grad_() for x in small)
    expected = both(forced(SDPBackend.MATH), wide, grad[few].float())
    whole = sdpa(*inputs).detach()
    # Two products in forward, five in backward, over half of all pairs.
    flops = 7 * given.batch * queries * length**2 * given.width
    for name, attend in ways(length, given.batch, device).items():
        try:
            if name.startswith("sdpa"):  # the others are made for one length
                for ours, theirs in zip(both(attend, small, grad[few]), expected, strict=True):
                    error = (ours.float() - theirs).norm() / theirs.norm()
                    assert error < 0.02, f"{name} is off by {error:.3f}"
            error = (both(attend, inputs, grad)[0].detach() - whole).norm() / whole.norm()
            assert error < 0.02, f"{name} is off by {error:.3f}"
            seconds = timed(lambda run=attend: both(run, inputs, grad), device, given.rounds)
        except (RuntimeError, ImportError, ValueError) as error:  # no memory is one, too
            print(f"| {length} | {name} | {str(error).strip().splitlines()[0][:70]} | | |")
            continue
        speed = flops / seconds
        print(
            f"| {length} | {name} | {1e6 * seconds:.0f} | {speed / 1e12:.1f} | {speed / rate:.0%} |"
        )


if __name__ == "__main__":
    main()
