"""Compile the kernel of chains and look at what came out: a program, run by a test.

    python compile_chains.py 80 90 100

No stack (registers did not spill), and as many fused multiply-adds in float32 as there are products
in a step, none of a tensor core.
"""

import re
import sys
from itertools import product

from lamina.models.invariance.chain_kernel import STAGES, STEP, TILE, WARPS, chain_kernel
from lamina.models.invariance.products import CHUNK
from lamina_testing.triton_targets import compile_kernel, resources

STRIDES = ("batch", "row", "inner"), ("batch", "inner", "column")
OPERANDS = {"left": STRIDES[0], "right": STRIDES[1]}


def main():
    for capability, adds in product(map(int, sys.argv[1:]), (False, True)):
        types = {}
        for operand, strides in OPERANDS.items():
            types[operand] = "*fp32"
            types |= {f"{operand}_{stride}": "i64" for stride in strides}
        types |= {"total": "*fp32", "rows": "i64", "columns": "i64", "start": "i32", "stop": "i32"}
        constants = {"ADDS": adds, "CHUNK": CHUNK, "TILE": TILE, "STEP": STEP}
        kernel = compile_kernel(
            chain_kernel, types, constants, [], capability, WARPS, num_stages=STAGES
        )
        ptx = kernel.asm["ptx"]
        registers, stack = resources(kernel)
        # From sm_100 on an instruction has two of them.
        adding = sum(1 + len(two) // 2 for two in re.findall(r"\bfma\.rn\.f32(x2)?\b", ptx))
        # Each thread has a part of the tile, and adds a step's products to each element of it.
        expected = TILE * TILE * STEP // (32 * WARPS)
        line = f"sm_{capability}, adds={adds}: {registers} registers, {stack} B stack, "
        line += f"{adding} fused multiply-adds ({expected} expected)"
        assert stack == 0, line
        assert not re.search(r"\b(wg)?mma\b|tcgen05", ptx), line
        assert adding % expected == 0, line
        print(line)


if __name__ == "__main__":
    main()
