"""Every setting that a wrapper has, on the virtual GPU: what a step with it does.

`python settings_on_device.py SOURCE` prints what came of each setting of a source of
`fuzz.settings`, alone over each of the source's bases, as JSON.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from fuzz.settings import drawable, fields
from one_of_eight import Block, end, llama, start, train
from steady import of_call
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
)
from lamina.ddp.engine import UnavailableError
from lamina.fsdp import (
    MixedPrecisionPolicy,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
    shard_module,
)
from lamina.mesh import ParallelLayout, ParallelMesh

Settings = dict[str, Any]
Engine = tuple[nn.Module, torch.optim.Optimizer]
REFUSALS = (ValueError, TypeError, NotImplementedError, UnavailableError)
NAMES = {
    "torch": torch,
    "TorchPolicy": TorchPolicy,
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "OffloadPolicy": OffloadPolicy,
}
WIDE_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)
BASES: dict[str, dict[str, Settings]] = {
    "fully_shard": {
        "strategy 3": {"zero_dp_strategy": 3},
        "slots": {"zero_dp_strategy": 3, "fsdp_double_buffer": True},
        "registered": {"zero_dp_strategy": 3, "fsdp_double_buffer": True, "nccl_ub": True},
        "strategy 2": {"zero_dp_strategy": 2, "mixed_precision_policy": WIDE_SUMS},
        "strategy 1": {"zero_dp_strategy": 1},
        "strategy 0": {"zero_dp_strategy": 0},
        "copies": {"zero_dp_strategy": 3, "dp_replicate": 2},
    },
    "DistributedDataParallelConfig": {
        "whole": {},
        "sharded": {"use_distributed_optimizer": True, "overlap_param_gather": True},
        "copies": {"use_distributed_optimizer": True, "dp_replicate": 2},
    },
}
"""What a setting is added to. One that contradicts a base, or needs more, is refused there."""


GIVEN_BY_PROGRAMS = {
    "outer_dp_sharding_strategy": ["1", "'optim'"],
    "sync_model_each_microbatch": ["False"],
    "cast_forward_inputs": ["False"],
    "buffer_dtype": ["torch.float32"],
}
"""What `fuzz.settings` leaves to its random programs; the model here takes all of it."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def by_fully_shard(mesh: ParallelMesh, settings: Settings) -> Engine:
    model = llama()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    settings = {"mixed_precision_policy": policy, **settings}
    return fully_shard(model, adamw(model), device_mesh=mesh, **settings)


def by_policy(mesh: ParallelMesh, settings: Settings) -> Engine:
    policy = MixedPrecisionPolicy(**{"param_dtype": torch.bfloat16, **settings})
    return by_fully_shard(mesh, {"mixed_precision_policy": policy})


def by_module(mesh: ParallelMesh, settings: Settings) -> Engine:
    model = llama()
    for block in model.blocks:
        shard_module(block, mesh, **settings)
    model = shard_module(model, mesh, **settings)
    return model, adamw(model)


def by_ddp(mesh: ParallelMesh, settings: Settings) -> Engine:
    config = DistributedDataParallelConfig(**settings)
    model = DistributedDataParallel(llama(), config, mesh)
    optimizer = adamw(model)
    if config.use_distributed_optimizer:
        return model, ShardedOptimizer(optimizer, model, mesh)
    return model, optimizer


def by_torch(mesh: ParallelMesh, settings: Settings) -> Engine:
    config = TorchFullyShardedDataParallelConfig(**settings)
    model = TorchFullyShardedDataParallel(llama(), config, mesh, sub_modules_to_wrap={Block})
    return model, adamw(model)


meshes: dict[int, ParallelMesh] = {}  # by copies
MAKERS: dict[str, Callable[[ParallelMesh, Settings], Engine]] = {
    "fully_shard": by_fully_shard,
    "shard_module": by_module,
    "DistributedDataParallelConfig": by_ddp,
    "MixedPrecisionPolicy": by_policy,
    "TorchFullyShardedDataParallelConfig": by_torch,
}


def outcome(source: str, base: Settings, settings: Settings) -> Settings:
    """What came of a setting over a base: a refusal, an error, or what two steps ask for."""
    torch.manual_seed(0)
    given = {**base, **settings}
    mesh = meshes[given.pop("dp_replicate", 1)]
    try:
        engine = MAKERS[source](mesh, given)
    except REFUSALS as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    device = settings.get("device", "cuda")
    train(*engine, 3, device=device)
    return {"steps": [of_call(lambda: train(*engine, 1, device=device)) for _ in range(2)]}


def outcomes(source: str, only: tuple[str, ...]) -> Iterator[Settings]:
    """What came of each setting of a source, and of none."""
    fitting = {n: texts for n, texts in GIVEN_BY_PROGRAMS.items() if n in fields(source)}
    every = {**drawable(source), **fitting}
    drawn = {n: texts for n, texts in every.items() if not only or n in only}
    for number, (name, base) in enumerate(BASES.get(source, {"": {}}).items()):
        # All values over the first base, the two ends of them over the others.
        cases = [
            (setting, text)
            for setting, texts in drawn.items()
            for text in (dict.fromkeys((texts[0], texts[-1])) if number else texts)
        ]
        for setting, text in [("", ""), *cases]:
            begun = time.monotonic()
            given = {setting: eval(text, NAMES)} if setting else {}
            row: Settings = {"base": name, "setting": setting, "value": text}
            row["names"] = [*base, *given]
            try:
                row |= outcome(source, base, given)
            except Exception:
                row["error"] = traceback.format_exc()[-2500:]
            gc.collect()
            row["seconds"] = round(time.monotonic() - begun, 2)
            # A crash of the process is the last line's.
            print(f"{source} {name} {setting}={text} {row['seconds']}", file=sys.stderr, flush=True)
            yield row


def main(source: str, *only: str) -> list[Settings]:
    """What came of all settings of a source, or of some."""
    start()
    meshes.update({n: ParallelLayout(dp_replicate=n).build("cuda") for n in (1, 2)})
    return list(outcomes(source, only))


if __name__ == "__main__":
    end(main(*sys.argv[1:]))
