"""Reading and writing Hugging Face weights, without `transformers`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lamina.collectives.engine import start_all_gather
from lamina.mesh import role_of
from lamina.mesh.engine import MeshAxis
from lamina.models.base.config import AttentionVariant, TransformerConfig
from lamina.models.base.configs.multi_token import MultiTokenPrediction
from lamina.models.base.mesh_axes import MeshLike, cut_weight, join_weight
from lamina.models.decoder.gpt import GPTModel, require_gpt
from lamina.models.huggingface.config_fields import AS_IT_IS, shortened
from lamina.models.huggingface.configs import config_from_huggingface
from lamina.models.huggingface.model_types import ModelType
from lamina.models.huggingface.sources import SourceTensors, open_source
from lamina.models.huggingface.weight_maps import (
    WeightLink,
    further_layer,
    head_names,
    weight_map,
)
from lamina.models.moe.expert_axes import ExpertAxes


def to_huggingface(
    model: GPTModel,
    state: Mapping[str, Tensor] | None = None,
    *,
    names: Literal["files", "memory"] = "files",
    types: Sequence[ModelType] = (),
) -> dict[str, Tensor]:
    """Return a model's weights with the names and shapes of Hugging Face's.

    Args:
        model: if it is cut over tensor- or expert-parallel ranks, every rank must call this,
            because the pieces are gathered, one parameter at a time.
        state: this rank's parameters by name, instead of the model's own. Buffers may be missing.
        names: those of Hugging Face's `files`, or those of a `transformers` model (from version 5)
            in `memory`, for its `load_state_dict`. They differ for experts only.
        types: types of your own, which are found by `config.huggingface_type`.

    Returns:
        Tensors by Hugging Face's names, on the model's device, without a tied head. Together with
        `huggingface_config(model.config)` they are a checkpoint.

    Raises:
        TypeError: for another model than a `GPTModel`.
        ValueError: if no architecture known here has the config's features, or if the model has
            parameters without a name there.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> tensors = to_huggingface(GPTModel(config))
    """
    model = require_gpt(model, "to_huggingface()")
    links = weight_map(model.config, types)
    refuse_unlinked(model, links)
    return exported_tensors(model, links, state, names, model.axis, model.expert_axes)


def exported_tensors(
    model: nn.Module,
    links: Sequence[WeightLink],
    state: Mapping[str, Tensor] | None,
    names: Literal["files", "memory"],
    axis: MeshAxis | None,
    experts: ExpertAxes,
) -> dict[str, Tensor]:
    """Their tensors of what is linked; see `to_huggingface`."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = {**parameters, **buffers} if state is None else state
    exported: dict[str, Tensor] = {}
    for link in links:
        if link.ours in buffers and link.ours not in state:
            continue
        tensor, like = state[link.ours].detach(), parameters.get(link.ours)
        whole = tensor if like is None else _whole(tensor, like, axis, experts)
        theirs: tuple[str, ...] = link.theirs
        if names == "memory" and link.in_memory is not None:
            if not link.in_memory:
                continue
            if isinstance(link.in_memory, str):
                exported[link.in_memory] = whole
                continue
            theirs = link.in_memory
        exported.update(zip(theirs, link.to_theirs(whole), strict=True))
    return exported


def refuse_unlinked(model: nn.Module, links: Sequence[WeightLink]) -> None:
    """Raise ValueError for parameters that are no tensor of Hugging Face's: they would be lost."""
    linked = {link.ours for link in links}
    if left := [name for name, _ in model.named_parameters() if name not in linked]:
        raise ValueError(
            f"{shortened(left, 3)} of {type(model).__name__} have no names in Hugging Face's "
            "files: add them in the huggingface_links of your attention, or convert the model "
            "without them"
        )


def _whole(
    tensor: Tensor, parameter: nn.Parameter, axis: MeshAxis | None, experts: ExpertAxes
) -> Tensor:
    role = role_of(parameter)
    axis = experts.expert_tp if role.expert else axis
    if axis is not None and role.tp_shard_dim is not None:
        stacked = start_all_gather(tensor.unsqueeze(0), axis.group, async_op=False).wait()
        tensor = join_weight(stacked.unbind(0), role.tp_shard_dim, role.tp_blocks)
    if role.expert and experts.ep is not None:
        tensor = start_all_gather(tensor, experts.ep.group, async_op=False).wait()
    return tensor


