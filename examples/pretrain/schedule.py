"""From settings to what the recipe uses: shape, precision, parameter groups, learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from config import Config, TrainConfig
from data import Corpus
from torch import nn

from lamina.fsdp import MixedPrecisionPolicy
from lamina.mesh import Runtime
from lamina.models import TransformerConfig


def model_shape(config: Config, corpus: Corpus) -> TransformerConfig:
    """Describe the model."""
    shape = config.model
    return TransformerConfig(
        vocab_size=corpus.tokenizer.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads or None,
        max_sequence_length=shape.sequence_length,
        dropout=shape.dropout,
    )


def precision_policy(config: Config, runtime: Runtime) -> MixedPrecisionPolicy:
    """Choose the dtypes: bf16 compute on GPUs, fp32 on CPUs, where bf16 is slower."""
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if runtime.device.type == "cuda" else "fp32"
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into matrices, which decay, and vectors (norms, biases), which don't."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(step: int, train: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a fraction of the peak (Loshchilov and Hutter, 2017).

    Args:
        step: from 0. A function of it alone: nothing to save, nothing to restore.
        train: peak, warm-up, length and end.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return train.learning_rate * (train.final_fraction + (1.0 - train.final_fraction) * cosine)
