"""Cells that are still wrong, in one place: why, and which.

A cell that has become right must leave the list. Until then the tests fail.
"""

from __future__ import annotations

from border.case import OURS

__all__ = ["KNOWN"]

_WRONG = {
    "gradients that reach a parameter directly, outside its unit's forward, are lost": {
        "loss_term_outside_forward": "1: fp32",
        "root_reads_a_childs_weight": "0: bf16",
        "weight_written_in_the_roots_forward": "2 3: bf16",
        "part_of_the_model_is_called": "2 3: bf16",
    },
    "weights written by hand are installed late or not at all": {
        "averages_swapped_in_and_back": "3: bf16",
        "weights_clamped_between_steps": "ddp_sharded: fp32",
        "weights_read_by_a_plain_model": "shard_module: bf16",
        "to_empty_and_init_after_sharding": "shard_module: fp32",
        "optimizer_holds_a_parameter_twice_over_steps": "ddp_sharded: fp32",
        "sam_perturbs_weights": "3: bf16",
    },
    "hooks of parameters are not called, or not with the final gradient": {
        "post_accumulate_hook_sees_final_gradients": "1 2: bf16",
        "optimizer_in_backward": "3 ddp: fp32",
        "optimizer_in_backward_set_before_wrapping": "shard_module: bf16",
    },
    "subclasses, complex and sparse gradients are not refused by name at wrapping": {
        "trained_subclass_parameter": "0 shard_module: bf16",
        "complex_parameter": "0 1: fp32",
    },
    "what is new, replaced or left out since wrapping is not noticed": {
        "optimizer_made_before_and_not_given": "shard_module: fp32",
        "submodule_replaced_after_wrapping": "1 2: bf16",
        "parameter_added_after_wrapping": "3 ddp: fp32",
        "optimizer_made_before_shard_module": "shard_module: fp32",
        "blocks_sharded_after_the_optimizer": "shard_module: fp32",
        "tied_after_wrapping": "0 shard_module: bf16",
        "parameter_replaced_after_wrapping": "1 2: fp32",
        "parameter_removed_after_wrapping": "3: bf16",
        "weight_norm_applied_after": "2 3: fp32",
        "requires_grad_of_the_model": "shard_module: fp32",
    },
    "roles that the mesh does not know are accepted": {
        "tensor_parallel_model_without_its_mesh": "0 1: fp32",
        "tensor_parallel_model_over_a_data_mesh": "ddp ddp_sharded: fp32",
    },
    "DDP's duties: buffers, ignored parameters, memory formats, copies": {
        "batch_norm_buffers_agree": "1 2: fp32",
        "buffers_start_from_the_first_rank": "ddp: fp32",
        "parameters_to_ignore": "ddp ddp_sharded: fp32",
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
    },
    "FSDP2's doors": {
        "shard_placement_function": "shard_module: fp32",
        "every_method_of_fsdp_module": "shard_module: bf16",
    },
    "the error does not translate": {
        "fully_shard_per_block": "2 3: fp32",
        "mesh_as_a_keyword": "0 1: fp32",
        "mesh_as_second_argument": "2 3: fp32",
        "parallel_mesh_as_second_argument": "0 1: fp32",
        "result_is_not_unpacked": "2 3: fp32",
        "fsdp2_name_of_the_policy": "0 1: fp32",
        "fsdp2_name_of_ignored_parameters": "2 3: fp32",
        "fsdp2_placement_function": "0 1: fp32",
        "fsdp1_wrap_policy": "2 3: fp32",
        "fsdp1_sharding_strategy": "0 1: fp32",
        "fsdp1_cpu_offload": "2 3: fp32",
        "deepspeed_stage": "0 1: fp32",
        "megatron_strategy_name": "2 3: fp32",
        "misspelt_argument": "0 1: fp32",
        "optimizer_class_for_optimizer": "2 3: fp32",
        "parameters_for_the_module": "0 1: fp32",
        "dimension_that_is_not_there": "2 3: fp32",
        "dtype_for_a_policy": "2 3: fp32",
        "ddp_with_torchs_names": "ddp: fp32",
        "shard_module_with_a_strategy": "shard_module: fp32",
        "shard_module_with_an_optimizer": "shard_module: fp32",
    },
    "everyday uses": {
        "spectral_norm_applied_before": "0 1: bf16",
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
