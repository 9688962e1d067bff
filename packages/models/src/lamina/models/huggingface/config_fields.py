"""Names of `config.json` as a closed world: each is read, known to change nothing, or refused.

Note [A config that is half understood]: a name that nothing reads may be a feature, such as a cap
on logits. A model that was built without the feature computes other numbers, without an error. So
the reader notes which names it has asked for, and what is left has to be in a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

__all__ = ["ConfigFields"]

_ANY = ()
"""Accepted values of a name that changes nothing in the model, whatever its value."""

_HARMLESS: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        # Where the files come from, and how transformers loads them.
        *("_name_or_path", "_commit_hash", "architectures", "auto_map", "transformers_version"),
        *("dtype", "torch_dtype", "use_bfloat16", "torchscript", "_attn_implementation"),
        *("attn_implementation", "_attn_implementation_autoset", "_experts_implementation"),
        *("tokenizer_class", "task_specific_params", "finetuning_task", "prefix"),
        # What a forward returns, beside logits.
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("use_return_dict", "use_cache", "return_dict_in_generate", "output_scores"),
        # Tokens by which generation begins and ends. The padding token's embedding has no gradient
        # in transformers, and is a row like any other here.
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        # Heads for classification.
        *("id2label", "label2id", "num_labels", "problem_type", "classifier_dropout"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
        "summary_use_proj",
        # Training: auxiliary losses, and what only initialisation reads.
        *("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "gradient_checkpointing"),
        *("rescale_prenorm_residual", "time_step_floor", "time_step_rank"),
        # Memory and rounding: feed-forward layers in pieces, products in slices, and the dtype of
        # a residual.
        *("chunk_size_feed_forward", "pretraining_tp", "residual_in_fp32", "ep_size"),
        # Further predictions, whose layers transformers leaves out too. `from_huggingface` names
        # their tensors.
        "num_nextn_predict_layers",
        # Read above where they count: windows that are off, an older file's names beside a newer's,
        # and the sizes of dense layers.
        *("sliding_window", "use_sliding_window", "max_window_layers", "rope_theta"),
        *("original_max_position_embeddings", "n_ctx", "quantization_config"),
        # Leftovers in published files, which no model of transformers reads.
        *("_num_labels", "n_special", "output_past", "predict_special_tokens"),  # gpt2
        *("is_llama_config", "max_sequence_length", "model_max_length", "seq_length"),
        *("transformers.js_config", "unsloth_fixed", "unsloth_version", "_flash_attn_2_enabled"),
        *("norm_before_gate", "time_step_init_scheme", "time_step_scale"),  # mamba2
    ),
    _ANY,
) | {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "hidden_dropout_prob": (0.0,),
    "rms_norm": (True,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
"""Names that nothing reads, with the values at which they change nothing."""


class ConfigFields(Mapping[str, Any]):
    """The contents of a `config.json`, which notes what is read of them.

    Args:
        source: the contents.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = source
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._source[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def refuse_unread(self, derived: Mapping[str, Any], unused: Collection[str]) -> None:
        """Raise for a name that nothing has read, unless it is known to change nothing.

        Args:
            derived: names that follow from others, with the only value that is right.
            unused: names of parts that the model does not have.

        Raises:
            ValueError: for the first of them.
        """
        for name, value in self._source.items():
            if name in self._read or name in unused or value is None:
                continue
            accepted = (derived[name],) if name in derived else _HARMLESS.get(name)
            if accepted is None:
                raise ValueError(
                    f"config.json says {name}={value!r}, which nothing here reads: the model would "
                    "compute without it. Take it out of config.json if it changes nothing"
                )
            if accepted and value not in accepted:
                raise ValueError(
                    f"config.json says {name}={value!r}, and only {accepted[0]!r} is known here: "
                    "the model would compute something else"
                )
