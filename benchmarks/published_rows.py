"""Published rows of torchtitan and others, planned: predicted, published, error.

`--half fit` are the rows that the constants of `lamina.models.plan.constants` were chosen on,
`--half judge` the others. All are planned with Lamina's engine, blocks and recomputation, so that
errors of memory are those of the plan and of another program together. Sources: torchtitan
benchmarks/ at b5bcd76, NeMo Automodel docs/performance-summary, Llama 3 (Meta, 2024), and steps of
Lamina on one H200 (docs/records/hardware.md).

    python benchmarks/published_rows.py --half fit
    .nox/virtual-gpu/bin/python benchmarks/published_rows.py --engine fsdp2
    .nox/virtual-gpu/bin/python benchmarks/published_rows.py --same-program

`--engine fsdp2` plans torch's FSDP2 in torchtitan's recipe (a Llama in plain torch, recomputation
that is selective by operator, blocks compiled), so that the error is that of the plan. All layers
are played, for what the allocator reserves. Over tp DTensors cut the model. FP8 needs torchao, and
compiled blocks of DTensors need torch 2.14: run it in the environment of the virtual GPU.

`--same-program` runs torch's FSDP2 in torchtitan's recipe on the virtual GPU (torchao has to be
there for FP8), so that the error is that of the device alone. Two shares of the data sheet's rates
are chosen, each on one row: that of products in bf16, and that of products in FP8 (`FITTED`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.tensor.parallel import loss_parallel
from torchtitan_recipe import by_fsdp2

from lamina.mesh import ParallelLayout
from lamina.models import preset
from lamina.models.plan import Job, plan


@dataclass(frozen=True)
class Row:
    """A published row: tokens/s or TFLOP/s per GPU, and GiB reserved where they are told."""

    name: str
    half: str
    gpu: str
    job: Job
    tokens: float = 0.0
    tflops: float = 0.0
    gib: float = 0.0
    compiled_loss: bool = False
    """A guess: with it the memory of that row is as it was published."""


def llama(size: str, ranks: int, **settings: Any) -> Job:
    """A job of a Llama 3 at 8,192 tokens, unless other settings say so."""
    return Job(**{"config": preset(f"llama3-{size}"), "ranks": ranks, "sequence": 8192, **settings})


def even_stages(number: int, layers: int = 126) -> tuple[int, ...]:
    """torchtitan's: the first stage has the least, those between have what is over."""
    least, over = divmod(layers, number)
    between = [least + (at < over) for at in range(number - 2)]
    return least, *between, layers - least - sum(between)


def torchtitan() -> Iterator[Row]:
    """Rows of torchtitan on H100 with 96 GB, and on H200."""
    one = {"batch": 2, "recompute": "selective"}
    faster, narrow = {"compiled": True}, {"compiled": True, "precision": "fp8"}
    gpu = "h100-96gb"
    eager = llama("8b", 8, **one)
    yield Row("8B, 8, eager", "fit", gpu, eager, 5762, gib=82.4)
    yield Row("8B, 8, compiled", "fit", gpu, replace(eager, **faster), 6667, gib=77.0)
    yield Row("8B, 8, compiled FP8", "fit", gpu, replace(eager, **narrow), 8532, gib=76.8)
    more = llama("8b", 128, **one)
    yield Row("8B, 128, eager", "judge", gpu, more, 5605, gib=67.0)
    yield Row("8B, 128, compiled", "judge", gpu, replace(more, **faster), 6514, gib=62.0)
    yield Row("8B, 128, compiled FP8", "judge", gpu, replace(more, **narrow), 8380, gib=61.8)
    wide = llama("8b", 32, **one, **narrow)
    yield Row("8B, 32 H200, compiled FP8", "fit", "h200", wide, 10938, gib=48.0, compiled_loss=True)
    long = llama("8b", 8, recompute="full", **narrow)
    for cp, tokens, gib in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        parts = replace(long, layout=ParallelLayout(cp=cp), sequence=32768 * cp)
        yield Row(f"8B, 8, FSDP {8 // cp} x CP {cp}, FP8", "judge", gpu, parts, tokens, gib=gib)
    cut = ParallelLayout(tp=8)
    plain = llama("8b", 64, batch=12, recompute="selective", compiled=True, layout=cut)
    yield Row("8B, 64, FSDP 8 x TP 8, compiled", "judge", gpu, plain, 4378)
    full = llama("70b", 256, batch=16, recompute="full", layout=cut, **narrow)
    yield Row("70B, 256, FSDP 32 x TP 8, FP8", "judge", gpu, full, 829, gib=71.9)
    # Microbatches and layers of a stage are what torchtitan 9dec370 takes where nothing is said.
    stages = {"layout": ParallelLayout(tp=8, pp=8), "microbatches": 8, "stage": even_stages(8)}
    deep = llama("405b", 512, batch=32, recompute="full", **stages, **narrow)
    yield Row("405B, 512, 1F1B, FP8", "judge", gpu, deep, 100, gib=82.5)
    woven = replace(deep, schedule="interleaved_1f1b", stage=even_stages(16))
    yield Row("405B, 512, interleaved, FP8", "judge", gpu, woven, 128, gib=72.7)


