"""Where the host has to wait itself: it reads or writes memory that a copy still uses.

No race shows these (what the host touches is not watched), and no number of a training step.
"""

from __future__ import annotations

import pytest

LATE = {"VGPU_COMPUTE": "late", "VGPU_SHARE": 0}
LEFT_OUT = """
    from unittest import mock

    def waits_left_out():
        return mock.patch.object(torch.cuda.Event, "synchronize", lambda event: None)
"""
STAGED = """
    import contextlib
    import torch
    from lamina.checkpoint.save.staging import Stage

    stage, weights = Stage(), torch.ones(1000, device="cuda")
    staged = stage.copy(stage.plan({{"weights": weights}}, coordinator=True), known=False)
    with {around}:
        staged.ready()
    (copy,) = staged.tensors.values()
    end(copy.tolist() == [1.0] * 1000)
"""
OFFLOADED = """
    import contextlib
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy
    from lamina.fsdp import MixedPrecisionPolicy

    start(world=1)
    model, _ = sharded(
        offload_policy=CPUOffloadPolicy(), mixed_precision_policy=MixedPrecisionPolicy()
    )
    tokens = ids()
    with torch.no_grad():
        before = model(tokens).float().cpu()
        with {around}:
            after = model(tokens).float()
        for parameter in model.parameters():
            parameter.zero_()
    end([bool(before.abs().sum() > 0), torch.equal(before, after.cpu())])
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_staged_copy_is_complete_once_it_is_ready(on_rank_0, waits):
    around = "contextlib.nullcontext()" if waits else "waits_left_out()"
    assert on_rank_0(LEFT_OUT + STAGED.format(around=around), **LATE) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_offloaded_weights_may_be_written_once_a_forward_has_returned(on_rank_0, waits):
    """After an evaluation the host may load others, though the device has computed nothing yet."""
    around = "contextlib.nullcontext()" if waits else "waits_left_out()"
    something, same = on_rank_0(LEFT_OUT + OFFLOADED.format(around=around), **LATE)
    assert something
    assert same == waits
