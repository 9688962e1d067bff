"""RoPE in `config.json`, by the newer names and the older ones."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.configs.rope import RopeScaling, yarn_magnitude


def written_rope(config: TransformerConfig, *, scaled_queries: bool = False) -> dict[str, Any]:
    """The `rope_parameters` of a config; ValueError for what the type's model does not read."""
    scaling = config.rope_scaling
    written: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rotary_fraction != 1.0:
        written["partial_rotary_factor"] = config.rotary_fraction
    if scaling is None:
        return written
    written |= {"rope_type": scaling.kind, "factor": scaling.factor}
    names = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
    written |= {name: getattr(scaling, name) for name in names.get(scaling.kind, ())}
    if scaling.kind != "linear":
        written["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "yarn":
        written["attention_factor"] = scaling.magnitude
        written |= {} if scaling.truncate else {"truncate": False}
        if scaled_queries:
            written[_QUERY_BETA] = scaling.query_beta
        elif scaling.query_beta:
            raise ValueError(
                f"rope_scaling has query_beta={scaling.query_beta}, which no model of this type "
                "reads: name a type that does as huggingface_type (ministral3, mistral4)"
            )
        variant = config.attention_variant
        if config.attention_scale is not None and variant and variant.yarn_scales_scores:
            # DeepSeek folds a factor into the softmax scale: solve for what it is written as.
            ratio = math.sqrt(config.attention_scale * math.sqrt(config.head_width))
            written["mscale_all_dim"] = (ratio - 1.0) / (0.1 * math.log(scaling.factor))
    return written


def read_rope(
    source: Mapping[str, Any], said: Any = None, *, scaled_queries: bool = False
) -> dict[str, Any]:
    """The fields of `TransformerConfig` that say how heads are turned.

    `said` are the `rope_parameters`, if they are not those of the whole model.
    """
    rope = rope_of(source, said, partial=True, scaled_queries=scaled_queries)
    fraction = rope.get("partial_rotary_factor") or source.get("partial_rotary_factor", 1.0)
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": read_scaling(rope, source),
        "rotary_fraction": float(fraction),
    }


def rope_of(
    source: Mapping[str, Any],
    said: Any = None,
    *,
    partial: bool = False,
    scaled_queries: bool = False,
) -> dict[str, Any]:
    """`rope_parameters`, or what older files have in its place.

    `partial` allows a fraction, and `scaled_queries` what `RopeScaling.query_beta` is read from.
    """
    rope = dict(said or source.get("rope_parameters") or source.get("rope_scaling") or {})
    rope.setdefault("rope_theta", source.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_theta"] is None:
        raise ValueError(
            "rope_parameters has rope_theta=None, a model without positions: only types whose "
            "layers say that they have none are known here"
        )
    known = _ROPE | ({_QUERY_BETA, "max_position_embeddings"} if scaled_queries else set())
    unknown = {name: value for name, value in rope.items() if name not in known}
    whole = rope.get("partial_rotary_factor") in (None, 1.0)
    if unknown or not (partial or whole):
        raise ValueError(
            f"rope_parameters (or rope_scaling) has {unknown or rope}, which nothing here reads: "
            "the positions would not be those of the model. Take it out of config.json if it "
            "changes nothing"
        )
    return rope


_QUERY_BETA = "llama_4_scaling_beta"
_SCALING = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")
_ROPE = {
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "finetuned"),
    *("attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor", *_SCALING),
}
"""All names that RoPE may have. `finetuned` says where the numbers come from, and nothing else."""


def read_scaling(rope: Mapping[str, Any], source: Mapping[str, Any]) -> RopeScaling | None:
    """How `rope_parameters` stretch wavelengths; None where they do not."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope_type is {kind!r}: known are default, linear, llama3 and yarn")
    original = "original_max_position_embeddings"
    scaling = {name: rope[name] for name in _SCALING if rope.get(name) is not None}
    if kind != "linear":
        length = source.get(original) or rope.get(original) or source["max_position_embeddings"]
        scaling["original_length"] = length
    if rope.get(_QUERY_BETA):
        scaling["query_beta"] = rope[_QUERY_BETA]
    return RopeScaling(
        kind=kind, factor=rope["factor"], attention_factor=_read_magnitude(rope), **scaling
    )


def _read_magnitude(rope: Mapping[str, Any]) -> float | None:
    if rope["rope_type"] != "yarn" or rope.get("attention_factor") is not None:
        return rope.get("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        weights = rope["mscale"], rope["mscale_all_dim"]
        above, below = (yarn_magnitude(rope["factor"], weight) for weight in weights)
        return above / below
    return None


def with_scale(
    config: TransformerConfig, variant: type[AttentionVariant], rope: Mapping[str, Any]
) -> TransformerConfig:
    """The config with the scale of scores that YaRN's magnitude is folded into, if it is."""
    folded = variant.yarn_scales_scores and rope.get("mscale_all_dim")
    if not folded or rope["rope_type"] == "default":
        return config
    magnitude = yarn_magnitude(rope["factor"], rope["mscale_all_dim"])
    return replace(config, attention_scale=magnitude**2 / math.sqrt(config.head_width))
