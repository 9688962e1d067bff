"""Compile the sum's kernel and look at what came out: a program, run by tests.

    python compile_kernels.py 80 90 100           # a choice of cases
    python compile_kernels.py --all 80 90 100     # every configuration

For each case: no stack (registers did not spill), at most 255 registers, every load of gradients
16 bytes wide, and no fused multiply-add.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lamina.collectives.triton_kernels import finish_kernel, sum_kernel
from lamina.collectives.triton_sum import CONFIGS, LEAVES, Config

CUOBJDUMP = next(Path(triton.__file__).parent.rglob("cuobjdump"))
ALIGNED = [["tt.divisibility", 16]]
NARROW = {"fp32": 4, "bf16": 2, "fp16": 2}


def compiled(kernel, types, constants, aligned, capability, warps):
    """Compile `kernel` whose arguments before its constants have `types`."""
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    values = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        ASTSource(kernel, signature, values, dict.fromkeys(aligned, ALIGNED)),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )


def resources(kernel) -> tuple[int, int]:
    """Registers per thread and bytes of stack, which only spills use."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found is not None, usage.stdout
    return int(found[1]), int(found[2])


def check_sum(ranks: int, wire: str, output: str, config: Config, capability: int) -> str:
    """Compile one case; return a line about it."""
    types = {
        "chunks": ("*" + wire,) * ranks,
        "output": "*" + output,
        "partials": "*fp64",
        "numel": "i32",
        "factor": "fp32",
    }
    constants = {"COUNT": ranks, "SCALED": True, "ACCUMULATE": True, "NORM": True}
    constants |= {"BLOCK": config.block, "BLOCKS": config.blocks}
    aligned = [(0, rank) for rank in range(ranks)] + [(1,), (2,), (3,)]
    kernel = compiled(sum_kernel, types, constants, aligned, capability, config.warps)
    ptx = kernel.asm["ptx"]
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


def cases(everything: bool) -> list[tuple[int, str, str, Config]]:
    """Ranks, wire, output and configuration; the choice has what needs most registers."""
    if everything:
        return [
            (ranks, wire, output, config)
            for ranks, wire, config in itertools.product((2, 8, LEAVES), ("fp32", "bf16"), CONFIGS)
            for output in {"fp32", wire}
        ]
    widest = max(CONFIGS, key=lambda config: config.block // config.warps)
    longest = max(CONFIGS, key=lambda config: (config.blocks, config.block))
    return [
        (2, "fp32", "fp32", CONFIGS[0]),
        (8, "bf16", "bf16", longest),
        (LEAVES, "fp32", "fp32", widest),
        (LEAVES, "bf16", "fp32", longest),
    ]


def main() -> None:
    capabilities = [int(argument) for argument in sys.argv[1:] if argument != "--all"]
    for capability, case in itertools.product(capabilities, cases("--all" in sys.argv)):
        print(f"sm_{capability}", check_sum(*case, capability))
    types = {"partials": "*fp64", "squared_norm": "*fp64", "nonfinite": "*i8", "count": "i32"}
    for capability in capabilities:
        finish = compiled(finish_kernel, types, {"BLOCK": 2048}, [(0,)], capability, 8)
        registers, stack = resources(finish)
        assert stack == 0
        print(f"sm_{capability} finish: {registers} registers, {stack} B stack")


if __name__ == "__main__":
    main()
