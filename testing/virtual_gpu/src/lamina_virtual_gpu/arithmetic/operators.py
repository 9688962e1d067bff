"""Which operators get arithmetic, and how.

`kernels.cpp` wraps a kernel for CUDA. Here is said what each of torch's operators needs: most are
computed by the CPU's kernel when their stream comes to them. Some only handle memory, and stay as
they are. Some make the host wait, because the shape of a result depends on values.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

_kept: list[Any] = []  # registrations end with the objects that made them


class Kind(IntEnum):
    """How an operator is computed: `Kind` of `kernels.cpp`."""

    QUEUED = 0
    AT_ONCE = 1
    COPY = 2
    INDEXED = 3
    MEMORY = 4


# What makes, describes or keeps memory, and what only asks: its own kernel does it all. Copies that
# it makes go through the runtime, which executes them.
HANDLES_MEMORY = re.compile(
    r"(empty|empty_strided|_efficientzerotensor|resize_|_resize_output_|set_|is_set_to|record_stream"
    r"|is_pinned|_pin_memory|_local_scalar_dense|_fused_sdp_choice|_has_same_storage_numel"
    r"|_cudnn\w*|cudnn\w*|_use_cudnn\w*|miopen\w*|_use_miopen\w*|_nested\w*|_cslt\w*|_sparse\w*"
    r"|_to_sparse\w*|to_sparse\w*|_coalesce\w*|_indices\w*|_values\w*"
    r"|_symeig\w*|_assert_tensor_metadata)(\.|$)"
)
# Their kernels for CUDA ask libraries that are not modelled, such as cuSOLVER and cuFFT, or read
# what was never computed on their way.
HOST_ALONE = re.compile(
    r"(_?linalg_\w+|_?cholesky\w*|lu_\w+|ormqr|geqrf|triangular_solve|_fft_\w+|equal|bincount|histc"
    r"|_ctc_loss\w*|_unique\w*|unique_\w+|nonzero\w*|masked_select|repeat_interleave)(\.|$)"
)
INDEXED = re.compile(r"(index(\.Tensor(_out)?)?|_?index_put\w*(\.out)?|_unsafe_index\w*(\.\w+)?)$")
# Operators that launch kernels for CUDA from a kernel for all devices, or are of other libraries.
OTHERS = ("aten::copy_", "c10d::check_for_nan")


def views(schema: Any) -> bool:
    """Whether an operator returns a view of what it is given."""
    alias = [result.alias_info for result in schema.returns]
    return any(info is not None and not info.is_write for info in alias)


def kind_of(operator: Any) -> Kind | None:
    """Return how an operator is computed, or None if its own kernel does all that it does."""
    name = operator.name().partition("::")[2]
    if name in ("empty.memory_format", "empty_strided"):
        return Kind.MEMORY
    if views(operator._schema) or HANDLES_MEMORY.match(name):
        return None
    if name == "copy_":
        return Kind.COPY
    if INDEXED.match(name):
        return Kind.INDEXED
    return Kind.AT_ONCE if HOST_ALONE.match(name) else Kind.QUEUED


def overload(name: str) -> Any:
    """Return the operator of a name such as `aten::add.Tensor`."""
    import torch

    whole, _, kind = name.partition(".")
    space, _, base = whole.partition("::")
    return getattr(getattr(getattr(torch.ops, space), base), kind or "default")


def spoil_storage_that_grows(torch: Any) -> None:
    """Have the adversary know of memory that `untyped_storage().resize_()` gives."""
    from lamina_virtual_gpu.arithmetic.work import spoil

    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        before = self.nbytes()
        resized = resize(self, size)
        if before == 0 and size and self.device.type == "cuda":
            spoil(self.data_ptr(), self.nbytes())
        return resized

    torch.UntypedStorage.resize_ = resize_


def install() -> None:
    """Give all operators of torch that have a kernel for CUDA their arithmetic."""
    import torch

    from lamina_virtual_gpu.arithmetic import references
    from lamina_virtual_gpu.arithmetic.keys import library as kernels

    _kept.append(references.install())
    spoil_storage_that_grows(torch)
    library = kernels()
    for name in torch._C._dispatch_get_all_op_names():
        has = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        if name not in OTHERS and not (has and name.startswith("aten::")):
            continue
        operator = overload(name)
        kind = kind_of(operator)
        if kind is not None:
            draws = torch.Tag.nondeterministic_seeded in operator.tags
            base, _, last = name.partition(".")
            library.vgpu_compute_operator(base.encode(), last.encode(), int(kind), int(draws))
