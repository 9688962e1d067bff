"""Law 8: each use is right, or refused at that moment with the remedy."""

from __future__ import annotations

import pytest
from border.known import KNOWN
from border.session import Border
from border.uses import load_uses

USES = load_uses()


def cover(number: int, cells: list) -> list:
    """A use's cells in the default run: two columns, and a dtype, which turn with its place."""
    columns = list(dict.fromkeys(column for _, column, _ in cells))
    chosen = {columns[(2 * number + step) % len(columns)] for step in range(2)}
    kept = [cell for cell in cells if cell[1] in chosen]
    dtype = ("fp32", "bf16")[number % 2]
    return [c for c in kept if c[2] == dtype or (c[0], c[1], dtype) not in cells]


@pytest.fixture(scope="module")
def answers(request, rank_server):
    """Verdicts on the cells of all chosen tests, from a few pairs of ranks."""
    chosen = [
        i.callspec.params["name"] for i in request.session.items if "answers" in i.fixturenames
    ]
    full = request.config.getoption("--full")
    cells = {}
    for number, (name, use) in enumerate(USES.items()):
        if name in chosen and (full or not use.slow):
            cells[name] = use.cells() if full else cover(number, use.cells())
    found = Border(rank_server).run([cell for of_use in cells.values() for cell in of_use])
    return {name: {cell: found[cell] for cell in of_use} for name, of_use in cells.items()}


@pytest.mark.matrix(limit=1000)
@pytest.mark.parametrize("name", list(USES))
def test_a_use_is_right_or_refused(name, answers):
    if name not in answers:
        pytest.skip("slow: in the whole product only")
    wrong, cured = [], []
    for cell, answer in answers[name].items():
        if not answer.good and cell not in KNOWN:
            wrong.append(f"{', '.join(cell)}: {answer.verdict}: {answer.detail}")
        if answer.good and cell in KNOWN and not KNOWN[cell].startswith("at times"):
            cured.append(f"{', '.join(cell)} is {answer.verdict}")
    assert not wrong, "\n".join(wrong)
    assert not cured, "leave the list in tests/border/known.py:\n" + "\n".join(cured)
