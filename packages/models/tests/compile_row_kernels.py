"""Compile the kernels of rows and look at what came out: a program, run by a test.

    python compile_row_kernels.py 80 90 100

No stack (registers did not spill), loads of 16 bytes, and no fused multiply-adds, which would round
a sum otherwise than torch's operators.
"""

import re
import sys

import triton.language as tl

from lamina.models.moe.row_kernels import BLOCK, WARPS, copy_kernel, gradient_kernel, sum_kernel
from lamina_testing.triton_targets import compile_kernel, resources

INDEX, WEIGHTS, ROWS = "*i64", "*fp32", "*bf16"
CONSTANTS = {"COPIES": 8, "WIDE": tl.float32, "BLOCK": BLOCK}
SUM = {
    "rows": ROWS, "count": "i32", "hidden": "i32", "row_of_copy": INDEX, "weights": WEIGHTS,
    "total": ROWS,
}  # fmt: skip
GRADIENT = {
    "rows": ROWS, "grad": ROWS, "hidden": "constexpr", "weights": WEIGHTS, "copies": "i32",
    "copy_of_row": INDEX, "grad_rows": ROWS, "grad_weights": WEIGHTS,
}  # fmt: skip
COPY = {"x": ROWS, "tokens": "i32", "hidden": "i32", "copy_of_row": INDEX, "rows": ROWS}
KERNELS = (
    (copy_kernel, COPY, {name: CONSTANTS[name] for name in ("COPIES", "BLOCK")}),
    (sum_kernel, SUM, CONSTANTS),
    (sum_kernel, SUM | {"weights": "constexpr"}, CONSTANTS | {"weights": None}),
    (gradient_kernel, GRADIENT, CONSTANTS | {"hidden": 2048}),
)


def main():
    for capability in map(int, sys.argv[1:]):
        for kernel, types, constants in KERNELS:
            # Triton finds out that 16 divides addresses and the width when it launches.
            aligned = [
                (at,)
                for at, (name, kind) in enumerate(types.items())
                if kind.startswith("*") or (name, kind) == ("hidden", "i32")
            ]
            compiled = compile_kernel(
                kernel, types, constants, aligned, capability, WARPS, enable_fp_fusion=False
            )
            ptx = compiled.asm["ptx"]
            registers, stack = resources(compiled)
            line = f"sm_{capability}, {kernel.__name__}: {registers} registers, {stack} B stack"
            assert stack == 0, line
            assert not re.search(r"\bfma\.rn\.f32", ptx), line
            assert "ld.global.v4.b32" in ptx, line
            print(line)


if __name__ == "__main__":
    main()
