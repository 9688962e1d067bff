"""Triton's kernels are compiled and launched as on a GPU, and computed by Triton's interpreter.

What the interpreter does wrong is mended in `interpreter.py`. Kernels that Inductor writes are
launched in a way of their own, and computed in the same.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lamina_virtual_gpu.arithmetic.work import covered, enqueue

_one_at_a_time = threading.RLock()  # the interpreter changes `triton.language` while it runs
_changed: dict[
    Any, Any
] = {}  # functions that the running kernel has called: what undoes the change


@dataclass(frozen=True)
class Place:
    """Where a tensor of the device is. Work that waits has no tensors, as a launch has addresses.

    A tensor would be seen by whoever counts them, though its memory may be somebody else's by now.
    """

    address: int
    nbytes: int
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the place of a device tensor; other things as they are."""
        import torch

        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return value
        memory = value.untyped_storage()
        return cls(
            memory.data_ptr(), memory.nbytes(), value.dtype, int(value.storage_offset()),
            tuple(value.shape), tuple(value.stride()),
        )  # fmt: skip

    def on_cpu(self) -> Any:
        """Return a CPU tensor over the same memory."""
        import torch

        memory = torch._C._construct_storage_from_data_pointer(
            self.address, torch.device("cpu"), self.nbytes
        )
        whole = torch.empty(0, dtype=self.dtype, device="cpu")
        return whole.set_(memory, self.offset, self.shape, self.strides)


def queue(kernel: Any, arguments: Iterable[Any], named: dict[str, Any], grid: Any) -> None:
    """Put a kernel into the current stream."""
    places = tuple(map(Place.of, arguments))
    of_kernel = {name: Place.of(value) for name, value in named.items()}
    enqueue(kernel.__name__, lambda: interpret(kernel, places, of_kernel, grid))


def interpret(kernel: Any, places: tuple[Any, ...], named: dict[str, Any], grid: Any) -> None:
    """Run a kernel over tensors of the CPU."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes
    from triton.runtime.interpreter import InterpretedFunction

    from lamina_virtual_gpu.arithmetic.interpreter import addresses, mend

    mend()
    # A program's modes would take the interpreter's own tensors for the program's.
    nobody_looks = (_disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad())
    with _one_at_a_time, contextlib.ExitStack() as stack:
        for each in nobody_looks:
            stack.enter_context(each)
        here = [each.on_cpu() if isinstance(each, Place) else each for each in places]
        of_kernel = {
            name: each.on_cpu() if isinstance(each, Place) else each for name, each in named.items()
        }
        # The interpreter undoes its own change in the midst of those that are made below: the first
        # change of all is undone as the last.
        change(kernel.fn)
        try:
            InterpretedFunction(kernel.fn).run(*here, grid=grid, warmup=False, **of_kernel)
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
            queue(self, arguments, named, grid)
        return compiled

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        """A kernel calls another one: the interpreter runs it too."""
        from triton.runtime.interpreter import InterpretedFunction

        if not _one_at_a_time._is_owned():  # type: ignore[attr-defined]
            return call(self, *arguments, **named)
        change(self.fn)
        return InterpretedFunction(self.fn).rewrite()(*arguments, **named)

    function.run, function.__call__ = run, called


AT_ONCE = 2**17
"""Elements that one program of Inductor's is given at most, where it can be given more."""


def in_few_programs(tuner: Any, config: Any, arguments: tuple[Any, ...]) -> Any:
    """Return a config of larger blocks: the interpreter needs milliseconds for each program.

    An element, or a row that is summed, is computed alike in a block of any size. The number of
    blocks is halved while it is even, so that whole blocks stay whole: Inductor leaves out the mask
    where it knows that they are.
    """
    if set(config.kwargs) - {"XBLOCK", "R0_BLOCK"} or "XBLOCK" not in config.kwargs:
        return config
    hints = (size for axis, size in tuner.size_hints.items() if axis.startswith("r"))
    row = config.kwargs.get("R0_BLOCK", math.prod(hints))
    block = config.kwargs["XBLOCK"]
    programs, _, _ = tuner._interpret_args_grid(arguments, config)[1]
    while programs > 1 and programs % 2 == 0 and 2 * block * row <= AT_ONCE:
        block, programs = 2 * block, programs // 2
    larger = copy.copy(config)
    larger.kwargs = {**config.kwargs, "XBLOCK": block}
    return larger


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
            config = in_few_programs(self, self.launchers[0].config, arguments)
            given, grid = self._interpret_args_grid(arguments, config)
            queue(self.fn, given, {**named, **config.kwargs}, grid)
        return result

    tuner.run = run
