from __future__ import annotations

import re
from pathlib import Path


def test_the_snippet_prints_what_the_readme_says(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    assert f"`{capsys.readouterr().out.strip()}`" in text
