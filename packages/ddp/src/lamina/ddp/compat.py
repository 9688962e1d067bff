"""What a backward takes from torch that torch does not promise: its private names.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

from __future__ import annotations

import torch
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _will_engine_execute_node as will_execute
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "current_graph_task_id",
    "queue_callback",
    "tree_leaves",
    "tree_map",
    "will_execute",
]

queue_callback = torch.autograd.Variable._execution_engine.queue_callback
"""Has a function called when the backward that runs now has ended."""
