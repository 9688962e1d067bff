"""The page keeps what a run that was cut off had found."""

from __future__ import annotations

import sys

from border import page, session
from border.session import Answer
from border.uses import load_uses

import lamina_testing.client


class Idle:
    def close(self):
        pass


class CutOff:
    """Judges all cells of two uses and one of a third, and is stopped."""

    def __init__(self, server):
        pass

    def run(self, cells, say):
        names = list(dict.fromkeys(name for name, *_ in cells))
        for cell in [c for c in cells if c[0] in names[:2]] + [
            c for c in cells if c[0] == names[2]
        ][:1]:
            say(cell, Answer("crash", "by the test"))
        raise KeyboardInterrupt


def test_a_run_that_is_cut_off_writes_the_uses_that_it_has_finished(tmp_path, monkeypatch, capsys):
    before = (page.ROOT / "docs/border.md").read_text()
    (tmp_path / "docs").mkdir()
    written = tmp_path / "docs/border.md"
    written.write_text(before)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(session, "Border", CutOff)
    monkeypatch.setattr(lamina_testing.client, "ForkServer", Idle)
    monkeypatch.setattr(sys, "argv", ["page.py"])
    monkeypatch.setattr(page.signal, "signal", lambda *_: None)
    page.main()
    assert "cut off after" in capsys.readouterr().out
    rows = {line for line in written.read_text().splitlines() if line.startswith("| ")}
    changed = {line.split(" | ")[0][2:] for line in rows - set(before.splitlines())}
    first, second, third = [use.text for use in load_uses().values()][:3]
    assert {first, second} <= changed
    assert third not in changed
