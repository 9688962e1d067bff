"""Many cells on one pair of ranks: the program of a rank, and who starts it."""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from border.uses import load_uses

from lamina_testing.client import ForkServer
from lamina_testing.jobs import Argument, Job

Cell = tuple[str, str, str]
"""Name of the use, column, dtype."""

PATIENCE = 12.0
"""Seconds for one cell. What takes longer hangs."""
LONG = 90.0
"""Seconds for one cell of a slow use."""
_HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class Answer:
    """What is said of a cell.

    Attributes:
        verdict: "right", "refused", "different" or "crash"; "error" in torch's own columns.
        detail: why.
    """

    verdict: str
    detail: str

    @property
    def good(self) -> bool:
        return self.verdict in ("right", "refused")


# -- on a rank ------------------------------------------------------------------------------------


def run_session(cells: list[Cell], out: str, ranks: Any) -> None:
    """Judge cells one after another; a line before and a line after each."""
    import torch.distributed as dist
    from border.case import Case
    from border.judge import judge

    from lamina.mesh import ParallelLayout

    uses = load_uses()
    store = dist.distributed_c10d._get_default_store()
    mesh = None
    with Path(out, str(ranks.rank)).open("a", buffering=1) as file:
        for number, (name, column, dtype) in enumerate(cells):
            print(json.dumps([number, "begun", ""]), file=file)
            patience = LONG if uses[name].slow else PATIENCE
            faulthandler.dump_traceback_later(patience, exit=True)
            directory = Path(out, f"cell{number}")
            directory.mkdir(exist_ok=True)
            mesh = mesh or ParallelLayout().build("cpu")
            case = Case(column, dtype, ranks.rank, mesh, directory)
            oracle = Case("plain", "fp32", ranks.rank, None, directory / f"plain{ranks.rank}")
            oracle.directory.mkdir()
            try:
                verdict, detail = judge(uses[name], case, oracle)
            except Exception:
                verdict, detail = "crash", "the oracle: " + traceback.format_exc(limit=-2)
            store.set(f"{number} {ranks.rank}", verdict)
            print(json.dumps([number, verdict, detail]), file=file)
            other = f"{number} {1 - ranks.rank}"
            store.wait([other], datetime.timedelta(seconds=patience))
            faulthandler.cancel_dump_traceback_later()
            if store.get(other).decode() != verdict:
                return  # Who waits for whom is unknown now.
            if verdict not in ("right", "refused"):
                mesh = None


# -- in pytest, or a script -----------------------------------------------------------------------


class Border:
    """Runs cells, in as few sessions as crashes allow."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def run(self, cells: Iterable[Cell], say: Any = lambda *_: None) -> dict[Cell, Answer]:
        """The answers; a session that a cell ends goes on with the next one."""
        left = list(cells)
        found: dict[Cell, Answer] = {}
        while left:
            answers = self._session(left[:60])
            for cell, answer in zip(left, answers, strict=False):
                found[cell] = answer
                say(cell, answer)
            left = left[len(answers) :]
        return found

    def _session(self, cells: Sequence[Cell]) -> list[Answer]:
        out = Path(tempfile.mkdtemp(prefix="lamina-border-"))
        try:
            outcomes = self._server.run(_job(list(cells), out))
            lines = [_lines(out / str(rank)) for rank in range(2)]
        finally:
            shutil.rmtree(out, ignore_errors=True)
        answers = []
        for number in range(len(cells)):
            each = [of_rank.get(number) for of_rank in lines]
            if each == [None, None]:
                break
            answers.append(_joined(each, outcomes))
        if not answers:
            raise RuntimeError(
                "no cell was run:\n" + "\n".join(o.text + o.stderr for o in outcomes)
            )
        return answers


def _joined(each: list[Any], outcomes: Any) -> Answer:
    """What both ranks say together."""
    ended = [one for one in each if one is not None and one[0] != "begun"]
    if len(ended) < 2:
        ways = [o.summary for o in outcomes if o.status in ("died", "hung")]
        seen = "; ".join(f"one rank: {verdict} {detail}" for verdict, detail in ended)
        return Answer("crash", f"{'; '.join(ways)} {seen}".strip())
    verdicts = [verdict for verdict, _ in ended]
    detail = ended[0][1] or ended[1][1]
    if verdicts[0] == verdicts[1]:
        return Answer(verdicts[0], detail)
    if set(verdicts) <= {"right", "different"}:
        return Answer("different", detail)
    return Answer("crash", f"ranks disagree: {verdicts}: {detail}")


def _lines(file: Path) -> dict[int, tuple[str, str]]:
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        number, verdict, detail = json.loads(line)
        found[number] = (verdict, detail)
    return found


def _job(cells: list[Cell], out: Path) -> Job:
    return Job(
        module_name="border.session",
        path=str(_HERE),
        qualname=("run_session",),
        arguments={
            "cells": Argument(pickle.dumps(cells)),
            "out": Argument(pickle.dumps(str(out))),
            "ranks": Argument(b""),
        },
        world_size=2,
        backend="gloo",
        device="cpu",
        timeout=60 + PATIENCE * len(cells),
        init=True,
        environment=dict(os.environ) | {"TORCHDYNAMO_VERBOSE": "0"},
        directory=os.getcwd(),
        sys_path=[str(_HERE.parents[1]), *sys.path],
        warning_filters=["ignore"],
        reuse=False,
        traceback_style="short",
        show_locals=False,
    )
