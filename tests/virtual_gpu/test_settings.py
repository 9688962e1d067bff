"""Every setting of every wrapper trains on a GPU as it should, or is refused in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fuzz.settings import SOURCES
from virtual_gpu.steady import step_complaints

MAY_WAIT = {
    "check_for_nan_in_grad": "backward/agreement.py",
    "check_for_large_grads": "backward/agreement.py",
    "report_nan_in_param_grad": "backward/agreement.py",
    "check_order": "debugging/debug_modes.py",
    "offload_policy": "weights/offloaded.py",
}
"""Settings by which the host waits for the device, and the file that does: their pages say so."""

TAKEN_BY_NO_BASE = frozenset(
    {
        "keep_fp8_transpose_cache",  # test_modes.py: a model with FP8 products
        "gradient_accumulation_fusion",  # torch's FSDP2 takes gradients from `.grad`
    }
)


def complaints(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with what came of a setting."""
    if "error" in row:
        yield row["error"]
    elif "steps" in row:
        yield from step_complaints(row["steps"], MAY_WAIT.get(row["setting"]))
    elif not any(name in row["refused"] for name in row["names"]):
        yield f"the refusal names no setting: {row['refused']}"


@pytest.mark.parametrize("source", SOURCES)
def test_every_setting_trains_without_a_wait_or_is_refused_by_name(source, on_rank_0):
    text = f"""
        import settings_on_device
        end(settings_on_device.main("{source}"))
    """
    rows = on_rank_0(text)
    wrong = [
        f"{row['base']} {row['setting']}={row['value']}: {complaint}"
        for row in rows
        for complaint in complaints(row)
    ]
    assert not wrong, "\n".join(wrong)
    trained = {row["setting"] for row in rows if "steps" in row}
    assert {row["setting"] for row in rows} - trained <= TAKEN_BY_NO_BASE
