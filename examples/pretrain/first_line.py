"""The first words of a run, while Python is still reading torch: it is imported before all else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("RANK", "0") == "0" and Path(sys.argv[0]).name == "train.py":
    print("train.py: reading PyTorch, which takes some seconds", flush=True)
