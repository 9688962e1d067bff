"""How far a training step walks through the source: the figures may shrink, and not grow.

The measure is that of benchmarks/walk.py, which says what is counted.
"""

from __future__ import annotations

import sys

import pytest
from source_trees import ROOT

# Files and calls of one step by strategy, with room for a few calls more. Whoever needs
# more says in the commit what the step does now that it did not do before.
LIMITS = {0: (18, 980), 1: (18, 1080), 3: (19, 1190)}
# Of the collectives a plain step enters what records and starts them, sums, and moves bytes over
# gloo: no codec, and nothing that only chooses, checks or prepares.
COLLECTIVES = {
    "call/collective.py", "move/small.py", "reduction/ordered.py", "reduction/summation.py",
    "transport/gloo_exchange.py", "transport/lanes.py",
}  # fmt: skip
# Of what ddp does around a backward, the files of units, their groups and the optimizer's step:
# no search through containers, no facts to describe, nothing of a wrapper.
DDP = {
    "execution/engine.py", "execution/hooks.py", "execution/unit.py", "group/group.py",
    "group/shown.py", "group/weights.py", "optimizer/flat_step.py",
}  # fmt: skip
AROUND = ("execution/", "group/", "optimizer/", "parameters/", "wrapper/")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", LIMITS)
def test_a_step_enters_few_files_and_functions(strategy, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import walk as benchmark

    from lamina_testing.walk import Profile, path_in_lamina

    with Profile(benchmark.in_lamina) as profile:
        walk = benchmark.walk_of(profile, benchmark.lamina_step(strategy), counted=5)
    files, calls = LIMITS[strategy]
    entered = [path_in_lamina(file) for file in walk.files]
    assert len(entered) <= files, entered
    of_collectives = {file.partition("/")[2] for file in entered if file.startswith("collectives/")}
    assert of_collectives <= COLLECTIVES
    of_ddp = {file.partition("/")[2] for file in entered if file.startswith("ddp/")}
    assert {file for file in of_ddp if file.startswith(AROUND)} <= DDP
    assert walk.calls.total() <= calls, walk.calls.most_common(20)


def test_counts_are_exact():
    """One file that calls another: functions, calls and moves, threads included."""
    import threading

    from lamina_testing.walk import Profile, least

    space: dict[str, object] = {}
    exec(compile("def leaf(): pass\ndef twice():\n    leaf()\n    leaf()", "own.py", "exec"), space)
    twice = space["twice"]
    with Profile(lambda file: file == "own.py") as profile:
        with profile.walk() as walk:
            twice()
            thread = threading.Thread(target=twice)
            thread.start()
            thread.join()
        twice()  # not inside `walk`
        with profile.walk() as other:
            twice()
    assert {function.name: n for function, n in walk.calls.items()} == {"twice": 2, "leaf": 4}
    assert {function.name: n for function, n in walk.moves.items()} == {"twice": 2}
    assert least([walk, other]).calls == other.calls
    assert walk.files == ["own.py"]
