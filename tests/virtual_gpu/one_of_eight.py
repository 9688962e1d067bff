"""What a program on the virtual GPU begins and ends with: rank 0, and no others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.testing._internal.distributed.fake_pg
from virtual_gpu_step import SIZES, Block, Llama

from lamina.fsdp import MixedPrecisionPolicy, fully_shard

__all__ = ["Block", "end", "ids", "llama", "of_lamina", "sharded", "start", "train"]


def start(backend: str = "cpu:fake,cuda:nccl", world: int = 8) -> None:
    """Make the default process group."""
    words = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": min(world, 8)}
    words |= {"TORCH_NCCL_RANKS_PER_ROOT": world}  # of more ranks several name the communicator
    os.environ.update({name: str(value) for name, value in words.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    device = torch.device("cuda:0")
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=world, device_id=device
    )


def end(result: Any) -> NoReturn:
    """Print the result and leave: the process group's threads would wait for the other ranks."""
    print(json.dumps(result), flush=True)
    sys.stderr.flush()
    os._exit(0)


def of_lamina(lines: Iterable[str]) -> bool:
    """Whether one of some lines, as `host_waits` has them, is in a layer's source."""
    return any(
        line.startswith(place) for line in lines for place in import_module("lamina").__path__
    )


def llama() -> Llama:
    """A small model on the device."""
    with torch.device("cuda"):
        return Llama(SIZES["tiny"])


def sharded(**settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model under `fully_shard`, strategy 3 unless said."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    settings = {"zero_dp_strategy": 3, "mixed_precision_policy": policy, **settings}
    return fully_shard(model, optimizer, **settings)


def ids(device: str = "cuda") -> torch.Tensor:
    """Tokens for it."""
    return torch.zeros(1, SIZES["tiny"].tokens, dtype=torch.long, device=device)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    clip: Any = None,
    device: str = "cuda",
) -> None:
    """Some steps; `clip` is called between backward and the optimizer."""
    tokens = ids(device)
    for _ in range(steps):
        model(tokens).float().logsumexp(-1).mean().backward()
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()
