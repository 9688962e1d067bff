"""README's snippet runs as it stands, in a world of one, and prints what README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_the_snippet_prints_what_the_readme_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    text = README.read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    exec(compile(snippet, str(README), "exec"), {})
    if not torch.cuda.is_available():
        assert capsys.readouterr().out == printed
