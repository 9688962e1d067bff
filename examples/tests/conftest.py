from __future__ import annotations

import sys
from pathlib import Path

# The recipe's modules import each other by bare names, as torchrun lets them.
sys.path.insert(0, str(Path(__file__).parents[1] / "pretrain"))
