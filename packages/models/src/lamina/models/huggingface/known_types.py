"""The types of transformers that `types.toml` describes, beside those that `configs.py` reads."""

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from lamina.models.attention.gated_attention import GatedAttention
from lamina.models.base.config import LayerPart, TransformerConfig
from lamina.models.base.configs.elements import AttentionScores
from lamina.models.huggingface.model_types import REQUIRED, Field, ModelType
from lamina.models.mamba.block import Mamba2
from lamina.models.mamba.delta_net import GatedDeltaNet
from lamina.models.mamba.selective import Mamba1
from lamina.models.mamba.short_convolution import ShortConvolution


def _first_layers(dense: Sequence[int]) -> int:
    """The number of dense layers, if these are the first."""
    if sorted(dense) != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers is {dense}: only the first layers may be dense here")
    return len(dense)


def _same(value: Any) -> Any:
    return value


def _softcap(value: float) -> AttentionScores:
    return AttentionScores(softcap=value)


def _lfm2_width(
    width: int, adjusted: bool | None, factor: float | None, multiple: int | None
) -> int:
    """LFM2's inner width; its config has that of an MLP of as many parameters without a gate."""
    if adjusted is False:
        return width
    width, multiple = int((factor or 1.0) * int(2 * width / 3)), multiple or 256
    return multiple * -(-width // multiple)


_NO_BOUNDS = (0.0, math.inf)


def _bounds(said: Sequence[float | Mapping[str, str]]) -> tuple[float, ...]:
    """Two bounds; JSON has no infinity, and transformers writes a table in its place."""
    return tuple(float(b["__float__"] if isinstance(b, Mapping) else b) for b in said)


CONVERSIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "float": (float, _same),
    "length": (len, _same),
    "or_null": (lambda value: value or None, _same),
    "reciprocal": (lambda x: 1.0 / x, lambda x: 1.0 / x),
    "root": (math.sqrt, lambda scale: round(scale * scale)),
    "inverse_root": (lambda x: x**-0.5, lambda x: round(x**-2)),
    "first_layers": (_first_layers, lambda number: list(range(number))),
    "from_least": (lambda least: (least, math.inf), lambda limit: limit[0]),
    "lfm2_width": (_lfm2_width, lambda width, *_: width),
    "softcap": (_softcap, lambda scores: None if scores is None else scores.softcap),
    "part_of_head": (
        lambda turned, width, heads: turned * heads / width,
        lambda fraction, width, heads: round(fraction * width / heads),
    ),
    "over_root": (
        lambda depth, layers: depth / math.sqrt(layers),
        lambda scale, layers: round(scale * math.sqrt(layers), 12),
    ),
    "or_none": (lambda number: number or None, lambda number: number or 0),
    "several_or_none": (
        lambda number: number if number > 1 else None,
        lambda number: number or 1,
    ),
    "rope_or_none": (
        lambda kind: "rope" if kind == "rope" else "none",
        lambda positions: "rope" if positions == "rope" else None,
    ),
    "bounds": (_bounds, lambda limit: None if limit == _NO_BOUNDS else list(limit)),
    "head_or_auto": (
        lambda head, width, heads: 2 * width // (heads or 128) if head == "auto" else head,
        lambda head, *_: head,
    ),
    "rank_or_auto": (
        lambda rank, width: -(-width // 16) if rank == "auto" else rank,
        lambda rank, width: rank or -(-width // 16),
    ),
    "times": (
        lambda factor, width: factor * width,
        lambda channels, width: (channels or 2 * width) // width,
    ),
    "or_times": (
        lambda channels, factor, width: channels or int((factor or 2) * width),
        lambda channels, _, width: channels or 2 * width,
    ),
    "part_of": (lambda base, width: base / width, lambda scale, width: round(scale * width)),
    "root_if": (
        lambda scaled, width: math.sqrt(width) if scaled else 1.0,
        lambda scale, _: scale != 1.0,
    ),
    "theta_or_none": (
        lambda theta: {"rope_theta": float(theta)} if theta else {"positions": "none"},
        lambda layer: layer.rope_theta if layer.positions == "rope" else 0,
    ),
    "parallel_norms": (
        lambda parallel: "two_norms" if parallel else None,
        lambda parallel: parallel is not None,
    ),
}
"""How a value of `config.json` becomes ours, and how ours becomes theirs."""


def by_head(config: TransformerConfig) -> list[int]:
    """Rows that stand as query, key and value of the first head, then of the next."""
    width, heads = config.head_width, config.num_heads
    return [(h * 3 + kind) * width + i
            for kind in range(3) for h in range(heads) for i in range(width)]  # fmt: skip


def in_four_parts(config: TransformerConfig) -> list[int]:
    """Rows that stand as query, value and key of a quarter of the heads, then of the next."""
    part = config.num_heads * config.head_width // 4
    return [(quarter * 3 + kind) * part + i
            for kind in (0, 2, 1) for quarter in range(4) for i in range(part)]  # fmt: skip


def halves_swapped(config: TransformerConfig) -> list[int]:
    """Rows of queries and keys whose halves change places, which turns RoPE the other way."""
    width, heads = config.head_width, config.num_heads + config.kv_heads
    head = [*range(width // 2, width), *range(width // 2)]
    turned = [at * width + i for at in range(heads) for i in head]
    return turned + list(range(len(turned), len(turned) + config.kv_heads * width))


PARTS: dict[str, Callable[..., Any]] = {"scores": AttentionScores, "attention": GatedAttention}
"""Fields that hold a part: a table in `constants` has its arguments."""

LAYER_PARTS: dict[str, type[LayerPart]] = {
    "short_convolution": ShortConvolution,
    "delta_net": GatedDeltaNet,
    "mamba1": Mamba1,
    "mamba2": Mamba2,
}
"""Parts that a kind of layer has, by the names that `layer_parts` and `layers` give them."""


def by_key_head(config: TransformerConfig) -> list[int]:
    """Rows of a gated delta net that stand as query, key, values and gates of the first key head,
    then of the next; after all of these steps and decays, likewise.
    """
    net = config.attention_variant
    if not isinstance(net, GatedDeltaNet):
        return []
    each = net.value_heads // net.key_heads
    widths = {"q": net.key_width, "k": net.key_width, "v": each * net.value_width,
              "z": each * net.value_width, "b": each, "a": each}  # fmt: skip
    rows, start = list[int](), 0
    for kinds in ("qkvz", "ba"):
        stride = sum(widths[kind] for kind in kinds)
        for kind in kinds:
            before = sum(widths[other] for other in kinds[: kinds.index(kind)])
            rows += [start + head * stride + before + row
                     for head in range(net.key_heads) for row in range(widths[kind])]  # fmt: skip
        start += net.key_heads * stride
    return rows


ORDERS = {"by_head": by_head, "in_four_parts": in_four_parts, "halves_swapped": halves_swapped,
          "by_key_head": by_key_head}  # fmt: skip
"""Orders in which the rows of several of our weights stand in one of theirs."""


@cache
def known_types() -> Mapping[str, ModelType]:
    """The types by their names, read from `types.toml` once."""
    text = resources.files(__package__).joinpath("types.toml").read_text("utf-8")
    said = tomllib.loads(text)
    return {name: _type_of_table(name, own, said["fragments"])
            for name, own in said["types"].items()}  # fmt: skip


def _type_of_table(
    name: str, own: Mapping[str, Any], fragments: Mapping[str, Mapping[str, Any]]
) -> ModelType:
    merged: dict[str, Any] = {}
    for source in (*(fragments[used] for used in own.get("use", ())), own):
        for key, value in source.items():
            if isinstance(value, dict):
                before = merged.get(key, {})
                if key == "layer_parts":  # a fragment has sizes that several types give a part
                    value = {part: before.get(part, {}) | own for part, own in value.items()}
                value = {**before, **value}
            merged[key] = value
    merged.pop("use", None)
    made = {key: _value(value) for key, value in merged.items()}
    for key in ("fields", "experts", "mamba", "values"):
        if key in merged:
            made[key] = {ours: _field(said) for ours, said in merged[key].items()}
    for key in ("names", "memory"):
        made[key] = {each: new for old, new in merged.get(key, {}).items() for each in _each(old)}
    for key, value in made.get("constants", {}).items():
        if isinstance(value, dict):
            made["constants"][key] = PARTS[key](**value)
    made["layer_parts"] = {
        part: (LAYER_PARTS[part], {
            ours: _field_or_value(said) for ours, said in values.items()
        })
        for part, values in merged.get("layer_parts", {}).items()
    }  # fmt: skip
    made["fused"] = {module: ORDERS[order] for module, order in made.get("fused", {}).items()}
    return ModelType(name=name, **made)


def _value(said: Any) -> Any:
    """A value of TOML with None for "null", tuples for lists, and numbers as keys."""
    if isinstance(said, dict):
        return {int(k) if k.isdigit() else k: _value(v) for k, v in said.items()}
    if isinstance(said, list):
        return tuple(_value(each) for each in said)
    return None if said == "null" else said


def _field(said: Any) -> Field | None:
    if not isinstance(said, dict):
        return None if said == "null" else Field(said)
    default = _value(said["default"]) if "default" in said else REQUIRED
    read, write = CONVERSIONS.get(said.get("as", ""), (_same, _same))
    others = tuple(said.get("of", ()))
    return Field(said["name"], default, read, write, others, said.get("reads_null", False))


def _field_or_value(said: Any) -> Any:
    """A field of a part, or what all models of the type have: a number, a bool or `{ value }`."""
    if isinstance(said, dict) and "value" in said:
        return said["value"]
    return _field(said) if isinstance(said, str | dict) else said


def _each(name: str) -> list[str]:
    """The names that one with braces stands for."""
    braces = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    if braces is None:
        return [name]
    return [f"{braces[1]}{word}{braces[3]}" for word in braces[2].split(",")]


def type_of(name: Any, types: Sequence[ModelType] = ()) -> ModelType | None:
    """The type of this name, of those given and those known; None if there is none."""
    mine: Mapping[str, ModelType] = {each.name: each for each in types}
    return mine.get(name) or known_types().get(name)
