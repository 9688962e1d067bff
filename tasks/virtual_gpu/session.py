"""The task `virtual-gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nox

from tasks.bootstrap import HOUSE, LAYERS, ROOT, locked
from tasks.environment import CHILD_ENV, SHARED
from tasks.matrix.cells import Devices
from tasks.matrix.history import load
from tasks.matrix.page import write_records
from tasks.matrix.session import RECORD, all_cells, environments

OUT_OF_REACH = 69
SOURCES = ROOT / "testing" / "virtual_gpu" / "src"
TESTS = ("testing/virtual_gpu/tests", "tests/virtual_gpu")
# What the tests, the layers and the main job need beside torch.
NEEDS = "pytest hypothesis einops safetensors matplotlib psutil rich tensorboard tyro".split()
NEEDS += ["pytest-xdist"]  # of `-- tests` and `-- all`
# Extras of models, for its tests. What requires torch itself would bring NVIDIA's own libraries.
NEEDS += ["transformers>=5.20,<6", "spmd-types>=0.3.1,<0.4"]


def set_up(session: nox.Session, torch: str = "2.14") -> Path:
    """Return the Python of an environment with a virtual GPU; skip where it cannot be had."""
    where = HOUSE / ("virtual-gpu" if torch == "2.14" else f"virtual-gpu-{torch}")
    command = ["-m", "lamina_virtual_gpu", "setup", str(where), "--torch", torch, "--more", *NEEDS]
    python = getattr(sys, "_base_executable", sys.executable)
    with locked(where.name):
        answer = subprocess.run(
            [python, *command],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            stderr=subprocess.PIPE,
            text=True,
        )
        if answer.returncode == OUT_OF_REACH:
            session.skip(f"no virtual GPU here: {answer.stderr.strip().splitlines()[-1]}")
        if answer.returncode:
            session.error(answer.stderr.strip())
        # The layers, from the tree.
        sources = [ROOT / "packages" / layer / "src" for layer in LAYERS]
        lines = [str(path) for path in (*sources, ROOT / "testing" / "src")]
        (packages,) = where.glob("lib/python3*/site-packages")
        (packages / "lamina_tree.pth").write_text("\n".join(lines) + "\n")
    return where / "bin" / "python"


@nox.session(venv_backend="none", default=False, name="virtual-gpu")
def virtual_gpu(session: nox.Session) -> None:
    """A GPU that is not there: `-- budgets` of a step, `-- all` tests, `-- tests` with values."""
    words = list(session.posargs)
    torch = words.pop(words.index("--torch") + 1) if "--torch" in words else "2.14"
    words = [word for word in words if word != "--torch"]
    python = set_up(session, torch)
    what = (
        words.pop(0)
        if words[:1] in (["budgets"], ["all"], ["order"], ["python"], ["test"], ["tests"])
        else "test"
    )
    if what == "python":  # for one's own program
        command = [str(python), *words]
    elif what == "order":
        writes = "--write" in words
        program = ["order_on_gpu.py"] if writes else ["order_scenarios.py", "--cuda"]
        command = [str(python), f"tests/{program[0]}", *program[1:], *words]
    elif what in ("budgets", "all", "tests"):
        module = {"budgets": "budgets", "all": "everything", "tests": "with_values"}[what]
        command = [str(python), "-m", f"tasks.virtual_gpu.{module}", *words]
    else:
        command = [str(python), "-m", "pytest", "-q", *TESTS, *words]
    try:
        session.run(*command, external=True, env=CHILD_ENV)
    finally:
        if what == "tests" and "--keep" in words:  # failed tests are kept too
            cells = all_cells(Devices.find(SHARED.python), environments())
            write_records(ROOT, load(RECORD), cells)
