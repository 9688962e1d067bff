"""Compile the AdamW kernel and look at what came out: a program, run by a test.

    python compile_adamw.py 80 90 100

For each dtype of the weights: no stack (registers did not spill), and every load of fp32 data is
16 bytes wide.
"""

import re
import sys

from lamina.ddp.optimizer.adamw_cuda import BLOCK, WARPS, adamw_kernel
from lamina_testing.triton_targets import compile_kernel, resources

SCALARS = ("lr", "log_beta1", "log_beta2", "rest1", "beta2", "rest2", "eps", "decay")


def main():
    for capability in map(int, sys.argv[1:]):
        for weights in ("bf16", "fp16", "fp32"):
            types = {"main": "*fp32", "gradient": "*fp32", "average": "*fp32", "square": "*fp32"}
            types |= {"weights": "*" + weights, "numel": "i32", "step": "*fp32"}
            types |= dict.fromkeys(SCALARS, "fp32")
            constants = {"SIGN": 1, "DECOUPLED": True, "BLOCK": BLOCK}
            aligned = [(place,) for place in range(6)]
            kernel = compile_kernel(adamw_kernel, types, constants, aligned, capability, WARPS)
            registers, stack = resources(kernel)
            wide = len(re.findall(r"ld\.global\S*\.v4", kernel.asm["ptx"]))
            expected = 4 * BLOCK // (32 * WARPS) // 4
            line = f"sm_{capability} {weights}: {registers} registers, {stack} B stack, "
            line += f"{wide} loads of 16 bytes ({expected} expected)"
            assert stack == 0, line
            assert wide == expected, line
            print(line)


if __name__ == "__main__":
    main()
