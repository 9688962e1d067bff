"""Every task of this repository. `python3 noxfile.py -s NAME` needs nothing installed.

The first run makes a small environment for nox in `.nox/bootstrap` and restarts under it (so it
works where the system's Python refuses `pip install`, PEP 668). Plain `nox -s NAME` works too.
`python3 noxfile.py -l` lists the tasks; what follows `--` goes to the task itself. They are in
`tasks/`.

LAMINA_INDEX_URL  package index that torch is taken from (a CPU-only or another CUDA build of it)
LAMINA_PYTHON     an interpreter that has torch: it is used as it is, torch is not installed again
Both are remembered in `.nox/env`; delete that to choose anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"Lamina needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}")
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tasks import bootstrap

if __name__ == "__main__":
    bootstrap.start()
    sys.exit(0)

import nox

nox.needs_version = bootstrap.NOX.removeprefix("nox")
nox.options.sessions = ["lint", "typecheck", "layers", "tests"]

# Each of these modules declares its tasks to nox when it is imported.
import tasks.elsewhere.session  # noqa: E402
import tasks.everyday  # noqa: E402
import tasks.fuzz.session  # noqa: E402
import tasks.hardware.session  # noqa: E402
import tasks.matrix.session  # noqa: E402
import tasks.mutation.session  # noqa: E402
import tasks.peers.session  # noqa: E402
import tasks.release.session  # noqa: E402
import tasks.tests  # noqa: E402
import tasks.virtual_gpu.session  # noqa: E402, F401
