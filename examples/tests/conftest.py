from __future__ import annotations

import sys
from pathlib import Path

# The recipe's modules import each other by bare names, as torchrun lets them; tests share a module.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "pretrain"), str(HERE)]
