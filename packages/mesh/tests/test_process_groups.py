"""How long process groups live: as long as their job, and no longer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from lamina.mesh import init_distributed
from lamina.mesh.process_groups import group_of


@pytest.mark.ranks(2, init=False)
def test_no_group_of_a_job_outlives_it():
    gc.disable()  # other ranks see at once that this one has left its groups, cycles or not
    try:
        with init_distributed(device="cpu"):
            groups = [weakref.ref(dist.group.WORLD), weakref.ref(group_of("second", (0, 1)))]
        assert [group() for group in groups] == [None, None]
    finally:
        gc.enable()
