"""GPUs of one host read each other's memory, once a model is wrapped."""

import os

import pytest
import torch

from lamina.collectives.transport.lanes import lanes
from lamina.ddp import DistributedDataParallel, DistributedDataParallelConfig
from lamina.mesh import ParallelLayout
from lamina_testing import device_type
from lamina_testing.toys import OddNet


@pytest.mark.skipif(
    not torch.cuda.is_available() or "VGPU_COMPUTE" not in os.environ,
    reason="needs GPUs that can read each other's memory: virtual ones that compute",
)
@pytest.mark.ranks(2)
def test_gpus_of_one_host_have_windows_once_a_model_is_wrapped():
    if device_type() == "cpu":
        pytest.skip("ranks are on the CPU")
    mesh = ParallelLayout().build(device_type())
    model = OddNet().to(device_type())
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(), mesh)
    device = next(wrapped.parameters()).device
    assert any(lane.windows.get(device) is not None for lane in lanes())
