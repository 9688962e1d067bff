"""Tests that need torch's own compiler for CPUs."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

needs_inductor = pytest.mark.skipif(
    " " in torch.__file__ and TorchVersion(torch.__version__) < "2.14",
    reason="this torch cannot link under a path with a space (pytorch/pytorch#191010)",
)
