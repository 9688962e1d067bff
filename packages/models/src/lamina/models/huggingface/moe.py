"""Parameters and settings of experts in Hugging Face's models.

In files every expert has tensors of its own. A `transformers` model in memory (from version 5)
stacks the experts in one tensor, and Mixtral's names differ too. A `WeightLink` has both names.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lamina.models.base.config import TransformerConfig
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.layers.mlp import DenseMLP

EXPERT_FIELDS = (
    *("num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
    *("scoring_func", "topk_method", "moe_layer_freq"),
)
"""Names of `config.json` that change nothing in a model whose layers are all dense."""
_PROJECTIONS = {
    "mixtral": ("w1", "w3", "w2"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("gate_proj", "up_proj", "down_proj"),
}


def moe_model_type(
    config: TransformerConfig, moe: MoEConfig, attention_type: str | None
) -> str | None:
    """Name the architecture with these experts; None if there is none known here.

    The caller has checked all fields that neither experts nor attention read. `attention_type` is
    the architecture that the attention belongs to; None is multi-head.
    """
    plain = moe.scores == "softmax" and moe.num_groups == 1 and moe.weight_scale == 1.0
    plain = plain and moe.bias_rate is None and moe.shared_ffn_size is None
    if moe.shared_gate or moe.bias or moe.router_bias:
        return None
    if attention_type is not None:
        deepseek = moe.scores == "sigmoid" and moe.bias_rate is not None and moe.every == 1
        deepseek = deepseek and attention_type == "deepseek_v3"
        whole = moe.shared_ffn_size is not None and moe.shared_ffn_size % _inner(config, moe) == 0
        return "deepseek_v3" if deepseek and whole and moe.group_best == 2 else None
    if not plain or (moe.first_dense and moe.every > 1):
        return None
    if config.qk_norm:
        return "qwen3_moe"
    mixtral = moe.normalize_weights and moe.first_dense == 0 and moe.every == 1
    return "mixtral" if mixtral and not config.attention_bias else None


def _inner(config: TransformerConfig, moe: MoEConfig) -> int:
    return moe.ffn_size or config.ffn_width


def moe_links(
    config: TransformerConfig, moe: MoEConfig, kind: str, ours: str, theirs: str
) -> Iterator[WeightLink]:
    """Link a layer's router, experts and shared experts.

    `kind` is that of `moe_model_type`; `ours` and `theirs` are prefixes of names, `blocks.0.mlp`
    and `model.layers.0.mlp`.
    """
    inner, hidden = _inner(config, moe), config.hidden_size
    files, memory = theirs, theirs
    if kind == "mixtral":
        files = f"{theirs.removesuffix('.mlp')}.block_sparse_moe"
    yield WeightLink(
        f"{ours}.router.weight", (f"{files}.gate.weight",), in_memory=f"{memory}.gate.weight"
    )
    if moe.router_bias:
        yield WeightLink(f"{ours}.router.bias", (f"{files}.gate.bias",))
    if moe.bias_rate is not None:
        yield WeightLink(f"{ours}.router.expert_bias", (f"{files}.gate.e_score_correction_bias",))
    *inputs, down = _PROJECTIONS.get(kind, _PROJECTIONS["qwen3_moe"])
    if not config.gated:
        inputs = inputs[1:]
    stacks = (("up", inputs, inner, "gate_up_proj" if config.gated else "up_proj"),
              ("down", [down], hidden, "down_proj"))  # fmt: skip
    for name, parts, rows, stacked in stacks:
        for kind, end in (("weight", ""), ("bias", "_bias")) if moe.bias else (("weight", ""),):
            each = [
                f"{files}.experts.{e}.{p}.{kind}" for e in range(moe.num_experts) for p in parts
            ]
            yield WeightLink(
                f"{ours}.experts.{name}{end}",
                tuple(each),
                rows=(rows,) * len(each),
                stack=moe.num_experts,
                kernel=() if end else None,
                in_memory=f"{memory}.experts.{stacked}{end}",
            )
    if moe.shared_ffn_size is not None:
        shared = f"{files}.shared_experts"
        own = replace(config, ffn_size=moe.shared_ffn_size, mlp_bias=False)
        yield from DenseMLP().huggingface_links(own, f"{ours}.shared", shared)
        if moe.shared_gate:
            yield from linked(f"{ours}.shared_gate", f"{files}.shared_expert_gate")


def warn_of_capacity(moe: MoEConfig) -> None:
    """Warn of a capacity, which no `config.json` can express."""
    if moe.capacity_factor is not None:
        warnings.warn(
            f"capacity_factor is {moe.capacity_factor}: experts drop copies here, in evaluation "
            "too, and transformers drops none, so that logits differ where an expert is full; to "
            "compare evaluate with capacity_factor=None",
            stacklevel=4,
        )


def written_moe(config: TransformerConfig, moe: MoEConfig, kind: str) -> dict[str, Any]:
    """Settings of experts in `config.json`; warns of a capacity, which it cannot express."""
    warn_of_capacity(moe)
    inner = _inner(config, moe)
    if kind == "mixtral":
        return {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": inner,
            "router_jitter_noise": moe.jitter,
            "sliding_window": config.sliding_window,
        }
    if kind == "qwen3_moe":
        return {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": inner,
            "norm_topk_prob": moe.normalize_weights,
            "decoder_sparse_step": moe.every,
            "mlp_only_layers": list(range(moe.first_dense)),
        }
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": inner,
        "n_shared_experts": (moe.shared_ffn_size or 0) // inner,
        "n_group": moe.num_groups,
        "topk_group": moe.groups_kept,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.weight_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": moe.first_dense,
        "num_nextn_predict_layers": 0,
    }


def read_moe(kind: str, source: Mapping[str, Any]) -> MoEConfig | None:
    """Read the experts of a `config.json`; None where all layers are dense.

    Coefficients of auxiliary losses are not read, as they belong to training. ValueError names
    layers that no `MoEConfig` describes, or experts without a number.
    """
    if kind == "mixtral":
        return MoEConfig(
            num_experts=source["num_local_experts"],
            top_k=source["num_experts_per_tok"],
            ffn_size=source["intermediate_size"],
            jitter=source.get("router_jitter_noise") or 0.0,
        )
    if kind == "qwen3_moe":
        return _read_qwen(source)
    return _read_deepseek(source) if kind == "deepseek_v3" else None


def _read_qwen(source: Mapping[str, Any]) -> MoEConfig:
    dense = sorted(source.get("mlp_only_layers") or ())
    every = source.get("decoder_sparse_step", 1)
    if dense != list(range(len(dense))) or (dense and every > 1):
        raise ValueError(
            f"mlp_only_layers is {dense} with decoder_sparse_step {every}: MoEConfig knows the "
            "first layers, or every n-th, but no others"
        )
    experts = source.get("num_experts")
    return MoEConfig(
        num_experts=source["num_local_experts"] if experts is None else experts,
        top_k=source["num_experts_per_tok"],
        ffn_size=source["moe_intermediate_size"],
        normalize_weights=source.get("norm_topk_prob", False),
        first_dense=len(dense),
        every=every,
    )


def _read_deepseek(source: Mapping[str, Any]) -> MoEConfig | None:
    layers = source["num_hidden_layers"]
    dense = source.get("first_k_dense_replace") or 0
    if dense >= layers:
        return None
    experts = source.get("n_routed_experts")
    if experts is None:
        raise ValueError(
            f"first_k_dense_replace is {dense} of {layers} layers: the others have experts, and "
            "n_routed_experts does not say how many"
        )
    inner = source["moe_intermediate_size"]
    return MoEConfig(
        num_experts=experts,
        top_k=source["num_experts_per_tok"],
        ffn_size=inner,
        shared_ffn_size=inner * source.get("n_shared_experts", 1),
        first_dense=dense,
        scores="sigmoid",
        normalize_weights=source.get("norm_topk_prob", True),
        weight_scale=source.get("routed_scaling_factor", 1.0),
        num_groups=source.get("n_group") or 1,
        groups_kept=source.get("topk_group") or 1,
        bias_rate=0.0,
    )
