"""Mamba-2 in the `config.json` of Hugging Face's model_type mamba2."""

import math
from collections.abc import Mapping
from typing import Any

from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.mamba import MambaConfig

__all__ = ["read_mamba2", "write_mamba2"]

# Sizes by their names in `config.json`; files may lack the second kind.
_ALWAYS = {
    "state_size": "state_size",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "conv_kernel": "conv_kernel",
    "chunk_size": "chunk_size",
}
_MAYBE = {
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
}


def write_mamba2(config: TransformerConfig) -> dict[str, Any]:
    """Write the fields of `config.json` that only Mamba-2 has.

    Raises:
        ValueError: if the inner width is not a multiple of the hidden size.
    """
    sizes = config.mamba
    if sizes is None:
        raise ValueError("the config has no mamba")
    heads = sizes.heads(config.hidden_size)
    expand, remainder = divmod(heads * sizes.head_dim, config.hidden_size)
    if remainder:
        raise ValueError(
            f"{heads} heads of {sizes.head_dim} make an inner width of {heads * sizes.head_dim}, "
            f"no multiple of hidden_size {config.hidden_size}: mamba2 has expand instead"
        )
    written: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_norm_epsilon": config.norm_eps,
        "num_heads": heads,
        "expand": expand,
        **{theirs: getattr(sizes, ours) for ours, theirs in (_ALWAYS | _MAYBE).items()},
        "hidden_act": "silu",
        "residual_in_fp32": True,
    }
    if sizes.dt_limit != (0.0, math.inf):  # the default; JSON has no infinity
        infinity = {"__float__": "Infinity"}  # as transformers writes it
        written["time_step_limit"] = [infinity if b == math.inf else b for b in sizes.dt_limit]
    return written


def _read_bound(bound: float | Mapping[str, str]) -> float:
    return float(bound["__float__"] if isinstance(bound, Mapping) else bound)


def read_mamba2(source: Mapping[str, Any]) -> TransformerConfig:
    """Read the contents of the `config.json` of a stack of Mamba-2 layers.

    Raises:
        ValueError: for an activation other than SiLU.
    """
    if source.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {source['hidden_act']!r}: only silu is known")
    layers = source["num_hidden_layers"]
    limit = source.get("time_step_limit") or (0.0, math.inf)
    return TransformerConfig(
        vocab_size=source["vocab_size"],
        hidden_size=source["hidden_size"],
        num_layers=layers,
        num_heads=1,  # not used, as there is no attention
        # Without positions nothing limits the length of a sequence or is allocated for it.
        max_sequence_length=1 << 20,
        positions="none",
        norm_eps=source.get("layer_norm_epsilon", 1e-5),
        layer_pattern="M" * layers,
        mamba=MambaConfig(
            num_heads=source["num_heads"],
            expand=source.get("expand", 2),
            **{ours: source[theirs] for ours, theirs in _ALWAYS.items()},
            **{ours: source[theirs] for ours, theirs in _MAYBE.items() if theirs in source},
            dt_limit=(_read_bound(limit[0]), _read_bound(limit[1])),
        ),
        tie_embeddings=source.get("tie_word_embeddings", False),
        init_std=source.get("initializer_range", 0.1),
    )
