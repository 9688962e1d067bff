"""Settings of wrappers, drawn from their signatures and dataclasses.

A field is drawn by its annotation. So a new one is drawn without a change here, and its numbers
have to be those of one process: what changes them by design is in `effects`. What cannot be drawn
from an annotation is in `VALUES`, or left at its default.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import types
import typing
from typing import Any, Literal

import torch
import torch.distributed.fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy

from lamina.ddp import DistributedDataParallelConfig, Strategy
from lamina.fsdp import (
    MixedPrecisionPolicy,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
    shard_module,
)

SOURCES: dict[str, Any] = {
    "fully_shard": fully_shard,
    "shard_module": shard_module,
    "DistributedDataParallelConfig": DistributedDataParallelConfig,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "TorchFullyShardedDataParallelConfig": TorchFullyShardedDataParallelConfig,
}
"""Where settings come from."""

BY_PROGRAM = frozenset(
    "module optimizer mesh device_mesh fsdp_unit_modules dp_shard_dim dp_outer_dim tp_dim "
    "zero_dp_strategy outer_dp_sharding_strategy init_model_with_meta_device init_module "
    "use_distributed_optimizer sync_model_each_microbatch cast_forward_inputs "
    "buffer_dtype".split()
)
"""Arguments that a program gives by itself, or leaves alone: the model would have to fit them."""

VALUES: dict[str, tuple[str, ...]] = {
    "reduction": ("'ordered'", "'native'", "'int8'", "'checked'"),
    "device": ("None", "'cpu'"),
    "keep_full_precision": ("('*norm*',)", "('part0*',)"),
    "mp_policy": ("None", "TorchPolicy(param_dtype=torch.float32)"),
    "ignored_params": ("None",),
    "ckpt_format": ("'torch_dist'",),
    "encoded": ("('*',)",),
    "num_distributed_optimizer_instances": ("1", "2"),
}
"""What an annotation does not say."""

NEEDS_HARDWARE = frozenset(
    "nccl_ub keep_fp8_transpose_cache cuda_graph_mode disable_symmetric_registration".split()
)
"""Refused here in any case, so drawn seldom."""

LOOSE = frozenset("param_dtype grad_comm_dtype main_grads_dtype moments_dtype output_dtype".split())
BY_TYPE: dict[Any, tuple[str, ...]] = {
    bool: ("True", "False"),
    int: ("1", "7", "100", "4096", "33554432"),
    float: ("1e6", "1e9"),
    torch.dtype: ("torch.float32", "torch.bfloat16"),
    OffloadPolicy: ("CPUOffloadPolicy()", "OffloadPolicy()"),
    type(None): ("None",),
}


def fields(source: str) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each field or argument."""
    of = SOURCES[source]
    if dataclasses.is_dataclass(of):
        hints = typing.get_type_hints(of)
        return {f.name: (hints[f.name], f.default) for f in dataclasses.fields(of)}
    parameters = inspect.signature(of).parameters.values()
    return {p.name: (p.annotation, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def choices(name: str, annotation: Any) -> list[str]:
    """Python expressions of values that a field may have."""
    if name in VALUES:
        return list(VALUES[name])
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return [repr(value) for value in typing.get_args(annotation)]
    if origin in (typing.Union, types.UnionType):
        return [c for part in typing.get_args(annotation) for c in choices(name, part)]
    return list(BY_TYPE.get(annotation, ()))


def drawable(source: str) -> dict[str, list[str]]:
    """The fields that have something to draw, with their values; the default is left out."""
    found = {}
    for name, (annotation, default) in fields(source).items():
        values = [c for c in choices(name, annotation) if c != repr(default)]
        if annotation is not Strategy and name not in BY_PROGRAM and values:
            found[name] = values
    return found


def draw(
    rng: random.Random, source: str, count: int, given: dict[str, str] | None = None
) -> dict[str, str]:
    """Some settings: name -> expression. Most fit together, and `given`; a few do not."""
    for _ in range(10):
        chosen = _draw(rng, source, count)
        if rng.random() < 0.05 or fit(source, {**(given or {}), **chosen}):
            break
    return chosen


def fit(source: str, settings: dict[str, str]) -> bool:
    """Whether the settings alone are refused: that is decided before any module is looked at."""
    names = {**vars(torch.distributed.fsdp), "TorchPolicy": TorchPolicy, "torch": torch, **SOURCES}
    values = {name: eval(text, names) for name, text in settings.items()}
    try:
        if dataclasses.is_dataclass(SOURCES[source]):
            SOURCES[source](**values)
        else:
            SOURCES[source](None, **values)
    except (ValueError, NotImplementedError):
        return False
    except TypeError:
        pass  # None is no module
    return True


def _draw(rng: random.Random, source: str, count: int) -> dict[str, str]:
    table = drawable(source)
    chosen: dict[str, str] = {}
    for name in rng.sample(sorted(table), min(count, len(table))):
        if name in NEEDS_HARDWARE and rng.random() < 0.8:
            continue
        chosen[name] = rng.choice(table[name])
    if source == "fully_shard" and rng.random() < 0.12:
        policy = _draw(rng, "MixedPrecisionPolicy", rng.randint(1, 3))
        words = ", ".join(f"{name}={value}" for name, value in policy.items())
        chosen["mixed_precision_policy"] = f"MixedPrecisionPolicy({words})"
    return chosen


def narrow(settings: dict[str, str]) -> bool:
    """Whether something is kept or sent in fewer bits than fp32: numbers agree roughly."""
    policy = settings.get("mixed_precision_policy", "") + settings.get("mp_policy", "")
    return (
        "bfloat16" in policy
        or settings.get("reduction") == "'int8'"
        or "main_grads_dtype" in policy
        or any("bfloat16" in settings.get(name, "") for name in LOOSE)
    )
