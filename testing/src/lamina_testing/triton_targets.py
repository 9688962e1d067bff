"""Triton kernels compiled for GPUs that need not be there, and what came out of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def compile_kernel(
    kernel: Any,
    types: Mapping[str, Any],
    constants: Mapping[str, Any],
    aligned: Iterable[tuple[int, ...]],
    capability: int,
    warps: int,
    **options: Any,
) -> Any:
    """Compile `kernel` for `sm_<capability>`; its `asm` has "ptx" and "cubin".

    Args:
        kernel: a function under `triton.jit`, of a process that does not interpret.
        types: of the arguments that are no constants, in order, as Triton writes them: "*bf16".
        constants: values of the arguments that are `tl.constexpr`.
        aligned: places of arguments (in tuples: place, place within) that 16 divides.
        capability: 80, 90, 100.
        warps: per program.
        options: Triton's, like `enable_fp_fusion`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    values = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        ASTSource(
            kernel, signature, values, {place: [["tt.divisibility", 16]] for place in aligned}
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, **options},
    )


def resources(kernel: Any) -> tuple[int, int]:
    """Registers per thread and bytes of stack, which only spills use, by `cuobjdump`."""
    import triton

    program = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [program, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    if found is None:
        raise ValueError(f"cuobjdump names no registers: {usage.stdout!r}")
    return int(found[1]), int(found[2])
