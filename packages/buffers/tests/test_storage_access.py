"""Storages that refuse access, where nothing in the process has asked for one before."""

from __future__ import annotations

import subprocess
import sys

COLD = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.buffers.storage_access import access_of


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        raise AssertionError(f"{operator} in a mode")


released = torch.ones(2)
storage = released.untyped_storage()
with Refuses(), FakeTensorMode():
    access = access_of(storage, "gone")
access.refuse()
try:
    released.sum()
except RuntimeError:
    access.allow()
    assert released.sum() == 2
else:
    raise AssertionError("a read was not refused")
"""


def test_a_storage_refuses_access_also_if_a_mode_is_on_when_the_first_is_asked():
    subprocess.run([sys.executable, "-c", COLD], check=True, timeout=300)
