"""Cells that are still wrong, in one place: why, and which.

A cell that has become right must leave the list. Until then the tests fail.
"""

from __future__ import annotations

from border.case import OURS

__all__ = ["KNOWN"]

_WRONG = {
    "torch's error names no remedy: modules hold main parameters, and graphs the compute ones": {
        "autograd_grad_of_parameters": "0: bf16; 1 2 3 shard_module: bf16 fp32",
    },
    "torch's generic code does not know ShardedTensor in an optimizer that nobody was told of": {
        "full_optimizer_state_dict": "shard_module: bf16 fp32",
        "states_are_broadcast_from_rank_0": "shard_module: bf16 fp32",
        "peft_save_pretrained": "1 2 3: bf16 fp32",
    },
    "ShardedOptimizer's state has names, where torch's generic code looks for numbers": {
        "full_optimizer_state_dict": "ddp_sharded: fp32",
        "full_state_dicts_are_loaded": "ddp_sharded: fp32",
        "states_are_broadcast_from_rank_0": "ddp_sharded: fp32",
        "sharded_state_dicts_are_loaded": "ddp_sharded: fp32",
        "flattened_optimizer_state": "ddp_sharded: fp32",
        "cpu_offloaded_state": "ddp_sharded: fp32",
        "distributed_checkpoint_round_trip": "ddp_sharded: fp32",
    },
}
"""Reason -> use -> "columns: dtypes; columns: dtypes", where * is all columns of ours."""


def _cells() -> dict[tuple[str, str, str], str]:
    found = {}
    for reason, uses in _WRONG.items():
        for use, text in uses.items():
            for part in text.split("; "):
                columns, _, dtypes = part.partition(": ")
                names = OURS if columns == "*" else columns.split()
                cells = [(use, c, d) for c in names for d in dtypes.split()]
                found.update(dict.fromkeys(cells, reason))
    return found


KNOWN = _cells()
"""(use, column, dtype) -> why it is still wrong."""
