"""A type of transformers, described by how its config and its tensors differ from Llama's.

Note [Types are read and written by one table]: a `Field` says which name of `config.json` has a
field of `TransformerConfig`, and is used in both directions. So what is read can be written, and
`huggingface_config` refuses a config that does not come back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple, cast

from lamina.models.attention.latent_attention import LatentAttention
from lamina.models.attention.sparse_attention import INDEX_NAMES, SparseLatentAttention
from lamina.models.base.config import AttentionVariant, LayerPart, LayerSpec, TransformerConfig
from lamina.models.base.configs.mamba import MambaConfig
from lamina.models.base.configs.moe import MoEConfig
from lamina.models.base.weight_link import WeightLink
from lamina.models.huggingface.rope import read_rope, rope_of, written_rope

REQUIRED: Any = object()


def _same(value: Any) -> Any:
    return value


class Field(NamedTuple):
    """A name of `config.json`, what it is where it is absent, and how it becomes ours and back.

    Both functions are given the values of the names in `of` too. A null is None, unless the field
    `reads_null`.
    """

    name: str
    default: Any = REQUIRED
    read: Callable[..., Any] = _same
    write: Callable[..., Any] = _same
    of: tuple[str, ...] = ()
    reads_null: bool = False


LLAMA: dict[str, Field] = {
    "vocab_size": Field("vocab_size"),
    "hidden_size": Field("hidden_size"),
    "num_layers": Field("num_hidden_layers"),
    "num_heads": Field("num_attention_heads"),
    "num_kv_heads": Field("num_key_value_heads", None),
    "head_dim": Field("head_dim", None),
    "ffn_size": Field("intermediate_size"),
    "max_sequence_length": Field("max_position_embeddings"),
    "norm_eps": Field("rms_norm_eps", 1e-6),
    "attention_bias": Field("attention_bias", False, bool),
    "mlp_bias": Field("mlp_bias", False, bool),
    "tie_embeddings": Field("tie_word_embeddings", False),
    "attention_dropout": Field("attention_dropout", 0.0),
    "activation": Field("hidden_act"),
    "init_std": Field("initializer_range", 0.02),
}
"""Where the fields of a config are in the `config.json` of a model like Llama."""

EXPERTS: dict[str, Field] = {
    "num_experts": Field("n_routed_experts"),
    "top_k": Field("num_experts_per_tok"),
    "ffn_size": Field("moe_intermediate_size"),
    "shared_ffn_size": Field("n_shared_experts", 0),
    "normalize_weights": Field("norm_topk_prob", True),
    "weight_scale": Field("routed_scaling_factor", 1.0),
    "num_groups": Field("n_group", 1),
    "groups_kept": Field("topk_group", 1),
    "first_dense": Field("first_k_dense_replace", 0),
}
"""The same of the experts of a model like DeepSeek's. Shared experts are counted there."""

