"""Compile the sum's kernel and look at what came out: a program, run by tests.

    python compile_kernels.py 80 90 100           # a choice of cases
    python compile_kernels.py --all 80 90 100     # every configuration

For each case: no stack (registers did not spill), at most 255 registers, every load of gradients
16 bytes wide, and no fused multiply-add.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any

import triton.language as tl

from lamina.collectives.reduction.triton_kernels import (
    finish_kernel,
    segment_kernel,
    sum_kernel,
)
from lamina.collectives.reduction.triton_sum import CONFIGS, LEAVES, Config, configs_for
from lamina_testing.triton_targets import compile_kernel, resources

NARROW = {"fp32": 4, "bf16": 2, "fp16": 2}


def passed_as(kernel: Any, name: str) -> str:
    """How a launch passes a small integer: as the kernel says, or else in 32 bits."""
    return next(each.annotation_type for each in kernel.params if each.name == name) or "i32"


def check_sum(ranks: int, wire: str, output: str, config: Config, capability: int) -> str:
    """Compile one case; return a line about it."""
    types = {
        "rows": "*" + wire,
        "stride": passed_as(sum_kernel, "stride"),
        "output": "*" + output,
        "partials": "*fp64",
        "numel": "i32",
        "factor": "fp32",
    }
    constants = {"COUNT": ranks, "SCALED": True, "ACCUMULATE": True, "NORM": True}
    constants |= {"BLOCK": config.block, "BLOCKS": config.blocks, "WIRE": None}
    aligned = [(place,) for place in range(5)]
    kernel = compile_kernel(
        sum_kernel, types, constants, aligned, capability, config.warps, enable_fp_fusion=False
    )
    ptx = kernel.asm["ptx"]
    # Rows may lie more than 2**31 elements apart, although the stride between two is less.
    assert not re.search(r"muli %stride\b.*: i32", kernel.asm["ttir"])
    loads, wide = (len(re.findall(p, ptx)) for p in (r"ld\.global", r"ld\.global\S*\.v4"))
    registers, stack = resources(kernel)
    per_thread = config.block // (32 * config.warps)
    expected = (ranks * NARROW[wire] + NARROW[output]) * per_thread // 16
    line = f"{ranks} x {wire} to {output}, {config}: {registers} registers, {stack} B stack, "
    line += f"{wide} of {loads} loads are 16 bytes wide ({expected} expected)"
    assert stack == 0, line
    assert registers <= 255, line
    assert wide == loads == expected, line
    assert not re.search(r"fma\.rn\.f32", ptx), line
    return line


def check_peers(ranks: int, wire: str, capability: int) -> str:
    """Compile the sum of rows in other ranks' memory: one more load per row, of its address."""
    types = {"rows": "*i64", "stride": "i64", "output": "*fp32", "partials": "*fp64"}
    types |= {"numel": "i32", "factor": "fp32"}
    constants = {"COUNT": ranks, "SCALED": True, "ACCUMULATE": True, "NORM": True}
    config, dtype = CONFIGS[0], {"fp32": tl.float32, "bf16": tl.bfloat16}[wire]
    constants |= {"BLOCK": config.block, "BLOCKS": config.blocks, "WIRE": dtype}
    aligned = [(place,) for place in range(5)]
    kernel = compile_kernel(
        sum_kernel, types, constants, aligned, capability, config.warps, enable_fp_fusion=False
    )
    ptx, (registers, stack) = kernel.asm["ptx"], resources(kernel)
    loads, wide = (len(re.findall(p, ptx)) for p in (r"ld\.global", r"ld\.global\S*\.v4"))
    expected = (ranks * NARROW[wire] + 4) * config.block // (32 * config.warps) // 16
    line = f"{ranks} x {wire} of peers: {registers} registers, {stack} B stack, {wide} wide loads"
    assert stack == 0, line
    assert registers <= 255, line
    assert (wide, loads) == (expected, expected + ranks), line
    assert not re.search(r"fma\.rn\.f32", ptx), line
    return line


def check_segments(wire: str, capability: int) -> str:
    """Compile the sum of segments; no spills, and no fused multiply-add."""
    types = {"rows": "*" + wire, "stride": "i64", "sums": "*fp32", "numel": "i32"}
    types |= dict.fromkeys(("count", "runs", "depth"), "i32")
    constants = {"LEAVES": LEAVES, "BLOCK": 1024}
    aligned = [(place,) for place in range(4)]
    kernel = compile_kernel(
        segment_kernel, types, constants, aligned, capability, 4, enable_fp_fusion=False
    )
    registers, stack = resources(kernel)
    line = f"segments of {wire}: {registers} registers, {stack} B stack"
    assert stack == 0, line
    assert not re.search(r"fma\.rn\.f32", kernel.asm["ptx"]), line
    return line


def cases(everything: bool) -> list[tuple[int, str, str, Config]]:
    """Ranks, wire, output and configuration; the choice has what needs most registers."""
    if everything:
        return [
            (ranks, wire, output, config)
            for ranks, wire in itertools.product((2, 8, LEAVES // 2, LEAVES), ("fp32", "bf16"))
            for config in configs_for(ranks)
            for output in {"fp32", wire}
        ]

    def widest(ranks: int) -> Config:
        return max(configs_for(ranks), key=lambda config: config.block // config.warps)

    longest = max(CONFIGS, key=lambda config: (config.blocks, config.block))
    return [
        (2, "fp32", "fp32", CONFIGS[0]),
        (8, "bf16", "bf16", longest),
        (LEAVES // 2, "fp32", "fp32", widest(LEAVES // 2)),
        (LEAVES, "fp32", "fp32", widest(LEAVES)),
        (LEAVES, "bf16", "fp32", longest),
    ]


def main() -> None:
    capabilities = [int(argument) for argument in sys.argv[1:] if argument != "--all"]
    for capability, case in itertools.product(capabilities, cases("--all" in sys.argv)):
        print(f"sm_{capability}", check_sum(*case, capability))
    for capability, wire in itertools.product(capabilities, ("fp32", "bf16")):
        print(f"sm_{capability}", check_segments(wire, capability))
        for ranks in (8, LEAVES) if capability >= 90 else ():
            print(f"sm_{capability}", check_peers(ranks, wire, capability))
    types = {"partials": "*fp64", "squared_norm": "*fp64", "nonfinite": "*i8", "count": "i32"}
    for capability in capabilities:
        finish = compile_kernel(finish_kernel, types, {"BLOCK": 2048}, [(0,)], capability, 8)
        registers, stack = resources(finish)
        assert stack == 0
        print(f"sm_{capability} finish: {registers} registers, {stack} B stack")


if __name__ == "__main__":
    main()
