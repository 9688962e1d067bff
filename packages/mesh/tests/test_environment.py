"""The environment as the layers above see it: typed, with errors that name the variable."""

from __future__ import annotations

import os

import pytest

from lamina.mesh import OverlapError
from lamina.mesh.engine import EnvironmentVariableError, environment, require_overlap


def test_a_snapshot_does_not_change_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    before = environment()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert before.triton_interpret
    assert not environment().triton_interpret
    assert environment().variables == dict(os.environ)


@pytest.mark.parametrize(
    ("text", "expandable"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:true", True),
        ("expandable_segments:False", False),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_allocator_settings_are_read(variable: str, text: str, expandable: bool) -> None:
    assert environment({variable: text}).expandable_segments is expandable


def test_a_flag_is_yes_or_no() -> None:
    with pytest.raises(EnvironmentVariableError, match="TRITON_INTERPRET='maybe'"):
        _ = environment({"TRITON_INTERPRET": "maybe"}).triton_interpret


def test_overlap_is_refused_where_one_hardware_queue_rules_it_out() -> None:
    message = "overlap_grad_reduce=True and CUDA_DEVICE_MAX_CONNECTIONS=1 exclude each other"
    with pytest.raises(OverlapError, match=message):
        require_overlap(
            "overlap_grad_reduce=True", environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        )
    for fine in ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}):
        require_overlap("overlap_grad_reduce=True", environment(fine))
