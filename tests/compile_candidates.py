"""Compile the kernels of benchmarks/candidate_kernels.py: a program, run by a test.

    python compile_candidates.py 80 90 100

For bf16 and fp32 inputs of the sizes that `blocks.py --kernels` races: no stack (registers did
not spill), and every wide load and store of a row is 16 bytes.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import candidate_kernels as kernels

from lamina_testing.triton_targets import compile_kernel, resources

WIDTH, VOCABULARY, HEADS, HALF = 4096, 4096, 32, 64


def cases(wire):
    """Kernel, types, constants, arguments that 16 divides, elements per program."""
    flat, wide = "*" + wire, "*fp32"
    rows = {"width": "i32"}
    yield (
        kernels.rms_norm_kernel,
        {"x": flat, "weight": flat, "y": flat, "inverse": wide, **rows, "eps": "fp32"},
        {"BLOCK": WIDTH},
        WIDTH,
    )
    yield (
        kernels.rms_norm_backward_kernel,
        {"grad": flat, "x": flat, "weight": flat, "inverse": wide, "grad_x": flat}
        | {"partials": wide, "rows": "i32", **rows},
        {"BLOCK": WIDTH, "ROWS": kernels.ROWS_PER_PROGRAM},
        WIDTH,
    )
    for sign in (1, -1):
        yield (
            kernels.rope_kernel,
            {"x": flat, "cos": wide, "sin": wide, "y": flat, "heads": "i32"},
            {"SIGN": sign, "HEADS": HEADS, "HALF": HALF},
            HEADS * HALF,
        )
    yield kernels.swiglu_kernel, {"x": flat, "y": flat, **rows}, {"BLOCK": 1024}, 2048
    yield (
        kernels.swiglu_backward_kernel,
        {"grad": flat, "x": flat, "grad_x": flat, **rows},
        {"BLOCK": 1024},
        2048,
    )
    losses = {"losses": wide, "log_totals": wide, "columns": "i32"}
    yield (
        kernels.cross_entropy_kernel,
        {"logits": flat, "labels": "*i64", **losses},
        {"BLOCK": VOCABULARY},
        VOCABULARY,
    )
    yield (
        kernels.cross_entropy_backward_kernel,
        {"grad": wide, "logits": flat, "labels": "*i64", "log_totals": wide}
        | {"grad_logits": flat, "columns": "i32"},
        {"BLOCK": VOCABULARY},
        VOCABULARY,
    )


def main():
    for capability in map(int, sys.argv[1:]):
        for wire in ("bf16", "fp32"):
            for kernel, types, constants, elements in cases(wire):
                aligned = [(place,) for place, kind in enumerate(types.values()) if kind != "fp32"]
                built = compile_kernel(
                    kernel, types, constants, aligned, capability, kernels.warps_of(elements)
                )
                registers, stack = resources(built)
                ptx = built.asm["ptx"]
                wide = len(re.findall(r"ld\.global\S*\.(v4\.b32|v2\.b64)", ptx))
                line = f"sm_{capability} {wire} {kernel.__name__}: {registers} registers, "
                line += f"{stack} B stack, {wide} loads of 16 bytes"
                assert stack == 0, line
                assert registers <= 128, line
                assert wide > 0, line
                print(line)


if __name__ == "__main__":
    main()
