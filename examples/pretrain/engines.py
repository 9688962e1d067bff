"""The two ways to shard the model: Lamina's engine, and torch's FSDP2 behind the same contract."""

from __future__ import annotations

import torch
from config import Config
from data import Corpus
from schedule import decay_groups, model_shape, precision_policy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from lamina.ddp import DataParallel
from lamina.fsdp import (
    ShardedModule,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    fully_shard,
)
from lamina.mesh import ParallelMesh, Runtime
from lamina.models import GPTModel, TransformerBlock

Sharded = ShardedModule | DataParallel


def sharded_model(
    config: Config, corpus: Corpus, mesh: ParallelMesh, runtime: Runtime
) -> tuple[Sharded, torch.optim.Optimizer]:
    """Build the model and its optimizer, sharded by the engine that was asked for."""
    if config.train.engine == "torch_fsdp2":
        return _by_torch(config, corpus, mesh, runtime)
    # Described without memory; fully_shard makes each rank's part of it.
    with torch.device("meta"):
        model = GPTModel(model_shape(config, corpus), seed=config.run.seed)
    return fully_shard(
        model,
        _adamw(model, config),
        device_mesh=mesh,
        fsdp_unit_modules=[TransformerBlock],
        zero_dp_strategy=config.train.strategy,
        mixed_precision_policy=precision_policy(config, runtime),
    )


def _by_torch(
    config: Config, corpus: Corpus, mesh: ParallelMesh, runtime: Runtime
) -> tuple[Sharded, torch.optim.Optimizer]:
    """FSDP2 shards parameters when it wraps them: whole ones first, the optimizer after."""
    with torch.device(runtime.device):
        whole = GPTModel(model_shape(config, corpus), seed=config.run.seed)
    compute = precision_policy(config, runtime).param_dtype
    # Sums in fp32, as Lamina's are whatever is on the wire: torch sums in the wire's dtype.
    policy = TorchPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    model = TorchFullyShardedDataParallel(
        whole,
        TorchFullyShardedDataParallelConfig(mp_policy=policy),
        mesh,
        [TransformerBlock],
    )
    return model, _adamw(model, config)


def _adamw(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        decay_groups(model, config.train.weight_decay),
        lr=config.train.learning_rate,
        betas=(config.train.beta1, config.train.beta2),
    )