def mixtures() -> Iterator[Row]:
    """Mixtures of experts of NeMo Automodel: 4,096 tokens, 512 or 8,192 sequences a step.

    Its configurations (examples/benchmark/configs) say what is recomputed, that a stage has two
    layers, and that experts get equal numbers of tokens.
    """
    gpu = "h100-80gb"
    small = Job(
        config=preset("qwen3-30b-a3b"), ranks=8, layout=ParallelLayout(ep=8), batch=64,
        microbatches=16, recompute="full",
    )  # fmt: skip
    yield Row("Automodel Qwen3-30B, 8, EP 8", "judge", gpu, small, 12040)
    middle = Job(
        config=preset("gpt-oss-120b"), ranks=64, layout=ParallelLayout(ep=64), batch=8,
        microbatches=4,
    )  # fmt: skip
    yield Row("Automodel GPT-OSS 120B, 64, EP 64", "judge", gpu, middle, 7626)
    deepseek = preset("deepseek-v3")
    large = Job(
        config=deepseek, ranks=256, layout=ParallelLayout(pp=4, ep=64), batch=8, microbatches=8,
        recompute="full", schedule="interleaved_1f1b", stage=(2,) * 29 + (1,) * 3,
    )  # fmt: skip
    yield Row("Automodel DeepSeek-V3, 256, PP 4, EP 64", "judge", gpu, large, 1002)
    larger = replace(large, ranks=1024, layout=ParallelLayout(pp=4, ep=64))
    larger = replace(larger, batch=32, microbatches=32)
    yield Row("Automodel DeepSeek-V3, 1,024, PP 4, EP 64", "judge", gpu, larger, 865)
    experts = replace(deepseek.moe, num_experts=384, num_groups=1, groups_kept=1, first_dense=1)
    kimi = replace(deepseek, num_heads=64, vocab_size=163840, moe=experts)
    wide = replace(
        large, config=kimi, layout=ParallelLayout(pp=8, ep=32), batch=16, microbatches=16
    )
    yield Row("Automodel Kimi K2, 256, PP 8, EP 32", "judge", gpu, wide, 924)


def others() -> Iterator[Row]:
    """Rows of NeMo Automodel, Meta and Lamina itself, planned with Lamina's engine."""
    # A batch of 128 sequences over 32 data-parallel ranks of two GPUs each (cp).
    pairs = llama("70b", 64, batch=4, microbatches=4, recompute="full", layout=ParallelLayout(cp=2))
    yield Row("Automodel 70B, 64, CP 2", "fit", "h100-80gb", pairs, tflops=389)
    yield from mixtures()
    # 16 million tokens are 2,048 sequences, over 64 ranks of 128 GPUs.
    largest = llama(
        "405b", 8192, batch=32, microbatches=32, layout=ParallelLayout(tp=8, pp=16),
        schedule="1f1b", recompute="selective",
    )  # fmt: skip
    yield Row("Llama 3 405B, 8,192", "judge", "h100-80gb", largest, tflops=430)
    # Rank 0 of 8 on a GPU, beside a simulated network: 0.1767 and 0.7492 s.
    eight = {"config": preset("llama3.2-1b"), "ranks": 8, "sequence": 8192}
    yield Row("Lamina 1B, H200", "judge", "h200", Job(**eight), 8192 / 0.1767, gib=27.791)
    yield Row("Lamina 8B, H200", "judge", "h200", llama("8b", 8), 8192 / 0.7492, gib=73.062)


def torchtitan_size(job: Job) -> str:
    """The name of a row's model in `virtual_gpu_step.SIZES`."""
    return {32: "8b", 80: "70b", 126: "405b"}[job.config.num_layers]