def from_huggingface(
    source: str | Path | nn.Module,
    mesh: MeshLike = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    variants: Sequence[type[AttentionVariant]] = (),
    types: Sequence[ModelType] = (),
    mtp: bool = True,
) -> GPTModel:
    """Build a model with the weights of a Hugging Face model.

    Args:
        source: a directory with `config.json` and `*.safetensors`, or a `transformers` model.
        mesh: as of `GPTModel`; each rank keeps its pieces.
        dtype: of the model; by default as in the source.
        device: where the model is.
        variants: kinds of attention of your own, which are found by their `huggingface_type`.
        types: types of your own, which are found by their `name`.
        mtp: read layers of multi-token prediction, if there are any; False leaves them out.

    Raises:
        ValueError: for an architecture that is not known here, for quantised weights, for tensors
            that are missing or have other shapes, and for tensors that the model has no place for.
        FileNotFoundError: if the directory has no `config.json` or no weights.
        ImportError: for a directory, without `safetensors` installed.
    """
    written, tensors = open_source(source)
    config = config_from_huggingface(written, variants=variants, types=types)
    config = _with_further_layers(config, written, tensors, mtp)
    with torch.device("meta"):
        model = GPTModel(config, mesh, seed=0)
    links = weight_map(config, types)
    refuse_unlinked(model, links)
    fill_from(model, links, tensors, dtype, device, model.axis, model.expert_axes)
    tied_to = table_name(links[0], tensors) if config.tie_embeddings else None
    tensors.refuse_unread(tied_to, head_names(config, types))
    return model


def _with_further_layers(
    config: TransformerConfig, written: Mapping[str, Any], tensors: SourceTensors, wanted: bool
) -> TransformerConfig:
    """The config with the layers of multi-token prediction that there are tensors of.

    Their copies of the embedding and the head are compared and left out, as all of them are if they
    are not wanted.
    """
    depth = int(written.get("num_nextn_predict_layers") or 0)
    layers = [further_layer(config, number) for number in range(depth)]
    if not all(f"{layer}.eh_proj.weight" in tensors for layer in layers) or not layers:
        return config
    for layer in layers:
        if wanted:
            table = "model.embed_tokens.weight"
            tensors.require_copy(f"{layer}.embed_tokens.weight", table)
            head = table if config.tie_embeddings else "lm_head.weight"
            tensors.require_copy(f"{layer}.shared_head.head.weight", head)
        else:
            tensors.leave_out(f"{layer}.")
    return replace(config, mtp=MultiTokenPrediction(depth=depth)) if wanted else config


def table_name(link: WeightLink, tensors: SourceTensors) -> str:
    """The name that the embeddings have in the source."""
    tables: tuple[str, ...] = (*link.theirs, *(link.in_memory or ()))
    return next((name for name in tables if name in tensors), tables[0])


def fill_from(
    model: nn.Module,
    links: Sequence[WeightLink],
    tensors: SourceTensors,
    dtype: torch.dtype | None,
    device: torch.device | str,
    axis: MeshAxis | None,
    experts: ExpertAxes,
) -> None:
    """Fill a model on the meta device with this rank's pieces; see `from_huggingface`."""
    model.to_empty(device=device).to(dtype=dtype or _whole_of(links[0], tensors).dtype)
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for link in links:
            tensor = targets[link.ours]
            piece = _piece(_whole_of(link, tensors), tensor, axis, experts)
            if piece.shape != tensor.shape:
                raise ValueError(
                    f"{', '.join(link.theirs[:3])} in {tensors.source} make {list(piece.shape)} of "
                    f"{link.ours}, which is {list(tensor.shape)} by config.json{AS_IT_IS}"
                )
            tensor.copy_(piece)


def _whole_of(link: WeightLink, tensors: SourceTensors) -> Tensor:
    try:
        return link.read(tensors.read)
    except KeyError as error:
        raise ValueError(
            f"{tensors.source} has no {error.args[0]}, which the model of its config.json needs: "
            f"config.json may be that of another model{AS_IT_IS}"
        ) from None


def _piece(whole: Tensor, parameter: Tensor, axis: MeshAxis | None, experts: ExpertAxes) -> Tensor:
    role = role_of(parameter)
    if role.expert:
        axis = experts.expert_tp
        if experts.ep is not None:
            whole = whole.chunk(experts.ep.size)[experts.ep.rank]
    if axis is None or role.tp_shard_dim is None:
        return whole
    return cut_weight(whole, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)
