"""What runs at the start of each Python in an environment with a virtual GPU (from a `.pth` file).

It does nothing until torch is imported. Then it loads the stand-ins that torch and Triton look for
by name alone, and switches cuDNN off, which is not modelled: torch's own kernels are used instead.
With `VGPU_VALUES=unknown` tests are told apart from what they say of values (`values.py`).
"""

from __future__ import annotations

import ctypes
import getpass
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

# torch's libraries look here first.
LIBRARY_FOLDER = Path(__file__).resolve().parents[1] / "nvidia" / "cu13" / "lib"
CACHE = "-virtual-gpu"  # ends the names of folders in which Inductor keeps code for it
Around = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def around_torch(module: Any) -> Iterator[None]:
    """Load what torch looks for by name before it is imported; switch cuDNN off after it."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        ctypes.CDLL(str(LIBRARY_FOLDER / name), mode=ctypes.RTLD_GLOBAL)
    keep_compiled_code_apart()
    yield
    if os.environ.get("VGPU_VALUES") == "unknown":
        from lamina_virtual_gpu.values import watch_reads

        watch_reads()
    from lamina_virtual_gpu.leaving import wait_at_exit

    wait_at_exit()
    module._C._set_cudnn_enabled(False)
    module._C._set_sdp_use_cudnn(False)
    if not computes():
        show_what_the_host_sees(module)
    else:
        from lamina_virtual_gpu.arithmetic.operators import install

        install()


def keep_compiled_code_apart() -> None:
    """Give Inductor a cache for virtual GPUs, and another one for those that compute nothing.

    Inductor computes constants on the device and writes them into the code that it keeps. Without
    arithmetic they are whatever memory held, and a GPU that computes would index with them.
    """
    usual = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(usual)
    # A process may have it from one that computes otherwise.
    name = re.sub(f"{CACHE}(-without-values)?$", "", before)
    values = "" if computes() else "-without-values"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{name}{CACHE}{values}"


def show_what_the_host_sees(torch: Any) -> None:
    """Print a tensor's memory. Torch asks kernels how wide its numbers are, and none computes."""
    printing = torch._tensor_str
    show, plain = printing._str, (torch.Tensor, torch.nn.Parameter)

    def _str(self: Any, *, tensor_contents: str | None = None) -> str:
        shown = self.is_cuda and type(self) in plain and self.layout == torch.strided
        if tensor_contents is None and shown and self.numel():
            # Its memory can be read from here: no copy is made, and none is recorded.
            storage = self.untyped_storage()
            memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
            whole = torch.frombuffer(memory, dtype=self.dtype)
            here = whole.as_strided(self.shape, self.stride(), self.storage_offset())
            tensor_contents = printing._tensor_str(here, len("tensor("))
        return str(show(self, tensor_contents=tensor_contents))

    printing._str = _str


@contextmanager
def around_triton(module: Any) -> Iterator[None]:
    """Have Triton's kernels computed."""
    yield
    from lamina_virtual_gpu.arithmetic.triton_kernels import compute

    compute(module)


@contextmanager
def around_launches(module: Any) -> Iterator[None]:
    """Have the clock charge a kernel of Triton what its `launch_metadata` tells."""
    yield
    from lamina_virtual_gpu.recording import tell_kernel

    def tell(metadata: Any) -> None:
        of_kernel = metadata.get()
        tell_kernel(of_kernel.get("bytes", 0), of_kernel.get("flops32", 0))

    hook = module.runtime.launch_enter_hook
    if hasattr(hook, "add"):  # versions of Triton before 3.5 have one hook for all
        hook.add(tell)


@contextmanager
def around_inductor(module: Any) -> Iterator[None]:
    """Have the kernels that Inductor writes computed."""
    yield
    from lamina_virtual_gpu.arithmetic.triton_kernels import compute_of_inductor

    compute_of_inductor(module)


@contextmanager
def around_rewriting(module: Any) -> Iterator[None]:
    """Have pytest's rewriting of asserts leave out what they say of values."""
    yield
    from lamina_virtual_gpu.values import rewriting

    module.rewrite_asserts = rewriting(module.rewrite_asserts)
    # Byte code that pytest keeps beside the tests is another one here.
    module.PYC_TAIL = f"-virtual-gpu{module.PYC_TAIL}"


@contextmanager
def around_comparison(module: Any) -> Iterator[None]:
    """Have `torch.testing` compare shapes, dtypes and devices alone."""
    yield
    module.TensorLikePair._compare_values = lambda *_, **__: None


def computes() -> bool:
    """Whether this process's virtual GPU computes."""
    return os.environ.get("VGPU_COMPUTE", "none") != "none"


class _Around(Loader):
    """A module's own loader, with a few words before and after."""

    def __init__(self, loader: Loader, around: Around) -> None:
        self.loader, self.around = loader, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self.around(module):
            self.loader.exec_module(module)


class _Finder(MetaPathFinder):
    """Finds each of some modules once, and is gone when it has found all."""

    def __init__(self, waiting: dict[str, Around]) -> None:
        self.waiting = waiting

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        around = self.waiting.pop(name, None)
        if around is None:
            return None
        if not self.waiting:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, around)
        return spec


def activate() -> None:
    """Prepare this process, and those that it starts, for the import of torch."""
    if not LIBRARY_FOLDER.exists():
        return
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(LIBRARY_FOLDER))
    waiting: dict[str, Around] = {"torch": around_torch}
    if os.environ.get("VGPU_VALUES") == "unknown":
        waiting["_pytest.assertion.rewrite"] = around_rewriting
        waiting["torch.testing._comparison"] = around_comparison
    if not computes():
        waiting["triton.knobs"] = around_launches
    if computes():
        # Each of Inductor's helpers would import torch first.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        waiting["triton.runtime.jit"] = around_triton
        waiting["torch._inductor.runtime.triton_heuristics"] = around_inductor
    sys.meta_path.insert(0, _Finder(waiting))


activate()
