"""Cells that are still wrong, in one place: why, and which.

A cell that has become right must leave the list. Until then the tests fail.
"""

from __future__ import annotations

from border.case import OURS

__all__ = ["KNOWN"]

_WRONG = {
    "gradients that reach a parameter directly, outside its unit's forward, are lost": {
        "weight_written_in_its_modules_forward": "0 1 2: bf16; 3 shard_module: bf16 fp32",
        "weight_written_in_the_roots_forward": "0: bf16; 1 2 3 shard_module: bf16 fp32",
        "autograd_grad_of_parameters": "0: bf16; 1 2 3 shard_module: bf16 fp32",
        "part_of_the_model_is_called": "0 1 2 3: bf16",
    },
    "weights written by hand are installed late or not at all": {
        "weights_written_after_a_forward": "1 2 3 ddp_sharded shard_module: fp32",
        "to_empty_and_init_after_sharding": "shard_module: fp32",
    },
    "hooks of parameters are not called, or not with the final gradient": {
        "tensor_hook_doubles_gradients": "0: bf16; 1 2 3 shard_module: bf16 fp32",
        "optimizer_in_backward_set_before_wrapping": "0 ddp: fp32",
    },
    "subclasses, complex and sparse gradients are not refused by name at wrapping": {
        "vmap_over_the_model": "3 shard_module: bf16 fp32",
        "trained_subclass_parameter": "0 1 2 3 shard_module: bf16 fp32; ddp ddp_sharded: fp32",
        "frozen_subclass_parameter": "0 1 2 3 shard_module: bf16",
        "complex_parameter": "0 1 2 3 ddp ddp_sharded shard_module: fp32",
    },
    "what is new, replaced or left out since wrapping is not noticed": {
        "frozen_after_wrapping": "shard_module: bf16 fp32",
        "requires_grad_of_the_model": "0: bf16; 1 2 3 shard_module: bf16 fp32",
    },
    "DDP's duties: buffers, ignored parameters, memory formats, copies": {
        "channels_last_weights_are_kept": "0 1 2 3 shard_module: bf16 fp32; ddp ddp_sharded: fp32",
    },
    "at times: memory that nobody wrote takes part": {
        "full_state_dicts_are_loaded": "*: fp32 bf16",
        "states_are_broadcast_from_rank_0": "*: fp32 bf16",
        "sharded_state_dicts_are_loaded": "*: fp32 bf16",
    },
    "torch's generic code does not know ShardedTensor, or the names of DDP's state": {
        "full_model_state_dict": "ddp ddp_sharded: fp32",
        "full_model_state_dict_on_one_rank": "ddp ddp_sharded: fp32",
        "full_optimizer_state_dict": "ddp_sharded: fp32; shard_module: bf16 fp32",
        "flattened_optimizer_state": "ddp_sharded: fp32",
        "cpu_offloaded_state": "ddp ddp_sharded: fp32",
        "state_without_frozen_parameters": "ddp ddp_sharded: fp32",
        "state_that_is_not_strict": "ddp ddp_sharded: fp32",
        "distributed_checkpoint_round_trip": "ddp ddp_sharded: fp32",
        "clip_by_norm": "ddp_sharded: fp32",
        "clip_by_value": "ddp_sharded: fp32",
        "transformers_save_pretrained": "1 2 3: bf16 fp32",
        "peft_save_pretrained": "1 2 3: bf16 fp32",
    },
    "FSDP2's doors": {
        "every_method_of_fsdp_module": "shard_module: bf16 fp32",
    },
    "everyday uses": {
        "model_applied_after_wrapping": "0 3 shard_module: bf16; 1 2: bf16 fp32",
        "norm_of_gradients": "ddp_sharded: fp32",
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
