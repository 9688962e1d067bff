"""Weights from and to Hugging Face, without needing ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.collectives import start_all_gather
from lamina.mesh import MeshAxis, role_of
from lamina.models.axes import MeshLike
from lamina.models.cutting import cut_weight, join_weight
from lamina.models.gpt import GPTModel
from lamina.models.huggingface_config import config_from_huggingface
from lamina.models.weight_maps import weight_map


def to_huggingface(model: GPTModel, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Name and shape a model's weights as Hugging Face does.

    Args:
        model: where it is cut over tensor-parallel ranks, every rank must call this: the pieces are
            gathered, one parameter at a time.
        state: this rank's parameters by name, in place of the model's own.

    Returns:
        Tensors by Hugging Face's names, on the model's device; a tied head is left out. Beside
        ``huggingface_config(model.config)`` they make a checkpoint.

    Raises:
        ValueError: if no architecture known here has the config's features.

    """
    parameters = dict(model.named_parameters())
    state = parameters if state is None else state
    exported: dict[str, Tensor] = {}
    for link in weight_map(model.config):
        whole = _whole(state[link.ours].detach(), parameters[link.ours], model.axis)
        exported.update(zip(link.theirs, link.to_theirs(whole), strict=True))
    return exported


def _whole(tensor: Tensor, parameter: nn.Parameter, axis: MeshAxis | None) -> Tensor:
    role = role_of(parameter)
    if axis is None or role.tp_shard_dim is None:
        return tensor
    stacked = start_all_gather(tensor.unsqueeze(0), axis.group, async_op=False).wait()
    return join_weight(stacked.unbind(0), role.tp_shard_dim, role.tp_blocks)


def from_huggingface(
    source: str | Path | nn.Module,
    mesh: MeshLike = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> GPTModel:
    """Build a model with the weights of a Hugging Face model.

    Args:
        source: a directory with ``config.json`` and ``*.safetensors``, or a ``transformers`` model.
        mesh: as of :class:`GPTModel`; each rank keeps its pieces.
        dtype: of the model; by default as in the source.
        device: where the model is.

    Raises:
        ValueError: for an architecture that is not known here.
        FileNotFoundError: if the directory has no ``config.json`` or no weights.
        KeyError: if a tensor is missing.
        ImportError: for a directory, without ``safetensors`` installed.

    """
    if isinstance(source, nn.Module):
        tensors = source.state_dict()
        config = config_from_huggingface(source.config.to_dict())  # type: ignore[union-attr, operator]
        read: Callable[[str], Tensor] = tensors.__getitem__
    else:
        config, read = _open_directory(Path(source))
    with torch.device("meta"):
        model = GPTModel(config, mesh, seed=0)
    links = weight_map(config)
    model.to_empty(device=device).to(dtype=dtype or read(links[0].theirs[0]).dtype)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for link in links:
            whole = link.to_ours([read(name) for name in link.theirs])
            parameter = parameters[link.ours]
            parameter.copy_(_piece(whole, parameter, model.axis))
    return model


def _piece(whole: Tensor, parameter: nn.Parameter, axis: MeshAxis | None) -> Tensor:
    role = role_of(parameter)
    if axis is None or role.tp_shard_dim is None:
        return whole
    return cut_weight(whole, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)


def _open_directory(path: Path) -> tuple[Any, Callable[[str], Tensor]]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "reading a checkpoint's files needs safetensors: pip install 'lamina-models[hf]'"
        ) from error
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: give a directory saved by save_pretrained()")
    config = config_from_huggingface(json.loads(file.read_text()))
    opened: list[Any] = [
        safe_open(shard, framework="pt") for shard in sorted(path.glob("*.safetensors"))
    ]
    if not opened:
        raise FileNotFoundError(f"{path} has no *.safetensors: other formats are not read")
    where = {name: shard for shard in opened for name in shard.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        # The base model's own checkpoints leave out the prefix.
        for candidate in (name, name.removeprefix("transformer.").removeprefix("model.")):
            if candidate in where:
                tensor: Tensor = where[candidate].get_tensor(candidate)
                return tensor
        raise KeyError(f"{name} is in none of the {len(opened)} files under {path}")

    return config, read
