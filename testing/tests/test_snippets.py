"""Python blocks of Markdown pages: found, run, and reported by page and line."""

from __future__ import annotations

import sys

import pytest

from lamina_testing.snippets import (
    SnippetFailedError,
    python_blocks,
    run_only_python_block,
    run_snippet,
)

PAGE = """# Page

```python
import os
print("first", sorted(os.listdir()))
```

```bash
false
```

```python notest
raise SystemExit(1)
```

1. In a list:

   ```python
   if True:
       print("second")
   ```
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "PAGE.md"
    path.write_text(PAGE)
    return path


def test_blocks_are_found_with_their_lines(page):
    first, second = python_blocks(page)
    assert (first.line, second.line) == (4, 19)
    assert second.source == 'if True:\n    print("second")\n'
    assert str(first) == "PAGE.md:4"


def test_a_block_runs_in_an_empty_directory(page):
    first, second = python_blocks(page)
    assert run_snippet(first) == "first []\n"
    assert run_snippet(second) == "second\n"


def test_a_failure_names_the_page_the_line_and_the_error(tmp_path):
    path = tmp_path / "BAD.md"
    path.write_text("text\n\n```python\nprint('before')\n1 / 0\n```\n")
    with pytest.raises(SnippetFailedError) as caught:
        run_only_python_block(path)
    assert "BAD.md:4: the snippet ended with code 1" in str(caught.value)
    assert "before" in str(caught.value)
    assert "line 5" in str(caught.value)
    assert "ZeroDivisionError" in str(caught.value)


def test_the_interpreter_and_the_environment_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    path = tmp_path / "ENV.md"
    path.write_text(
        "```python\nimport os, sys\n"
        "print(sys.executable)\n"
        "print([os.environ.get(n) for n in ('RANK', 'PYTHONPATH', 'MINE')])\n```\n"
    )
    printed = run_only_python_block(path, interpreter=sys.executable, environment={"MINE": "1"})
    assert printed == f"{sys.executable}\n[None, None, '1']\n"


def test_a_readme_needs_exactly_one_block(page, tmp_path):
    with pytest.raises(ValueError, match=r"has 2 python blocks \(lines \[4, 19\]\), not 1"):
        run_only_python_block(page)
    open_block = tmp_path / "OPEN.md"
    open_block.write_text("```python\npass\n")
    with pytest.raises(ValueError, match=r"OPEN.md:1: the block is not closed"):
        python_blocks(open_block)
