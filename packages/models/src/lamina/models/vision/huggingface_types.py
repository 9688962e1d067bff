"""Vision-language models of transformers: an encoder of images, a projector, a language model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lamina.models.base.config import TransformerConfig
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.base.weight_link import WeightLink, linked
from lamina.models.huggingface.config_fields import AS_IT_IS, ConfigFields, refuse_other_classes
from lamina.models.huggingface.configs import config_from_huggingface, huggingface_config
from lamina.models.huggingface.conversion import (
    exported_tensors,
    fill_from,
    refuse_unlinked,
    table_name,
)
from lamina.models.huggingface.model_types import Field, ModelType, read_table
from lamina.models.huggingface.sources import open_source
from lamina.models.huggingface.weight_maps import head_names, weight_map
from lamina.models.vision.language import VisionLanguageModel
from lamina.models.vision.transformer import VisionConfig

_ACTIVATIONS = {"quick_gelu": "gelu_sigmoid", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_OURS = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
_ENCODER = {
    "hidden_size": Field("hidden_size"),
    "num_layers": Field("num_hidden_layers"),
    "num_heads": Field("num_attention_heads"),
    "ffn_size": Field("intermediate_size"),
    "patch_size": Field("patch_size"),
    "channels": Field("num_channels", 3),
    "image_size": Field("image_size"),
    "norm_eps": Field("layer_norm_eps", 1e-6),
    "init_std": Field("initializer_range", 0.02),
    "activation": Field("hidden_act", "gelu_pytorch_tanh", _ACTIVATIONS.__getitem__,
                        _OURS.__getitem__),
}  # fmt: skip
"""Where the fields of a `VisionConfig` are in the `vision_config` of SigLIP and CLIP."""
_HARMLESS = ("model_type", "projection_dim", "initializer_factor", "num_image_tokens", "vocab_size")
_SIGLIP = "siglip_vision_model"
_CLIP = {"class_token": True, "embedding_norm": True, "patch_bias": False}


def _as_tuple(layers: int | Sequence[int]) -> tuple[int, ...]:
    return (layers,) if isinstance(layers, int) else tuple(layers)


def _as_written(layers: tuple[int, ...]) -> int | list[int]:
    return layers[0] if len(layers) == 1 else list(layers)


_FEATURES = Field("vision_feature_layer", -2, _as_tuple, _as_written)


@dataclass(frozen=True, kw_only=True)
class VisionLanguageType:
    """A vision-language type of transformers.

    Args:
        name: its `model_type`.
        architecture: its class with a language model's head.
        encoder: the `model_type` of its encoder.
        constants: fields of `VisionConfig` that all its models have.
        fields: fields of `VisionConfig` that are in its own `config.json`.
        image_token: the name of the id of the image token.
        names: of encoder, projector and language model, in memory.
        layers: of the projector's norm and layers.
        files: beginnings of names in memory, and those in files.
        scales_logits: whether the language model's `logit_scale` is used.
        refused: names of `config.json`, with the only value that is known here.
    """

    name: str
    architecture: str
    encoder: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Field] = field(default_factory=dict)
    image_token: str = "image_token_id"
    names: tuple[str, str, str]
    layers: tuple[str, str, str] = ("", "linear_1", "linear_2")
    files: Mapping[str, str] = field(default_factory=dict)
    scales_logits: bool = True
    refused: Mapping[str, Any] = field(default_factory=dict)


_OF_MODEL = {"model.": "", "model.language_model": "language_model.model",
             "lm_head": "language_model.lm_head"}  # fmt: skip
_LLAVA_NAMES = ("vision_tower", "multi_modal_projector", "language_model")
_IDEFICS: dict[str, Any] = {
    "constants": {"projector": "linear"},
    "fields": {"merge": Field("scale_factor", 2)},
    "names": ("vision_model", "connector", "text_model"),
    "layers": ("", "modality_projection.proj", ""),
}
_PATCHES_JOINED = {
    "merge": Field("downsample_factor", 2),
    "projector_width": Field("alignment_intermediate_size", 8192, lambda width: width // 2,
                             lambda width: 2 * width),
}  # fmt: skip
VISION_LANGUAGE_TYPES = {
    each.name: each
    for each in (
        VisionLanguageType(
            name="llava",
            architecture="LlavaForConditionalGeneration",
            encoder="clip_vision_model",
            constants=_CLIP,
            fields={
                "features": _FEATURES,
                "projector_bias": Field("multimodal_projector_bias", True),
            },
            image_token="image_token_index",
            names=_LLAVA_NAMES,
            files=_OF_MODEL,
            refused={"vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"},
        ),
        VisionLanguageType(
            name="vipllava",
            architecture="VipLlavaForConditionalGeneration",
            encoder="clip_vision_model",
            constants=_CLIP,
            fields={
                "features": _FEATURES,
                "projector_norm_eps": Field("projector_layernorm_eps", 1e-5),
            },
            image_token="image_token_index",
            names=_LLAVA_NAMES,
            layers=("projector_layernorm", "linear_1", "linear_2"),
            files=_OF_MODEL,
            refused={"projector_hidden_act": "gelu"},
        ),
        VisionLanguageType(name="idefics3", architecture="Idefics3ForConditionalGeneration",
                           encoder="idefics3_vision", **_IDEFICS),
        VisionLanguageType(name="smolvlm", architecture="SmolVLMForConditionalGeneration",
                           encoder="smolvlm_vision", **_IDEFICS),
        VisionLanguageType(
            name="deepseek_vl",
            architecture="DeepseekVLForConditionalGeneration",
            encoder=_SIGLIP,
            names=("vision_model", "aligner", "language_model"),
            layers=("", "linear1", "linear2"),
        ),
        VisionLanguageType(
            name="cohere2_vision",
            architecture="Cohere2VisionForConditionalGeneration",
            encoder=_SIGLIP,
            constants={"projector": "gated"},
            fields=_PATCHES_JOINED,
            names=_LLAVA_NAMES,
            scales_logits=False,
        ),
        VisionLanguageType(
            name="aya_vision",
            architecture="AyaVisionForConditionalGeneration",
            encoder=_SIGLIP,
            constants={"projector": "gated"},
            fields={
                **_PATCHES_JOINED,
                "features": _FEATURES._replace(default=-1),
                "projector_norm_eps": Field("adapter_layer_norm_eps", 1e-6),
            },
            image_token="image_token_index",
            names=_LLAVA_NAMES,
            layers=("layernorm", "linear_1", "linear_2"),
            files=_OF_MODEL,
            scales_logits=False,
            refused={"vision_feature_select_strategy": "full"},
        ),
    )
}  # fmt: skip
"""The types by their names."""


def vision_language_from_huggingface(
    source: str | Path | nn.Module,
    mesh: MeshLike = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    types: Sequence[ModelType] = (),
) -> VisionLanguageModel:
    """Build a vision-language model with the weights of a Hugging Face model.

    Arguments and errors are those of `from_huggingface`; `types` are of the language model.

    Examples:
        >>> model = vision_language_from_huggingface("HuggingFaceTB/SmolVLM")  # doctest: +SKIP
    """
    written, tensors = open_source(source)
    kind = _known(written.get("model_type"))
    vision, language, image_token = _read(kind, written, types)
    with torch.device("meta"):
        model = VisionLanguageModel(vision, language, mesh, image_token=image_token, seed=0)
    model.huggingface_type = kind.name
    links = _links(kind, vision, language, types)
    refuse_unlinked(model, links)
    decoder = model.language
    fill_from(model, links, tensors, dtype, device, decoder.axis, decoder.expert_axes)
    tied_to = table_name(links[0], tensors) if language.tie_embeddings else None
    heads = head_names(language, types)
    tensors.refuse_unread(tied_to, heads | {_in_files(kind, name) for name in heads})
    return model


def vision_language_to_huggingface(
    model: VisionLanguageModel,
    *,
    names: Literal["files", "memory"] = "files",
    types: Sequence[ModelType] = (),
) -> dict[str, Tensor]:
    """Return the weights with Hugging Face's names; see `to_huggingface`.

    Examples:
        >>> tensors = vision_language_to_huggingface(model)  # doctest: +SKIP
    """
    kind = _known(model.huggingface_type)
    links = _links(kind, model.vision.config, model.config, types)
    refuse_unlinked(model, links)
    decoder = model.language
    return exported_tensors(model, links, None, names, decoder.axis, decoder.expert_axes)


def vision_language_config(
    model: VisionLanguageModel, types: Sequence[ModelType] = ()
) -> dict[str, Any]:
    """Write the `config.json` of the Hugging Face model that has the model's weights.

    Raises:
        ValueError: if the type cannot express the encoder, the projector or the decoder.

    Examples:
        >>> written = vision_language_config(model)  # doctest: +SKIP
    """
    kind, vision, language = _known(model.huggingface_type), model.vision.config, model.config
    text = huggingface_config(language, types)
    encoder = {where.name: where.write(getattr(vision, n)) for n, where in _ENCODER.items()}
    written = {
        "model_type": kind.name,
        "architectures": [kind.architecture],
        "vision_config": {**encoder, "model_type": kind.encoder},
        "text_config": text,
        "tie_word_embeddings": language.tie_embeddings,
        kind.image_token: model.image_token,
        **{where.name: where.write(getattr(vision, n)) for n, where in kind.fields.items()},
        **kind.refused,
    }
    if kind.encoder == _SIGLIP:
        written["vision_config"]["vision_use_head"] = False
    read, *_ = _read(kind, written, types)
    unlike = ("max_grid", "dropout")
    if replace(read, **{name: getattr(vision, name) for name in unlike}) != vision:
        raise ValueError(f"{kind.name} of Hugging Face cannot say {vision}: it says {read}")
    return written


def _known(name: Any) -> VisionLanguageType:
    if name not in VISION_LANGUAGE_TYPES:
        raise ValueError(
            f"model_type is {name!r}: known vision-language types are "
            f"{', '.join(VISION_LANGUAGE_TYPES)}{AS_IT_IS}"
        )
    return VISION_LANGUAGE_TYPES[name]


def _read(
    kind: VisionLanguageType, written: Mapping[str, Any], types: Sequence[ModelType]
) -> tuple[VisionConfig, TransformerConfig, int]:
    """The configs of encoder and decoder, and the image token; all names are read or refused."""
    refuse_other_classes(kind.architecture.partition("For")[0], written)
    source, encoder = ConfigFields(written), ConfigFields(written.get("vision_config") or {})
    if encoder["model_type"] != kind.encoder:
        raise ValueError(
            f"the vision_config of {kind.name} is of type {encoder['model_type']!r}, and only "
            f"{kind.encoder!r} is known here{AS_IT_IS}"
        )
    for name, only in kind.refused.items():
        if source.get(name, only) != only:
            raise ValueError(f"config.json says {name}={source[name]!r}: only {only!r} is known")
    sizes = {**kind.constants, **read_table(_ENCODER, encoder), **read_table(kind.fields, source)}
    vision = VisionConfig(**sizes)
    # The encoder of SigLIP has a head that pools patches, unless its config says that it has none.
    head = encoder.get("vision_use_head", kind.encoder == _SIGLIP)
    if head or encoder.get("attention_dropout"):
        raise ValueError(
            f"the vision_config of {kind.name} has vision_use_head={head} and attention_dropout="
            f"{encoder.get('attention_dropout')}: only False and 0 are known here{AS_IT_IS}"
        )
    tied = source.get("tie_word_embeddings", False)
    text = {**source["text_config"], "tie_word_embeddings": tied}
    language = config_from_huggingface(text, types=types)
    if not kind.scales_logits:
        language = replace(language, logit_scale=1.0)
    image_token = source[kind.image_token]
    encoder.refuse_unread({}, _HARMLESS)
    source.refuse_unread({}, ("model_type", "vision_config", "image_seq_length", "_pad_token_id"))
    return vision, language, image_token


def _links(
    kind: VisionLanguageType,
    vision: VisionConfig,
    language: TransformerConfig,
    types: Sequence[ModelType],
) -> tuple[WeightLink, ...]:
    """Link all parameters; the embeddings of the language model are first."""
    encoder, projector, decoder = (f"model.{name}" for name in kind.names)
    made = [
        replace(link, ours=f"language.{link.ours}",
                theirs=tuple(_prefixed(name, decoder) for name in link.theirs),
                in_memory=_prefixed_all(link.in_memory, decoder))
        for link in weight_map(language, types)
    ]  # fmt: skip
    made += [*_encoder_links(vision, encoder), *_projector_links(kind, vision, projector)]
    return tuple(_with_files(kind, link) for link in made)


def _prefixed(name: str, decoder: str) -> str:
    return re.sub(r"^model(?=\.)", decoder, name)


def _prefixed_all(names: str | tuple[str, ...] | None, decoder: str) -> Any:
    if names is None or isinstance(names, str):
        return names and _prefixed(names, decoder)
    return tuple(_prefixed(name, decoder) for name in names)


def _in_files(kind: VisionLanguageType, name: str) -> str:
    beginnings = sorted((old for old in kind.files if name.startswith(old)), key=len)
    return kind.files[beginnings[-1]] + name[len(beginnings[-1]) :] if beginnings else name


def _with_files(kind: VisionLanguageType, link: WeightLink) -> WeightLink:
    if not kind.files:
        return link
    memory = link.theirs if link.in_memory is None else link.in_memory
    theirs = tuple(_in_files(kind, name) for name in link.theirs)
    return replace(link, theirs=theirs, in_memory=memory)


def _encoder_links(vision: VisionConfig, theirs: str) -> Iterator[WeightLink]:
    kernel = (vision.channels, vision.patch_size, vision.patch_size)
    patches = f"{theirs}.embeddings.patch_embedding"
    yield WeightLink("vision.patch.weight", (f"{patches}.weight",), kernel=kernel)
    if vision.patch_bias:
        yield WeightLink("vision.patch.bias", (f"{patches}.bias",))
    yield from linked("vision.position_embedding", f"{theirs}.embeddings.position_embedding")
    if vision.class_token:
        name = f"{theirs}.embeddings.class_embedding"
        yield WeightLink("vision.class_embedding.weight", (name,), stack=1)
    if vision.embedding_norm:
        yield from linked("vision.embedding_norm", f"{theirs}.pre_layrnorm", bias=True)
    width = vision.hidden_size
    for at in range(vision.num_layers):
        ours, layer = f"vision.blocks.{at}", f"{theirs}.encoder.layers.{at}"
        yield from linked(f"{ours}.attention_norm", f"{layer}.layer_norm1", bias=True)
        heads = [f"{layer}.self_attn.{part}_proj" for part in "qkv"]
        yield from linked(f"{ours}.attention.qkv", *heads, bias=True, rows=(width,) * 3)
        yield from linked(f"{ours}.attention.output", f"{layer}.self_attn.out_proj", bias=True)
        yield from linked(f"{ours}.mlp_norm", f"{layer}.layer_norm2", bias=True)
        yield from linked(f"{ours}.mlp.up", f"{layer}.mlp.fc1", bias=True)
        yield from linked(f"{ours}.mlp.down", f"{layer}.mlp.fc2", bias=True)
    yield from linked("vision.norm", f"{theirs}.post_layernorm", bias=True)


def _projector_links(
    kind: VisionLanguageType, vision: VisionConfig, theirs: str
) -> Iterator[WeightLink]:
    norm, first, second = (f"{theirs}.{name}" for name in kind.layers)
    if vision.projector_norm_eps is not None:
        yield from linked("projector.norm", norm, bias=True)
    if vision.projector == "linear":
        yield from linked("projector.linear", first)
        return
    order, inner = None, vision.projector_width
    if vision.projector == "gated" and inner is not None:
        order = (*range(inner, 2 * inner), *range(inner))  # their gate is the second half
    yield from linked("projector.up", first, bias=vision.projector_bias, order=order)
    yield from linked("projector.down", second, bias=vision.projector_bias)
