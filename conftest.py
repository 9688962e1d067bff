"""Settings that must be in the environment before any test module is imported.

Ranks and the fork server inherit them, see testing/README.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path

# Ranks share the machine's cores, and one thread each is what makes their sums repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton reads this when it is first imported, which importing torch._dynamo does. On the virtual
# GPU its kernels are compiled and launched, as on a real one.
on_a_gpu = Path("/dev/nvidiactl").exists() or importlib.util.find_spec("lamina_virtual_gpu")
if not on_a_gpu:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# An example that takes long on a busy machine is no failure. A GPU's machine may lack hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("busy machine", deadline=None)
    settings.load_profile("busy machine")

# `matrix` marks and `--full`; the closing line for noxfile.py; the order of modules.
pytest_plugins = ["tasks.matrix.plugin", "closing_line", "longest_first", "sample"]
