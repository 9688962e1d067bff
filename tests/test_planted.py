"""The bugs of tests/planted.py can still be planted."""

from __future__ import annotations

import pytest
from planted import BUGS, FINDINGS, ROOT


@pytest.mark.parametrize("bug", BUGS + FINDINGS, ids=lambda bug: bug.what)
def test_the_line_of_a_bug_is_there_once_and_its_test_too(bug):
    text = (ROOT / "packages" / bug.source).read_text()
    assert text.count(bug.line) == 1
    file, _, name = bug.test.partition("::")
    assert not name or f"\ndef {name.partition('[')[0]}(" in (ROOT / "packages" / file).read_text()
