"""Each fault of the gallery is told with the rank that misbehaves, and no job hangs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gallery import cells, is_told
from play import play


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "fault", "phase"), cells())
def test_a_fault_is_told_and_ends_the_job(wrapper, fault, phase):
    played = play(wrapper, fault, phase)
    assert is_told(played), f"{played}\n" + "\n".join(played.output[-40:])


def test_the_gallery_has_forty_faults_and_its_page_shows_no_other():
    assert len(cells()) >= 40
    text = (Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text()
    wrappers = {cell[0] for cell in cells()} | {"hsdp", "torch_fsdp2", "wrapper", "---"}
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows
    assert set(rows) <= wrappers
