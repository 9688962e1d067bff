"""What is read of a `config.json`, and the refusal of what is not.

Note [A config that is half understood]: a name that nothing reads may be a feature, such as a cap
on logits. A model that was built without the feature computes other numbers, without an error. So
the reader notes which names it has asked for, and what is left has to be in a table.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

AS_IT_IS = """
lamina.fsdp trains the model of transformers as it is:
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = lamina.fsdp.fully_shard(model, optimizer)"""
"""The way out for whoever has a model that Lamina's own blocks cannot be."""

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
        # Layers of multi-token prediction, which transformers leaves out when it saves, without a
        # change of this number. `from_huggingface` looks for their tensors.
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
    "hidden_dropout_prob": (0.0,),
    "rms_norm": (True,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
"""Names that nothing reads, with the values at which they change nothing."""


def shortened(words: Collection[str], limit: int = 6) -> str:
    """The first of some words, and how many more there are."""
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(list(words)[:limit]) + more


def refuse_other_classes(kind: str, source: Mapping[str, Any]) -> None:
    """Raise ValueError if `architectures` names classes of another type than `model_type` does."""
    names = "|".join(("For[a-z]+", "LMHeadModel", "DoubleHeadsModel", "PreTrainedModel", "Model"))
    own = re.compile(f"{kind.replace('_', '')}_?({names})", re.IGNORECASE)
    said = source.get("architectures") or ()
    classes = said if isinstance(said, list | tuple) else [said]
    if others := [name for name in classes if not own.fullmatch(str(name).replace("_", ""))]:
        raise ValueError(
            f"config.json says model_type={kind!r} and architectures={others!r}, which is a class "
            "of another type: it may compute something else with tensors of the same names. Make "
            "them agree"
        )


class MissingFieldError(ValueError):
    """A `config.json` has not got a field that its type needs."""


class ConfigFields(Mapping[str, Any]):
    """The contents of a `config.json`, which notes what is read of them.

    A field that is null is absent. With `survey` absent fields are 1: that shows which names
    somebody reads.
    """

    def __init__(self, source: Mapping[str, Any], *, survey: bool = False) -> None:
        self._source = source
        self._survey = survey
        self.names_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None and self._survey:
            return 1
        if value is None:
            raise MissingFieldError(
                f"config.json has no {name!r}, which a model of model_type "
                f"{self._source.get('model_type')!r} needs: is model_type right?"
            )
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """As of `dict`."""
        self.names_read.add(name)
        value = self._source.get(name)
        return default if value is None else value

    def __contains__(self, name: object) -> bool:
        return self._survey or self._source.get(str(name)) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def unread(self, known: Collection[str]) -> list[str]:
        """What nobody has read, as `name=value`, unless it is known to change nothing.

        `known` are further names that count as read.
        """
        left = []
        for name, value in self._source.items():
            accepted = _HARMLESS.get(name)
            harmless = accepted is not None and (not accepted or value in accepted)
            if value is not None and name not in self.names_read and name not in known:
                left += [] if harmless else [f"{name}={value!r}"]
        return left

    def refuse_unread(self, derived: Mapping[str, Any], unused: Collection[str]) -> None:
        """Raise for names that nothing has read, unless they are known to change nothing.

        `derived` are names that follow from others, with the only value that is right, and `unused`
        names of parts that the model does not have. ValueError is for the other names.
        """
        for name, value in self._source.items():
            if name in self.names_read or name in unused or value is None:
                continue
            accepted = (derived[name],) if name in derived else _HARMLESS.get(name)
            if accepted and value not in accepted:
                raise ValueError(
                    f"config.json says {name}={value!r}, and only {accepted[0]!r} is known here: "
                    "the model would compute something else"
                )
        if left := self.unread({*derived, *unused}):
            raise ValueError(
                f"config.json says {shortened(left)}, which nothing here reads: the model would "
                "compute without it. Take it out of config.json if it changes nothing"
            )
