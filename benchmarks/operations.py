"""What a kernel of ours would have to beat, operation by operation: for `blocks.py --kernels`."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def has_compiler(device: torch.device) -> bool:
    return device.type == "cuda" or any(map(shutil.which, ("g++", "c++", "clang++")))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# Of the larger of a number and its tensor's mean: a few roundings of each way.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAMES = ("rms_norm", "rope", "swiglu", "cross_entropy")


class Operation(NamedTuple):
    """An operation by several ways, and the least that its forward and backward move."""

    ways: dict[str, Callable[[], Tensor]]
    inputs: tuple[Tensor, ...]
    keeps_inputs: bool = True

    def bytes_moved(self, output: Tensor) -> int:
        """Inputs read, output written; its gradient (and inputs) read, the inputs' written."""
        inputs = sum(x.nbytes for x in self.inputs)
        return (3 if self.keeps_inputs else 2) * inputs + 2 * output.nbytes


def kernel_candidates(device: torch.device, dtype: torch.dtype) -> dict[str, Operation]:
    """Each operation by plain operators, compiled, by torch's own and by a kernel (on a GPU)."""
    # On a GPU large enough that none of them waits for the host, which takes some 0.1 ms for each.
    rows, width, vocabulary = (65_536, 4096, 32_000) if device.type == "cuda" else (512, 512, 2048)
    x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.ones(width, device=device, dtype=dtype, requires_grad=True)
    angles = torch.randn(rows, 1, 64, device=device)
    cos, sin = angles.cos(), angles.sin()
    logits = torch.randn(rows // 8, vocabulary, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (rows // 8,), device=device)

    def norm() -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * weight

    def rope() -> Tensor:
        return turn(x.view(rows, -1, 128), cos, sin)

    def swiglu() -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def loss() -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    further: dict[str, dict[str, Callable[[], Tensor]]] = {name: {} for name in NAMES}
    further["rms_norm"]["torch's own"] = lambda: F.rms_norm(x, (width,), weight, 1e-5)
    if device.type == "cuda":
        import candidate_kernels as ours

        turned = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        further["rms_norm"]["Triton"] = lambda: ours.rms_norm(x, weight)
        further["rope"]["Triton"] = lambda: ours.rope(x.view(rows, -1, 128), *turned)
        further["swiglu"]["Triton"] = lambda: ours.swiglu(x)
        further["cross_entropy"]["Triton"] = lambda: ours.cross_entropy(logits, labels).mean()

    def ways(name: str, plain: Callable[[], Tensor]) -> dict[str, Callable[[], Tensor]]:
        found = {"operators": plain}
        if has_compiler(device):
            found["compiled"] = torch.compile(plain)
        return found | further[name]

    return {
        "rms_norm": Operation(ways("rms_norm", norm), (x, weight)),
        "rope": Operation(ways("rope", rope), (x,), keeps_inputs=False),
        "swiglu": Operation(ways("swiglu", swiglu), (x,)),
        "cross_entropy": Operation(ways("cross_entropy", loss), (logits,)),
    }


def compare_kernels(device: torch.device, dtype: torch.dtype, rounds: int) -> None:
    """Forward plus backward of each operation, beside a copy of the bytes that it has to move."""
    size = 2**28 if device.type == "cuda" else 2**24
    big, other = (torch.zeros(size, device=device) for _ in range(2))
    rate = 2 * big.nbytes / timed(lambda: other.copy_(big), device, rounds)
    print(f"copy: {rate / 1e9:.0f} GB/s")
    print("| operation | by | MB | forward + backward, us | / a copy of these bytes |")
    print("| --- | --- | --- | --- | --- |")
    for name, operation in kernel_candidates(device, dtype).items():
        require_equal(name, operation)
        for way, function in operation.ways.items():
            output = function().detach()
            grad, moved = torch.ones_like(output), operation.bytes_moved(output)

            def both(function: Callable = function, grad: Tensor = grad) -> object:
                return torch.autograd.grad(function(), operation.inputs, grad)  # noqa: B023

            seconds = timed(both, device, rounds)
            print(
                f"| {name} | {way} | {moved / 1e6:.0f} | {1e6 * seconds:.0f} | "
                f"{seconds * rate / moved:.2f} |"
            )


def require_equal(name: str, operation: Operation) -> None:
    """Raise AssertionError for a way whose output or gradients are not those of the operators."""
    expected = operation.ways["operators"]()
    grad = torch.randn_like(expected)
    wanted = (expected.detach(), *torch.autograd.grad(expected, operation.inputs, grad))
    for way, function in operation.ways.items():
        output = function()
        found = (output.detach(), *torch.autograd.grad(output, operation.inputs, grad))
        for ours, theirs in zip(found, wanted, strict=True):
            tolerance = TOLERANCES[theirs.dtype]
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=tolerance,
                atol=tolerance * theirs.abs().mean(dtype=torch.float32).item(),
                msg=lambda text, way=way: f"{name} by {way}: {text}",
            )


def timed(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median seconds of a call; on a GPU those of the device, which is never left to wait."""
    for _ in range(3):
        function()
    sample = on_device if device.type == "cuda" else on_host
    return statistics.median(sample(function) for _ in range(max(10, rounds)))


def on_host(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def on_device(function: Callable[[], object], calls: int = 10) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / calls
