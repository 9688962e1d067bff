"""Triton's kernels are compiled and launched as on a GPU, and computed by Triton's interpreter.

The interpreter's own rounding to bfloat16 truncates, and its products of bfloat16 are wrong (3.8):
a kernel that leans on them gives other bits than a GPU. Inductor launches its kernels in another
way; those are refused.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

from lamina_virtual_gpu.arithmetic.work import covered, enqueue

_one_at_a_time = threading.RLock()  # the interpreter changes `triton.language` while it runs
_changed: dict[
    Any, Any
] = {}  # functions that the running kernel has called: what undoes the change


def alias(value: Any) -> Any:
    """Return a CPU tensor over a device tensor's memory; other things as they are."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    memory = value.untyped_storage()
    here = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device("cpu"), memory.nbytes()
    )
    whole = torch.empty(0, dtype=value.dtype, device="cpu")
    return whole.set_(here, value.storage_offset(), value.shape, value.stride())


def interpret(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any], grid: Any) -> None:
    """Run a kernel over tensors of the CPU."""
    import torch
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang

    with _one_at_a_time, torch._C.DisableTorchFunction(), torch.no_grad():
        # The interpreter undoes its own change in the midst of those that are made below: the first
        # change of all is undone as the last.
        _changed[kernel.fn] = _patch_lang(kernel.fn)
        try:
            InterpretedFunction(kernel.fn).run(*arguments, grid=grid, warmup=False, **named)
        finally:
            while _changed:
                _changed.popitem()[1].restore()


def compute(jit: ModuleType) -> None:
    """Have each launch of a `triton.jit` function be followed by its arithmetic.

    Args:
        jit: the module `triton.runtime.jit`.
    """
    function = jit.JITFunction
    launch, call = function.run, function.__call__

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        with covered(), _one_at_a_time:  # it may compile
            compiled = launch(self, *arguments, grid=grid, warmup=warmup, **named)
        if not warmup:
            here = tuple(map(alias, arguments))
            of_kernel = {name: alias(value) for name, value in named.items()}
            enqueue(self.__name__, lambda: interpret(self, here, of_kernel, grid))
        return compiled

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        """A kernel calls another one: the interpreter runs it too."""
        from triton.runtime.interpreter import InterpretedFunction, _patch_lang

        if not _one_at_a_time._is_owned():  # type: ignore[attr-defined]
            return call(self, *arguments, **named)
        if self.fn not in _changed:
            _changed[self.fn] = _patch_lang(self.fn)
        return InterpretedFunction(self.fn).rewrite()(*arguments, **named)

    function.run, function.__call__ = run, called