RATES = {
    "h100-96gb": {"VGPU_GPU": "h100", "VGPU_MEMORY_GIB": "95.04", "VGPU_MEMORY_GBS": "2088"},
    "h200": {"VGPU_GPU": "h200"},
}
"""The virtual GPU of a row; torchtitan's H100 has slower memory, of which 0.87 is reached."""
FITTED = {"VGPU_PRODUCTS": "0.455", "VGPU_FP8_PRODUCTS": "0.33"}
"""So that "8B, 8, eager" and "8B, 8, compiled FP8" take as long as they are published to."""


def same_program(row: Row) -> tuple[float, float] | None:
    """GiB reserved and tokens/s of a row by FSDP2 on the virtual GPU; None has another program."""
    job, tp = row.job, row.job.layout.tp
    if row.tflops or job.layout.pp > 1 or job.layout.cp > 1 or job.sequence != 8192:
        return None
    words = ["--engine", "fsdp2", "--size", torchtitan_size(job), "--world", str(job.ranks)]
    words += ["--tp", str(tp), "--batch", str(job.batch), "--recompute", str(job.recompute)]
    words += ["--dtensors"] if tp > 1 else []
    words += ["--compiled-loss"] if row.compiled_loss else []
    words += ["--compiled"] if job.compiled else []
    words += ["--fp8"] if job.precision == "fp8" else []
    answer = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("virtual_gpu.py")), *words],
        env={**os.environ, **RATES[row.gpu], **FITTED}, capture_output=True, text=True,
    )  # fmt: skip
    made = json.loads(answer.stdout.splitlines()[-1]) if answer.stdout.strip() else {}
    if "virtual_seconds" not in made:
        raise RuntimeError(f"{row.name}: {made or answer.stderr[-2000:]}")
    seconds = made["virtual_seconds"]
    return made["reserved_gib"], job.batch * job.sequence / seconds / tp


def main() -> None:
    """Plan the rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--same-program", action="store_true", help="FSDP2 on the virtual GPU")
    parser.add_argument("--engine", choices=("lamina", "fsdp2"), default="lamina")
    parser.add_argument("--half", choices=("fit", "judge"))
    parser.add_argument("--only", default="", help="rows whose names hold this")
    words = parser.parse_args()
    print("| row | half | GiB reserved: predicted, published, error | "
          "per GPU: predicted, published, error |\n| --- | --- | --- | --- |")  # fmt: skip
    for row in (*torchtitan(), *others()):
        if words.half not in (None, row.half) or words.only not in row.name:
            continue
        if words.same_program:
            made = same_program(row)
            if made is not None:
                gib = f"{made[0]:.1f}, {row.gib or 'not told'}, "
                gib += f"{made[0] / row.gib - 1:+.1%}" if row.gib else "-"
                print(f"| {row.name} | {row.half} | {gib} | {made[1]:,.0f}, {row.tokens:,.0f}, "
                      f"{made[1] / row.tokens - 1:+.1%} |", flush=True)  # fmt: skip
            continue
        published_program = row.name in {each.name for each in torchtitan()}
        if words.engine == "fsdp2" and not published_program:
            continue
        job = row.job
        if words.engine == "fsdp2":
            job = by_fsdp2(job, torchtitan_size(job), compiled_loss=row.compiled_loss)
        begun = time.monotonic()
        dtensors = words.engine == "fsdp2" and job.layout.tp > 1
        with loss_parallel() if dtensors else nullcontext():
            planned = plan(job, row.gpu, whole=words.engine == "fsdp2")
        reserved = planned.reserved / (1 << 30)
        memory = f"{reserved:.1f}, not told, -"
        if row.gib:
            memory = f"{reserved:.1f}, {row.gib}, {reserved / row.gib - 1:+.0%}"
        value, published, unit = planned.tokens_per_second, row.tokens, "tokens/s"
        if row.tflops:
            value, published, unit = planned.flops_per_second / 1e12, row.tflops, "TFLOP/s"
        error = f"{value / published - 1:+.0%}"
        print(f"| {row.name} | {row.half} | {memory} | "
              f"{value:,.0f}, {published:,.0f} {unit}, {error} |", flush=True)  # fmt: skip
        largest = sorted(planned.seconds.items(), key=lambda pair: -pair[1])[:4]
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in largest)
        print(f"<!-- planned in {time.monotonic() - begun:.0f} s: {parts} -->", flush=True)


if __name__ == "__main__":
    main()
