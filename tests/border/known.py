"""Cells that are still wrong, in one place: why, and which.

A cell that has become right must leave the list. Until then the tests fail.
"""

from __future__ import annotations

from border.case import OURS

__all__ = ["KNOWN"]

_WRONG = {
    "gradients that reach a parameter directly, outside its unit's forward, are lost": {
        "weight_written_in_the_roots_forward": "2 3: bf16",
        "part_of_the_model_is_called": "2 3: bf16",
    },
    "weights written by hand are installed late or not at all": {
        "weights_read_by_a_plain_model": "shard_module: bf16",
        "to_empty_and_init_after_sharding": "shard_module: fp32",
    },
    "subclasses, complex and sparse gradients are not refused by name at wrapping": {
        "trained_subclass_parameter": "0 shard_module: bf16",
        "complex_parameter": "0 1: fp32",
    },
    "what is new, replaced or left out since wrapping is not noticed": {
        "frozen_after_wrapping": "shard_module: fp32",
        "requires_grad_of_the_model": "shard_module: fp32",
    },
    "DDP's duties: buffers, ignored parameters, memory formats, copies": {
        "batch_norm_buffers_agree": "1 2: fp32",
        "buffers_start_from_the_first_rank": "ddp: fp32",
        "channels_last_weights_are_kept": "0 1: bf16",
        "torch_save_of_the_wrapper": "ddp ddp_sharded: fp32",
    },
    "at times: memory that nobody wrote takes part": {
        "full_state_dicts_are_loaded": "*: fp32 bf16",
        "states_are_broadcast_from_rank_0": "*: fp32 bf16",
        "sharded_state_dicts_are_loaded": "*: fp32 bf16",
    },
    "torch's generic code does not know ShardedTensor, or the names of DDP's state": {
        "full_model_state_dict": "3 ddp: fp32",
        "full_model_state_dict_on_one_rank": "ddp_sharded: fp32; shard_module: bf16",
        "full_optimizer_state_dict": "1: fp32",
        "cpu_offloaded_state": "ddp: fp32",
        "state_without_frozen_parameters": "ddp_sharded: fp32",
        "safetensors_of_the_state": "shard_module: fp32",
        "data_pointers": "1 2: bf16",
        "numpy_of_parameters": "3: fp32",
        "clip_by_norm": "ddp_sharded: fp32",
        "averaged_model": "ddp ddp_sharded: fp32",
    },
    "FSDP2's doors": {
        "every_method_of_fsdp_module": "shard_module: bf16",
    },
    "the error does not translate": {},
    "everyday uses": {},
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