_UNGATED = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2", "silu": "silu", "swish": "silu",
}  # fmt: skip
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"} | dict.fromkeys(
    ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "geglu_tanh"
)
_UNTURNED = {"rope_theta": 10_000.0, "rope_scaling": None, "rotary_fraction": 1.0}
"""What RoPE would read, as a layer without positions has it."""
TRAINING = {
    *("attention_dropout", "dropout", "embedding_dropout", "init_std", "residual_additions"),
    *("vocab_multiple", "sequence_parallel", "tp_reduction", "context_parallel", "loss_chunk"),
    *("precision", "attention_path"),
}
"""Fields that change nothing in a forward of one process in evaluation."""


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A type of transformers. Give your own as `from_huggingface(path, types=[...])`.

    Args:
        name: its `model_type`.
        architecture: its class with a language model's head.
        constants: fields of `TransformerConfig` that all its models have.
        fields: fields that have other names in `config.json` than in Llama's. None is in
            `constants`, or is what `TransformerConfig` has by default.
        names: names of its modules in place of Llama's. Several names of Llama that become one are
            rows of one tensor.
        memory: further names, of a model in memory.
        stacked_experts: whether its files have the experts of a layer in one tensor; "interleaved"
            if these multiply from the right, and rows of gate and up projection take turns.
        expert_names: those of an expert's gate, up and down projection, if not Llama's.
        interleaved: its RoPE turns neighbouring elements of a head.
        fused: for some of our modules, the order in which its rows stand in their tensor, from the
            config; ours are all queries, all keys, all values.
        gated: whether its MLP has a gate.
        rope: whether `rope_parameters` are read.
        scaled_queries: whether these say how queries grow with their position.
        latent: whether its attention is latent; "halves" if its RoPE turns elements half a head
            apart, whatever its config says.
        indexer: which elements RoPE turns in an indexer that chooses the keys of latent attention:
            those half a head apart, or neighbours; None has no indexer.
        experts: where the fields of a `MoEConfig` are; None has none.
        expert_constants: fields of a `MoEConfig` that all its models have.
        mamba: where the fields of a `MambaConfig` are; None has none.
        layer_parts: parts that some layers have, by names of the type's own: their class, and where
            the fields of its objects are; a value that is no `Field` is that of all models.
        layers: names of lists with an entry for each layer, and what layers of each entry have in
            place of the model's fields; `letter` is their kind. A name of `layer_parts` stands for
            the part.
        periods: for a name of `layers` that no file has: the names of a period and an offset, and
            the kinds of layers at the offset in each period and elsewhere.
        values: names of lists with a value for each layer. Their fields read a value into what the
            layer has in place of the model's fields, and write it from the layer's config.
        equal: names that say again what another name says.
        nested_rope: whether `rope_parameters` are given for each of its `layer_types`.
        ignored: names of `config.json` that change nothing in a model of this type.
        refused: names, with the only value that is known here.
        written: names, with the value that is written; of what is read, fields ask for them.
    """

    name: str
    architecture: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Field | None] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, str] = field(default_factory=dict)
    stacked_experts: bool | Literal["interleaved"] = False
    expert_names: tuple[str, str, str] | None = None
    interleaved: bool = False
    fused: Mapping[str, Callable[[TransformerConfig], Sequence[int]]] = field(default_factory=dict)
    gated: bool = True
    rope: bool = True
    scaled_queries: bool = False
    latent: bool | Literal["halves"] = False
    indexer: Literal["halves", "neighbours"] | None = None
    experts: Mapping[str, Field | None] | None = None
    expert_constants: Mapping[str, Any] = field(default_factory=dict)
    mamba: Mapping[str, Field] | None = None
    layer_parts: Mapping[str, tuple[type[LayerPart], Mapping[str, Any]]] = field(
        default_factory=dict
    )
    layers: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    periods: Mapping[str, tuple[str, str, str, str]] = field(default_factory=dict)
    values: Mapping[str, Field] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    nested_rope: bool = False
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ours = {"of TransformerConfig": (TransformerConfig, (self.constants, self.fields)),
                "of MoEConfig": (MoEConfig, (self.experts or {}, self.expert_constants)),
                "of MambaConfig": (MambaConfig, (self.mamba or {},))}  # fmt: skip
        for whose, (config, tables) in ours.items():
            known = {each.name for each in fields(config)}
            if wrong := sorted({*chain(*tables)} - known):
                raise ValueError(f"{self.name}: {wrong[0]} is no field {whose}, and a table has it")

    @property
    def table(self) -> dict[str, Field]:
        """Where each field is in `config.json`."""
        merged = {**LLAMA, **self.fields}
        return {name: where for name, where in merged.items() if where is not None}

    @property
    def expert_table(self) -> dict[str, Field]:
        """Where each field of the experts is."""
        merged = {**EXPERTS, **(self.experts or {})}
        return {name: where for name, where in merged.items() if where is not None}

    @property
    def names_read(self) -> set[str]:
        """All names of `config.json` that a model of the type is read from."""
        tables = (self.table, self.expert_table if self.experts is not None else {}, self.mamba)
        names = {where.name for table in tables for where in (table or {}).values()}
        names |= {where.name for _, where in self._part_fields()}
        names |= {"rope_parameters", "model_type", "rope_theta", "rope_scaling"}
        latent = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"}
        latent |= {"v_head_dim", "rope_interleave"}
        names |= latent if self.latent else set()
        names |= {*INDEX_NAMES.values()} if self.indexer else set()
        names |= {*self.values, *self.equal, *self.written}
        names |= {name for period in self.periods.values() for name in period[:2]}
        return names | {*self.layers, *self.ignored, *self.refused, "layer_types"}

    # ------------------------------------------------------------------ config.json to config

    def read(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of `TransformerConfig`."""
        read = {**self.constants, **read_table(self.table, source)}
        if "activation" in self.table:
            known = _GATED if self.gated else _UNGATED
            if read["activation"] not in known:
                name = self.table["activation"].name
                raise ValueError(f"{name} is {read['activation']!r}: known are {', '.join(known)}")
            read["activation"] = known[read["activation"]]
        for name, only in self.refused.items():
            if source.get(name, only) != only:
                raise ValueError(
                    f"config.json says {name}={source[name]!r}, and only {only!r} is known here: "
                    "the model would compute something else"
                )
        for name, other in self.equal.items():
            if source.get(name, source[other]) != source[other]:
                raise ValueError(
                    f"config.json says {name}={source[name]!r} and {other}={source[other]!r}: only "
                    "models where they are equal are known here"
                )
        if self.rope and not self.nested_rope:
            read |= read_rope(source, scaled_queries=self.scaled_queries)
        if read.get("positions") == "none":
            read |= _UNTURNED
        if self.latent:
            read |= self._read_latent(source)
            read |= {"num_kv_heads": None, "head_dim": None, "rotary_fraction": 1.0}
        if self.experts is not None:
            read["moe"] = self._read_experts(source, read)
        sizes = None if self.mamba is None else read_table(self.mamba, source)
        read |= self._read_layers(source, read)
        letters = {spec.letter for spec in read.get("layers") or ()}
        letters |= set(read.get("layer_pattern") or "")
        if letters and letters <= set("M*-E") and "E" not in letters:
            read.pop("moe", None)
        kinds = [read, *(dict(spec.changes) for spec in read.get("layers") or ())]
        variants = [kind["attention"] for kind in kinds if kind.get("attention") is not None]
        if "M" in letters or any(variant.reads_mamba for variant in variants):
            read["mamba"] = None if sizes is None else MambaConfig(**sizes)
        return {**read, "huggingface_type": self.name}

    def _read_latent(self, source: Mapping[str, Any]) -> dict[str, Any]:
        kind = LatentAttention if self.indexer is None else SparseLatentAttention
        read = kind.read_huggingface(source)
        if self.latent == "halves":
            read["mla"] = replace(read["mla"], interleaved=False)
        if self.indexer == "neighbours":
            read["mla"] = replace(read["mla"], index_interleaved=True)
        return read

    def _read_experts(self, source: Mapping[str, Any], read: dict[str, Any]) -> MoEConfig | None:
        sizes = {**self.expert_constants, **read_table(self.expert_table, source)}
        sizes.setdefault("scores", "softmax")
        if "ffn_size" not in sizes:
            sizes["ffn_size"] = read["ffn_size"]
        if sizes["num_experts"] is None:  # what is left is the shared expert, which is the MLP
            read["ffn_size"] = sizes.get("shared_ffn_size") or read["ffn_size"]
            return None
        if self._counts_shared:
            sizes["shared_ffn_size"] = (sizes["shared_ffn_size"] or 0) * sizes["ffn_size"]
        sizes["shared_ffn_size"] = sizes.get("shared_ffn_size") or None
        for name in ("num_groups", "groups_kept"):
            sizes[name] = sizes.get(name) or 1
        if sizes["num_groups"] == 1:
            sizes.pop("group_best", None)
        if sizes.get("first_dense", 0) >= read["num_layers"]:
            return None
        return MoEConfig(**sizes)

    @property
    def _counts_shared(self) -> bool:
        where = self.expert_table.get("shared_ffn_size")
        return where is not None and "size" not in where.name

    def _read_layers(self, source: Mapping[str, Any], read: dict[str, Any]) -> dict[str, Any]:
        """Specifications of layers, if they differ, or else fields that all of them have."""
        number = read["num_layers"]
        by_name = {name: self._read_part(name, source) for name in self.layer_parts}
        changes: list[dict[str, Any]] = [{} for _ in range(number)]
        for name, kinds in self.layers.items():
            said = self._kinds_said(name, source, number)
            if len(said) != number or set(said) - set(kinds):
                raise ValueError(
                    f"{name} is {said}: it must have one of {', '.join(map(str, kinds))} for each "
                    f"of {number} layers"
                )
            nested = self.nested_rope and name == "layer_types"
            for own, kind in zip(changes, said, strict=True):
                own |= {ours: by_name.get(value, value) for ours, value in kinds[kind].items()}
                if nested and own.get("positions") != "none":
                    own |= self._rope_of_kind(source, kind)
        for name, where in self.values.items():
            for own, value in zip(changes, _list_of(source, name, number), strict=True):
                own |= where.read(value)
        for own in changes:
            if own.get("positions") == "none":
                own |= _UNTURNED
        return specified(changes)

    def _kinds_said(self, name: str, source: Mapping[str, Any], number: int) -> Sequence[Any]:
        """The kind of each layer: by a list in the file, by a period, or the only kind."""
        if name in self.periods:
            period, offset, inside, outside = self.periods[name]
            every, first = source[period], source[offset]
            return [inside if at % every == first else outside for at in range(number)]
        if len(self.layers[name]) == 1:
            return source.get(name) or [*self.layers[name]] * number
        return cast(Sequence[Any], source[name])

    def _write_kinds(self, name: str, kinds: Sequence[Any]) -> dict[str, Any]:
        """The reverse of `_kinds_said`; ValueError if no period gives these kinds."""
        if name not in self.periods:
            return {} if len(self.layers[name]) == 1 else {name: kinds}
        period, offset, inside, outside = self.periods[name]
        number = len(kinds)
        for every, first in ((p, at) for p in range(1, number + 2) for at in range(p)):
            if [inside if at % every == first else outside for at in range(number)] == kinds:
                return {period: every, offset: first}
        raise ValueError(
            f"{self.name} of Hugging Face says which layers are of kind {inside!r} by {period} and "
            f"{offset}, and no two numbers give {kinds}: change the layers"
        )

    def _part_fields(self) -> Iterator[tuple[str, Field]]:
        """The fields of all parts, by their names there."""
        for _, values in self.layer_parts.values():
            yield from ((n, where) for n, where in values.items() if isinstance(where, Field))

    def _read_part(self, name: str, source: Mapping[str, Any]) -> LayerPart:
        kind, values = self.layer_parts[name]
        table = {ours: where for ours, where in values.items() if isinstance(where, Field)}
        return kind(**{**values, **read_table(table, source)})

    def _part_in(self, config: TransformerConfig, name: str) -> LayerPart | None:
        """The part of this name in a config, from the first layer that has it."""
        kind = self.layer_parts[name][0]
        variants = (layer.attention_variant for layer in config.distinct_layers)
        return next((each for each in variants if isinstance(each, kind)), None)

    def rope_of(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """The `rope_parameters` of a model whose attention is latent."""
        return rope_of(source, partial=True, scaled_queries=self.scaled_queries)

    def _rope_of_kind(self, source: Mapping[str, Any], kind: str) -> dict[str, Any]:
        rope = source["rope_parameters"]
        return read_rope(source, rope.get(kind, rope), scaled_queries=self.scaled_queries)

    # ------------------------------------------------------------------ config to config.json

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Fields of `config.json`. What single types have comes after, and over, what all have."""
        written = self._write_table(config)
        written |= {name: written[other] for name, other in self.equal.items()}
        written |= {**self.refused, **self.written}
        if self.rope and not self.nested_rope:
            written["rope_parameters"] = self._written_rope(config)
        if self.latent and config.attention_variant is not None:
            written |= self._write_latent(config, config.attention_variant)
        if self.experts is not None:
            written |= self._write_experts(config)
        if self.mamba is not None and config.mamba is None:
            # No layer has these heads. But transformers checks that they divide the inner width.
            written[self.mamba["num_heads"].name] = 1
        elif self.mamba is not None and config.mamba is not None:
            sizes = config.mamba
            said = {w.name: w.write(getattr(sizes, ours)) for ours, w in self.mamba.items()}
            written |= {w: value for w, value in said.items() if value is not None}
        return written | self._write_layers(config, written)

    def _written_rope(self, config: TransformerConfig) -> dict[str, Any]:
        return written_rope(config, scaled_queries=self.scaled_queries)

    def _write_table(self, config: TransformerConfig) -> dict[str, Any]:
        """What the table says of fields of the config."""
        values = {each.name: getattr(config, each.name) for each in fields(TransformerConfig)} | {
            "num_kv_heads": config.kv_heads,
            "ffn_size": config.ffn_width,
            "attention_output_bias": config.output_bias,
        }
        if not self.latent:
            values["head_dim"] = config.head_width
        activations = _GATED if self.gated else _UNGATED
        theirs = {ours: name for name, ours in activations.items() if name != "gelu_fast"}
        theirs |= {"swiglu": "silu", "silu": "silu"}
        values["activation"] = theirs.get(str(config.activation), "")
        written: dict[str, Any] = {}
        # What depends on other names is written after them.
        for ours, where in sorted(self.table.items(), key=lambda item: bool(item[1].of)):
            if not (self.latent and ours in ("num_kv_heads", "head_dim")):
                others = [written.get(name) for name in where.of]
                written[where.name] = where.write(values[ours], *others)
        return written

    def _write_latent(self, config: TransformerConfig, variant: AttentionVariant) -> dict[str, Any]:
        """Sizes of latent attention, without names that DeepSeek's config has and others lack."""
        left = {"head_dim", "first_k_dense_replace", "num_nextn_predict_layers"}
        if self.latent == "halves" or self.indexer is not None:
            left.add("rope_interleave")
        sizes = variant.huggingface_fields(config)
        kept = {name: value for name, value in sizes.items() if name not in left}
        return {**kept, "num_key_value_heads": config.num_heads}

    def _write_layers(self, config: TransformerConfig, before: Mapping[str, Any]) -> dict[str, Any]:
        """Names that have a value for each layer, and those of parts that some layers have.

        `before` is what has been written, which fields of parts may need.
        """
        layers = range(config.num_layers)
        written: dict[str, Any] = {}
        for name, where in self.values.items():
            written[name] = [where.write(config.of_layer(at)) for at in layers]
        made = {name: self._part_in(config, name) for name in self.layer_parts}
        for name, part in made.items():
            if part is not None:
                written |= {
                    where.name: where.write(getattr(part, ours), *(before[n] for n in where.of))
                    for ours, where in self.layer_parts[name][1].items()
                    if isinstance(where, Field)
                }
        for name, said in self.layers.items():
            # A kind may say which part it has by the part's name. No layer is of a kind whose part
            # the config has not got.
            absent = {part for part, value in made.items() if value is None}
            kinds = {
                kind: {ours: made.get(value, value) for ours, value in own.items()}
                for kind, own in said.items()
                if not absent.intersection(own.values())
            }
            of_layers = [_kind_of(kinds, config, at) for at in layers]
            written |= self._write_kinds(name, of_layers)
            if self.nested_rope and name == "layer_types":
                # A kind that no layer has is written as the first layer's.
                ropes = {kind: self._written_rope(config.of_layer(0)) for kind in kinds}
                own = {k: self._written_rope(config.of_layer(n)) for n, k in enumerate(of_layers)}
                written["rope_parameters"] = ropes | own
        return written

    def _write_experts(self, config: TransformerConfig) -> dict[str, Any]:
        moe = config.moe
        if moe is None:
            number = self.expert_table["num_experts"]
            if number.write(None) is None:
                # No layer has these experts. But a file of the type says how many there are.
                sizes = {w.name: 1 for w in self.expert_table.values() if w.default is REQUIRED}
                first = self.expert_table.get("first_dense")
                return sizes | ({} if first is None else {first.name: config.num_layers})
            where = self.expert_table.get("shared_ffn_size")
            width = {} if where is None else {where.name: config.ffn_width}
            return {number.name: number.write(None), **width}
        values = {each.name: getattr(moe, each.name) for each in fields(moe)}
        values["ffn_size"] = moe.ffn_size or config.ffn_width
        shared = moe.shared_ffn_size or 0
        values["shared_ffn_size"] = shared // values["ffn_size"] if self._counts_shared else shared
        return {w.name: w.write(values[ours]) for ours, w in self.expert_table.items()}

    def check(self, config: TransformerConfig, back: TransformerConfig) -> None:
        """Raise ValueError if a config that was written and read again computes something else."""
        layers = range(config.num_layers if config.layers else 0)
        pairs = [(config, back), *((config.of_layer(at), back.of_layer(at)) for at in layers)]
        names = [each.name for each in fields(TransformerConfig) if each.name not in TRAINING]
        for name in names:
            for first, second in pairs:
                given, read = _comparable(name, first), _comparable(name, second)
                if given != read:
                    raise ValueError(
                        f"{self.name} of Hugging Face cannot say {name}={given!r} (it says "
                        f"{read!r}): leave huggingface_type None, or change the field"
                    )

    # ------------------------------------------------------------------ tensors

    def links(self, config: TransformerConfig, llama: Iterator[WeightLink]) -> Iterator[WeightLink]:
        """Rename what is linked to the tensors of a model like Llama, and order its rows."""
        for link in llama:
            if self.stacked_experts and link.stack is not None and link.in_memory is not None:
                link = self._stacked(link, str(link.in_memory))
            theirs = [self.renamed(name) for name in link.theirs]
            if self.expert_names is not None and link.stack is not None:
                llama_names = ("gate_proj", "up_proj", "down_proj")
                for old, new in zip(llama_names, self.expert_names, strict=True):
                    theirs = [name.replace(f".{old}.", f".{new}.") for name in theirs]
            rows, grouped = link.rows, [name for name, _ in groupby(theirs)]
            if rows is not None and len(grouped) < len(theirs):
                total = groupby(zip(theirs, rows, strict=True), key=lambda pair: pair[0])
                rows = tuple(sum(number for _, number in pairs) for _, pairs in total)
            memory: str | tuple[str, ...] | None = None
            if isinstance(link.in_memory, str):
                memory = self.renamed(link.in_memory, self.memory)
            elif self.memory:
                memory = tuple(self.renamed(name, self.memory) for name in link.theirs)
                memory = None if memory == tuple(theirs) or len(grouped) < len(theirs) else memory
                if memory is not None and len(memory) > 1 and len({*memory}) == 1:
                    memory = memory[0]  # one tensor has the rows of several in files
            link = replace(
                link, theirs=tuple(grouped), in_memory=memory,
                rows=None if len(grouped) == 1 and link.stack is None else rows,
            )  # fmt: skip
            yield self._ordered(config, link)

    def _stacked(self, link: WeightLink, name: str) -> WeightLink:
        """The link of a layer's experts to one tensor of this name."""
        if self.stacked_experts != "interleaved":
            return replace(link, theirs=(name,), rows=None, stack=None)
        order = None
        if ".experts.up" in link.ours and link.rows is not None:
            both = 2 * link.rows[0]
            order = (*range(0, both, 2), *range(1, both, 2))
        is_matrix = not link.ours.endswith("_bias")
        return replace(
            link, theirs=(name,), rows=None, stacked=True, transposed=is_matrix, order=order,
            in_memory=None,
        )  # fmt: skip

    def renamed(self, name: str, more: Mapping[str, str] | None = None) -> str:
        """The type's name of a tensor, from that in a model like Llama; `more` names go first."""
        names = {**self.names, **(more or {})}
        layer = re.fullmatch(r"(model\.layers)\.(\d+)\.(.+)", name)
        if layer is None:
            return _looked_up(names, name)
        return f"{_looked_up(names, layer[1])}.{layer[2]}.{_looked_up(names, layer[3])}"

    def _ordered(self, config: TransformerConfig, link: WeightLink) -> WeightLink:
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", link.ours)
        if match is None:
            return link
        layer, order = config.of_layer(int(match[1])), link.order
        if self.interleaved and (own := _interleaved_rows(layer, match[2])) is not None:
            order = tuple(own)
        if (fused := self.fused.get(match[2])) is not None:
            rows = fused(layer)
            order = tuple(rows if order is None else (rows[i] for i in order))
        return replace(link, order=order)


def _kind_of(kinds: Mapping[Any, Mapping[str, Any]], config: TransformerConfig, number: int) -> Any:
    """The most special of some kinds of layers that has all that a layer has."""
    layer = config.of_layer(number)
    has = {**{each.name: getattr(layer, each.name) for each in fields(TransformerConfig)},
           "letter": config.pattern[number]}  # fmt: skip
    fits = [k for k, own in kinds.items() if all(has[n] == value for n, value in own.items())]
    return max(fits, key=lambda kind: len(kinds[kind]), default=None)


def _looked_up(names: Mapping[str, str], name: str) -> str:
    """The name with its longest beginning that `names` has replaced."""
    words, end = name.split("."), list[str]()
    while words:
        if (known := names.get(".".join(words))) is not None:
            return ".".join((known, *end))
        end.insert(0, words.pop())
    return name


def specified(changes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of a model whose layers have these changes: `layers`, unless all are alike."""
    if all(own == changes[0] for own in changes):
        alike = dict(changes[0])
        letter = alike.pop("letter", "T")
        return alike if letter == "T" else {**alike, "layer_pattern": letter * len(changes)}
    return {"layers": tuple(LayerSpec(**own) for own in changes)}


def _comparable(name: str, config: TransformerConfig) -> Any:
    """A field's value, where several spellings mean the same."""
    spelt = {
        "num_kv_heads": config.kv_heads, "head_dim": config.head_widths,
        "ffn_size": config.ffn_width, "attention_output_bias": config.output_bias,
        "attention_scale": round(config.score_scale, 9), "attention": config.attention_variant,
        "mla": None, "moe": None, "layers": None, "layer_pattern": config.pattern,
    }  # fmt: skip
    if name == "moe" and (moe := config.moe) is not None:
        names = ("switch_loss", "sequence_loss", "global_loss", "z_loss")
        losses: dict[str, Any] = dict.fromkeys(names, 0.0)
        how: dict[str, Any] = {"dispatcher": "all_to_all", "experts": "auto", "jitter": 0.0}
        rate = None if moe.bias_rate is None else 0.0
        return replace(moe, ffn_size=moe.ffn_size or config.ffn_width, bias_rate=rate,
                       **losses, **how)  # fmt: skip
    scaling = config.rope_scaling
    if name == "rope_scaling" and scaling is not None and scaling.kind == "yarn":
        return replace(scaling, attention_factor=round(scaling.magnitude, 9))
    value = spelt.get(name, getattr(config, name))
    return round(value, 9) if isinstance(value, float) else value


def read_table(table: Mapping[str, Field], source: Mapping[str, Any]) -> dict[str, Any]:
    """What each field of ours is by `config.json`; ValueError for a required name that it lacks."""
    read = {}
    for ours, where in table.items():
        absent = where.default is REQUIRED
        value = source[where.name] if absent else source.get(where.name, where.default)
        others = [source.get(name) for name in where.of]
        null = value is None and not where.reads_null
        read[ours] = None if null else where.read(value, *others)
    return read


def _list_of(source: Mapping[str, Any], name: str, number: int) -> Sequence[Any]:
    said: Sequence[Any] = source[name]
    if len(said) != number:
        raise ValueError(f"{name} is {said}: it must have a value for each of {number} layers")
    return said


def _interleaved_rows(config: TransformerConfig, module: str) -> list[int] | None:
    """For each of our rows, which turn elements half a head apart, that of theirs."""
    turned, width = config.rotary_width, config.head_width
    head = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
    if config.positions != "rope":
        head = list(range(width))
    heads = {"query_norm": 1, "key_norm": 1, "qkv": config.num_heads + config.kv_heads}
    name = module.rpartition(".")[2]
    if name not in heads:
        return None
    number = heads[name]
    if config.qk_norm == "whole" and name != "qkv":
        number = config.num_heads if name == "query_norm" else config.kv_heads
    rows = [at * width + i for at in range(number) for i in head]
    values = config.kv_heads * width if name == "qkv" else 0
    return rows + list(range(len(rows), len(rows) + values))
