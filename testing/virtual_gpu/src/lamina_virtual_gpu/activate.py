"""What runs at the start of each Python in an environment with a virtual GPU (from a `.pth` file).

It does nothing until torch is imported. Then it loads the stand-ins that torch and Triton look for
by name alone, and switches cuDNN off, which is not modelled: torch's own kernels are used instead.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["LIBRARY_FOLDER", "activate"]

# torch's libraries look here first.
LIBRARY_FOLDER = Path(__file__).resolve().parents[1] / "nvidia" / "cu13" / "lib"


class _AroundTorch(Loader):
    """Torch's own loader, with a few words before and after."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            ctypes.CDLL(str(LIBRARY_FOLDER / name), mode=ctypes.RTLD_GLOBAL)
        self.loader.exec_module(module)
        module._C._set_cudnn_enabled(False)
        module._C._set_sdp_use_cudnn(False)


class _Finder(MetaPathFinder):
    """Finds torch once, and is then gone."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AroundTorch(spec.loader)
        return spec


def activate() -> None:
    """Prepare this process, and those that it starts, for the import of torch."""
    if not LIBRARY_FOLDER.exists():
        return
    os.environ.setdefault("TRITON_LIBCUDA_PATH", str(LIBRARY_FOLDER))
    sys.meta_path.insert(0, _Finder())


activate()
