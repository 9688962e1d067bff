"""The head with its loss: ours beside torch's operators, by time and peak memory.

    python benchmarks/losses.py                      # 4,096 tokens, width 512, vocabulary 32,000
    python benchmarks/losses.py --tokens 1024 --vocabulary 128000

Forward plus backward of the sum of cross-entropies of ``hidden @ weight.T``, gradients of both.
Each way runs in a process of its own, which is forked from this one: its peak memory above the
start is what the way needed, gradients included (on a GPU, torch's own count). The median of the
steps counts; seconds are those that the process computed with ``--processor-time``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.models import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def ways() -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "lamina": linear_cross_entropy,
        "F.linear + F.cross_entropy": plain,
        "the same, compiled": torch.compile(plain),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        found["F.linear_cross_entropy, chunked"] = chunked
    return found


def peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, settings: argparse.Namespace, answer: object) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_num_threads(settings.threads)
    torch.manual_seed(0)
    shapes = (settings.tokens, settings.width), (settings.vocabulary, settings.width)
    hidden, weight = (
        torch.randn(shape, device=device, dtype=dtype).mul_(0.1).requires_grad_()
        for shape in shapes
    )
    labels = torch.randint(settings.vocabulary, (settings.tokens,), device=device)
    clock = time.process_time if settings.processor_time else time.perf_counter
    loss, before, times = ways()[name], peak(device), []
    for _ in range(1 + settings.steps):
        hidden.grad = weight.grad = None
        begin = clock()
        value = loss(hidden, weight, labels)
        value.backward()
        total = value.item()  # waits for a GPU
        times.append(clock() - begin)
    answer.put((statistics.median(times[1:]), peak(device) - before, total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="on a busy CPU")
    settings = parser.parse_args()
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    print(f"{settings.tokens} tokens, width {settings.width}, vocabulary {settings.vocabulary}")
    print("| | forward + backward, ms | peak above the start, MiB | loss |")
    print("| --- | --- | --- | --- |")
    for name in ways():
        answer = context.SimpleQueue()
        process = context.Process(target=measure, args=(name, settings, answer))
        process.start()
        process.join()
        if process.exitcode:
            print(f"| {name} | failed | - | - |")
            continue
        seconds, size, total = answer.get()
        print(f"| {name} | {1e3 * seconds:.0f} | {size / 2**20:.0f} | {total:.2f} |", flush=True)


if __name__ == "__main__":
    main()
