"""Reading and writing Hugging Face weights, without `transformers`."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lamina.collectives.engine import start_all_gather
from lamina.mesh import role_of
from lamina.mesh.engine import MeshAxis
from lamina.models.base.config import AttentionVariant
from lamina.models.base.mesh_axes import MeshLike, cut_weight, join_weight
from lamina.models.decoder.gpt import GPTModel, require_gpt
from lamina.models.huggingface.configs import config_from_huggingface
from lamina.models.huggingface.weight_maps import weight_map
from lamina.models.moe.expert_axes import ExpertAxes

__all__ = ["from_huggingface", "to_huggingface"]


def to_huggingface(
    model: GPTModel,
    state: Mapping[str, Tensor] | None = None,
    *,
    names: Literal["files", "memory"] = "files",
) -> dict[str, Tensor]:
    """Return a model's weights with the names and shapes of Hugging Face's.

    Args:
        model: if it is cut over tensor- or expert-parallel ranks, every rank must call this,
            because the pieces are gathered, one parameter at a time.
        state: this rank's parameters by name, instead of the model's own. Buffers may be missing.
        names: those of Hugging Face's `files`, or those of a `transformers` model (from version 5)
            in `memory`, for its `load_state_dict`. They differ for experts only.

    Returns:
        Tensors by Hugging Face's names, on the model's device, without a tied head. Together with
        `huggingface_config(model.config)` they are a checkpoint.

    Raises:
        TypeError: for another model than a `GPTModel`.
        ValueError: if no architecture known here has the config's features.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> tensors = to_huggingface(GPTModel(config))
    """
    model = require_gpt(model, "to_huggingface()")
    held, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = {**held, **buffers} if state is None else state
    exported: dict[str, Tensor] = {}
    for link in weight_map(model.config):
        if link.ours in buffers and link.ours not in state:
            continue
        tensor, like = state[link.ours].detach(), held.get(link.ours)
        whole = tensor if like is None else _whole(tensor, like, model.axis, model.expert_axes)
        if names == "memory" and link.in_memory is not None:
            exported[link.in_memory] = whole
        else:
            exported.update(zip(link.theirs, link.to_theirs(whole), strict=True))
    return exported


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
) -> GPTModel:
    """Build a model with the weights of a Hugging Face model.

    Args:
        source: a directory with `config.json` and `*.safetensors`, or a `transformers` model.
        mesh: as of `GPTModel`; each rank keeps its pieces.
        dtype: of the model; by default as in the source.
        device: where the model is.
        variants: kinds of attention of your own, which are found by their `huggingface_type`.

    Raises:
        ValueError: for an architecture that is not known here, for quantised weights, and for files
            with tensors that the model has no place for.
        FileNotFoundError: if the directory has no `config.json` or no weights.
        KeyError: if a tensor is missing.
        ImportError: for a directory, without `safetensors` installed.
    """
    if isinstance(source, nn.Module):
        tensors = source.state_dict()
        written: dict[str, Any] = source.config.to_dict()  # type: ignore[union-attr, operator]
        _refuse_quantised(written, tensors, type(source).__name__)
        config = config_from_huggingface(written, variants=variants)
        read: Callable[[str], Tensor] = partial(_as_written, tensors.__getitem__)
        unread: set[str] = set()
    else:
        written, read, unread = _open_directory(Path(source))
        config = config_from_huggingface(written, variants=variants)
    with torch.device("meta"):
        model = GPTModel(config, mesh, seed=0)
    links = weight_map(config)
    model.to_empty(device=device).to(dtype=dtype or read(links[0].theirs[0]).dtype)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for link in links:
            tensor = held[link.ours]
            tensor.copy_(_piece(link.read(read), tensor, model.axis, model.expert_axes))
    _refuse_unread(unread, tied=config.tie_embeddings, source=str(source))
    return model


def _piece(whole: Tensor, parameter: Tensor, axis: MeshAxis | None, experts: ExpertAxes) -> Tensor:
    role = role_of(parameter)
    if role.expert:
        axis = experts.expert_tp
        if experts.ep is not None:
            whole = whole.chunk(experts.ep.size)[experts.ep.rank]
    if axis is None or role.tp_shard_dim is None:
        return whole
    return cut_weight(whole, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)


def _open_directory(path: Path) -> tuple[Any, Callable[[str], Tensor], set[str]]:
    """The contents of `config.json`, what reads a tensor, and the names that were not read yet."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            "reading a checkpoint's files needs safetensors: pip install 'lamina-models[hf]'"
        ) from error
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing: give a directory saved by save_pretrained() (names of the hub are "
            "not downloaded: huggingface_hub.snapshot_download(name) returns such a directory)"
        )
    written = json.loads(file.read_text())
    opened: list[Any] = [
        safe_open(shard, framework="pt") for shard in sorted(path.glob("*.safetensors"))
    ]
    if not opened:
        raise FileNotFoundError(f"{path} has no *.safetensors: other formats are not read")
    where = {name: shard for shard in opened for name in shard.keys()}  # noqa: SIM118
    _refuse_quantised(written, where, str(path))
    unread = set(where)

    def read(name: str) -> Tensor:
        # Checkpoints of the base model have names without the prefix.
        for candidate in (name, name.removeprefix("transformer.").removeprefix("model.")):
            if candidate in where:
                unread.discard(candidate)
                return _as_written(where[candidate].get_tensor, candidate)
        raise KeyError(f"{name} is in none of the {len(opened)} files under {path}")

    return written, read, unread


_DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names of tensors that follow from the config: frequencies, and GPT-2's causal masks."""


def _refuse_unread(names: Iterable[str], *, tied: bool, source: str) -> None:
    """Raise ValueError for weights that nothing has read: it would be another model."""
    heads = ("lm_head.weight",) if tied else ()
    left = sorted(name for name in names if not name.endswith((*_DERIVED, *heads)))
    if left:
        raise ValueError(
            f"{source} has {', '.join(left[:3])}{' and others' if left[3:] else ''}, for which the "
            f"model of its config.json has no place ({len(left)} tensors): config.json may be that "
            "of another model. Take them out of the files if they change nothing"
        )


# Names of scales and codes: DeepSeek's and torchao's FP8, bitsandbytes, GPTQ and AWQ.
_SCALES = ("_scale_inv", ".weight_scale", ".SCB", ".absmax", ".qweight", ".qzeros", ".scales")
_REMEDY = "give a checkpoint of its weights in bfloat16 or float32 (dequantise it first)"


def _refuse_quantised(written: Mapping[str, Any], names: Iterable[str], source: str) -> None:
    """Raise ValueError for quantised weights, whose codes mean nothing without their scales."""
    scales = sorted(name for name in names if name.endswith(_SCALES))
    said = written.get("quantization_config")
    if scales or said:
        method = f"quantization_config of config.json: {said}" if said else f"tensor {scales[0]}"
        raise ValueError(f"{source} holds quantised weights ({method}): {_REMEDY}")


def _as_written(read: Callable[[str], Tensor], name: str) -> Tensor:
    tensor = read(name)
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {tensor.dtype}, codes of quantised weights: {_REMEDY}")
    return tensor
