"""Triton's kernels are compiled and launched as on a GPU, and computed by Triton's interpreter.

What the interpreter does wrong is mended in `interpreter.py`. Kernels that Inductor writes are
launched in a way of their own, and computed in the same.
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
    from triton.runtime.interpreter import InterpretedFunction

    from lamina_virtual_gpu.arithmetic.interpreter import addresses, mend

    mend()
    with _one_at_a_time, torch._C.DisableTorchFunction(), torch.no_grad():
        # The interpreter undoes its own change in the midst of those that are made below: the first
        # change of all is undone as the last.
        change(kernel.fn)
        try:
            InterpretedFunction(kernel.fn).run(*arguments, grid=grid, warmup=False, **named)
            addresses.tell()
        finally:
            while _changed:
                _changed.popitem()[1].restore()


def change(function: Any) -> None:
    """Have a function of a kernel see the interpreter's language, until the kernel has run."""
    from triton.runtime.interpreter import _patch_lang

    from lamina_virtual_gpu.arithmetic.interpreter import libdevice

    if function not in _changed:
        _changed[function] = _patch_lang(function)
        libdevice(_changed[function], function)


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
        from triton.runtime.interpreter import InterpretedFunction

        if not _one_at_a_time._is_owned():  # type: ignore[attr-defined]
            return call(self, *arguments, **named)
        change(self.fn)
        return InterpretedFunction(self.fn).rewrite()(*arguments, **named)

    function.run, function.__call__ = run, called


def compute_of_inductor(heuristics: ModuleType) -> None:
    """Have each launch of a kernel that Inductor wrote be followed by its arithmetic.

    Args:
        heuristics: the module `torch._inductor.runtime.triton_heuristics`.
    """
    tuner = heuristics.CachingAutotuner
    launch = tuner.run

    def run(
        self: Any, *arguments: Any, stream: Any, benchmark_run: bool = False, **named: Any
    ) -> Any:
        with covered(), _one_at_a_time:  # it may compile, and try several configurations
            result = launch(self, *arguments, stream=stream, benchmark_run=benchmark_run, **named)
        if not benchmark_run:
            if self.fn.fn is None:  # it was compiled by another process
                self.fn = self._reload_kernel().fn
            config = self.launchers[0].config
            given, grid = self._interpret_args_grid(arguments, config)
            here = tuple(map(alias, given))
            of_kernel = {name: alias(value) for name, value in {**named, **config.kwargs}.items()}
            enqueue(self.fn.__name__, lambda: interpret(self.fn, here, of_kernel, grid))
        return result

    tuner.run = run
