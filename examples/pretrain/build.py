"""From settings to a sharded model and its optimizer: architecture, precision, parallel axes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from config import Config, TrainConfig
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

import lamina.fsdp as fsdp
import lamina.models as models
from lamina.ddp import DataParallel, HealthMonitor, ReplicaMonitor
from lamina.mesh import ParallelMesh
from lamina.models.mamba import GatedDeltaNet

Sharded = fsdp.ShardedModule | DataParallel | models.PipelineRunner
_BLOCKS = (models.TransformerBlock, models.ResidualBlock)
_BITS = 16  # of a token in a picture


def _own(name: str) -> models.TransformerConfig:
    """The small GPT; Mamba-2 with four layers of attention, as in Nemotron-H 8B (NVIDIA, 2025)."""
    if name == "gpt":
        return models.TransformerConfig(vocab_size=1, hidden_size=192, num_layers=4, num_heads=6)
    return models.TransformerConfig(
        vocab_size=131072, hidden_size=4096, num_layers=52, num_heads=32, num_kv_heads=8,
        head_dim=128, ffn_size=21504, activation="relu2", positions="none",
        layer_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        mamba=models.MambaConfig(num_heads=128, head_dim=64, state_size=128, groups=8),
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The decoder, and the encoder of a model that sees."""

    language: models.TransformerConfig
    vision: models.VisionConfig | None = None

    def arguments(self, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        """A batch as the model takes it. A model that sees is shown each sample's first tokens.

        They are drawn, one in each patch, as the bits of their ids; in the text the image token
        stands for them. So any text trains the encoder too, and nothing has to be downloaded.
        """
        if self.vision is None:
            return {"tokens": tokens, "labels": labels}
        side, scale = self.vision.max_grid, self.vision.patch_size // 4
        seen = side * side
        bits = tokens[:, :seen, None] >> torch.arange(_BITS, device=tokens.device) & 1
        pixels = bits.view(-1, side, side, 4, 4).transpose(2, 3).reshape(-1, 1, 4 * side, 4 * side)
        images = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3).float()
        image_token = torch.full_like(tokens[:, :seen], self.language.vocab_size - 1)
        unknown = torch.full_like(image_token[:, :-1], -100)  # the last of them says what follows
        return {
            "tokens": torch.cat((image_token, tokens[:, seen:]), 1),
            "labels": torch.cat((unknown, labels[:, seen - 1 :]), 1),
            "images": images,
        }


def model_shape(config: Config, vocab_size: int) -> Shape:
    """Describe the model for tokens of this vocabulary.

    Raises:
        ValueError: sizes that do not fit together, and names that do not exist.
    """
    name, vision = config.model.name, None
    if (Path(name) / "config.json").is_file():
        about = json.loads((Path(name) / "config.json").read_text())
        shape = models.config_from_huggingface(about)
    elif name == "vision-language":  # a ViT-L before Llama 3 8B
        sizes = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "max_grid": 16}
        vision = models.VisionConfig(**sizes, channels=1)
        shape = models.preset("llama3-8b")
    else:
        shape = _own(name) if name in ("gpt", "mamba-hybrid") else models.preset(name)
    if config.tiny:
        shape = _tiny(shape)
        sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "patch_size": 4, "max_grid": 4}
        vision = vision and replace(vision, **sizes)
    given = ("num_layers", "hidden_size", "num_heads", "num_kv_heads")
    changes: dict[str, Any] = {key: value for key in given if (value := getattr(config.model, key))}
    if number := changes.get("num_layers"):
        changes |= _repeated(number, shape.layer_pattern, shape.layers)
    if depth := config.model.mtp_depth:
        changes["mtp"] = models.MultiTokenPrediction(depth=depth)
    changes["dropout"] = config.model.dropout
    changes["attention_dropout"] = config.model.dropout if shape.attention_dropout else 0.0
    if config.train.precision == "fp8":
        changes["precision"] = models.Precision(backend="torch-fp8")
    tp = config.layout().tp
    # Widths that all meshes can cut, as the model may not depend on the mesh.
    multiple = 8 if config.train.invariant else tp
    changes["invariant"] = config.train.invariant
    if name != "gpt" and not config.tiny:
        vocab_size = max(shape.vocab_size, vocab_size)
    shape = replace(
        shape, vocab_size=vocab_size + bool(vision), vocab_multiple=multiple,
        sequence_parallel=tp > 1, max_sequence_length=config.model.sequence_length, **changes,
    )  # fmt: skip
    return Shape(shape, vision)


def _tiny(shape: models.TransformerConfig) -> models.TransformerConfig:
    """Four layers of the same kinds, of widths that tp up to 4 and FP8 can cut."""
    changes: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "ffn_size": 128}
    letters = "".join(dict.fromkeys(shape.layer_pattern or ""))
    specs = tuple(map(_tiny_spec, dict.fromkeys(shape.layers or ())))
    changes |= _repeated(4, letters, specs)
    if shape.mla is not None:
        changes["mla"] = models.LatentAttention(
            kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=16, v_head_dim=8
        )
    else:
        changes["num_kv_heads"] = 4 if shape.kv_heads < shape.num_heads else None
        changes["head_dim"] = 8
    if shape.mamba is not None:
        changes["mamba"] = replace(
            shape.mamba, num_heads=16, head_dim=8, state_size=16, groups=4, chunk_size=16
        )
    if shape.moe is not None:
        grouped = {"num_groups": 4, "groups_kept": 2} if shape.moe.num_groups > 1 else {}
        shared = None if shape.moe.shared_ffn_size is None else 32
        changes["moe"] = replace(
            shape.moe, num_experts=8, top_k=2, ffn_size=32, shared_ffn_size=shared,
            first_dense=min(1, shape.moe.first_dense), **grouped,
        )  # fmt: skip
    return replace(shape, **changes)


def _tiny_spec(spec: models.LayerSpec) -> models.LayerSpec:
    """The same kind of layer, with a gated delta net of few and narrow heads if it has one."""
    changes = dict(spec.changes)
    if isinstance(net := changes.get("attention"), GatedDeltaNet):
        sizes = {"key_heads": 4, "value_heads": 8, "key_width": 8, "value_width": 8}
        changes["attention"] = replace(net, **sizes)
    return models.LayerSpec(spec.letter, **changes)


def _repeated(
    number: int, letters: str | None, specs: tuple[models.LayerSpec, ...] | None
) -> dict[str, Any]:
    """The kinds of so many layers, in the order in which they stand in a model."""
    repeated: dict[str, Any] = {}
    if letters:
        repeated["layer_pattern"] = "".join(islice(cycle(letters), number))
    if specs:
        repeated["layers"] = tuple(islice(cycle(specs), number))
    return repeated


def _describe(
    shape: Shape, mesh: ParallelMesh | None = None, seed: int = 0
) -> models.GPTModel | models.VisionLanguageModel:
    language, token = shape.language, shape.language.vocab_size - 1
    with torch.device("meta"):
        if shape.vision is None:
            return models.GPTModel(language, mesh, seed=seed)
        return models.VisionLanguageModel(
            shape.vision, language, mesh, image_token=token, seed=seed
        )


def whole_size(shape: Shape) -> int:
    """Count the parameters of the whole model."""
    return sum(parameter.numel() for parameter in _describe(shape).parameters())


def make_model(
    shape: Shape, config: Config, mesh: ParallelMesh
) -> models.GPTModel | models.VisionLanguageModel:
    """Describe the model without memory: this rank's pieces over tp, cp and ep.

    Raises:
        ValueError: the axes cannot cut these sizes.
    """
    if config.run.export:
        try:
            if shape.vision:
                raise ValueError("transformers knows no such model that sees")
            models.huggingface_config(shape.language)
        except ValueError as error:
            raise ValueError(
                f"--run.export {config.run.export}: {error}; leave --run.export out"
            ) from None
    if shape.vision and mesh.axis("pp").size > 1:
        raise ValueError("--mesh pp: a vision-language model has no pipeline; use pp=1")
    model = _describe(shape, mesh, config.run.seed)
    return model if config.recompute == "none" else models.apply_recompute(model, config.recompute)


def shard(
    model: nn.Module, config: Config, mesh: ParallelMesh, device: torch.device
) -> tuple[Sharded, torch.optim.Optimizer]:
    """Give each rank its part of the model on `device`, and make the optimizer of it."""
    if config.train.engine == "torch_fsdp2":
        sharded, optimizer = _by_torch(model, config, mesh, device)
    elif mesh.axis("pp").size > 1:
        sharded, optimizer = _in_stages(model, config, mesh, device)
    else:
        sharded, optimizer = _shard_whole(model, config, mesh, device)
    if config.compile:
        _compile([block for block in sharded.modules() if isinstance(block, _BLOCKS)])
    return sharded, optimizer


def _compile(blocks: Sequence[nn.Module]) -> None:
    """Compile blocks; those of a kind share what is compiled.

    torch counts how often it compiles a function, and then stops. Here kinds of blocks share
    functions, and a kind is compiled for training, for evaluation and for other lengths and
    batches: the limit is for each of them.
    """
    kinds = {tuple(type(module) for module in block.modules()) for block in blocks}
    limits = torch.compiler.config
    limits.recompile_limit = max(limits.recompile_limit, 8 * len(kinds))
    for block in blocks:
        block.compile()


def _shard_whole(
    model: nn.Module, config: Config, mesh: ParallelMesh, device: torch.device
) -> tuple[fsdp.ShardedModule, torch.optim.Optimizer]:
    """Without pipeline stages: the one line."""
    settings = _settings(model, config, mesh, device)
    return fsdp.fully_shard(model, _adamw(model, config.train), **settings)


def _in_stages(
    model: models.GPTModel, config: Config, mesh: ParallelMesh, device: torch.device
) -> tuple[models.PipelineRunner, torch.optim.Optimizer]:
    """Each stage is sharded by itself; one optimizer steps over all stages of a rank."""
    dp = mesh.axis("dp")
    runner = models.pipeline(
        model, mesh, config.schedule, len(config.parts(dp.rank, dp.size)),
        sequence=config.model.sequence_length,
        wrap=lambda stage: fsdp.fully_shard_model(stage, **_settings(stage, config, mesh, device)),
    )  # fmt: skip
    return runner, fsdp.fully_shard_optimizer(_adamw(runner, config.train), runner)


def _settings(
    model: nn.Module, config: Config, mesh: ParallelMesh, device: torch.device
) -> dict[str, Any]:
    kinds = [kind for kind in _BLOCKS if any(isinstance(m, kind) for m in model.modules())]
    return {
        "device_mesh": mesh,
        "device": device,
        "fsdp_unit_modules": kinds or None,
        "zero_dp_strategy": config.train.strategy,
        **choices(config, compute_dtype(config, device)),
    }


def choices(config: Config, compute: torch.dtype | None) -> dict[str, Any]:
    """Return those arguments of `fully_shard` that depend on neither model nor mesh."""
    wire = torch.float32 if config.train.invariant else None
    return {
        "reproducible": config.train.reproducible > 0,
        "invariant": config.train.invariant,
        "calculate_per_token_loss": config.train.reproducible > 0,  # sums, divided at the end
        "mixed_precision_policy": fsdp.MixedPrecisionPolicy(
            param_dtype=compute, grad_comm_dtype=wire
        ),
    }


def compute_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """The dtype of compute and communication: bf16, or None for fp32, as bf16 is slow on CPUs."""
    precision = config.train.precision
    wide = precision == "fp32" or (precision != "bf16" and device.type == "cpu")
    return None if wide else torch.bfloat16


def _by_torch(
    model: nn.Module, config: Config, mesh: ParallelMesh, device: torch.device
) -> tuple[Sharded, torch.optim.Optimizer]:
    """FSDP2 shards parameters when it wraps them: whole ones first, the optimizer after."""
    model.to_empty(device=device)
    model.init_weights()
    # Sums in fp32, as Lamina's are whatever is on the wire: torch sums in the wire's dtype.
    policy = TorchPolicy(param_dtype=compute_dtype(config, device), reduce_dtype=torch.float32)
    settings = fsdp.TorchFullyShardedDataParallelConfig(mp_policy=policy)
    blocks = [models.TransformerBlock]
    sharded = fsdp.TorchFullyShardedDataParallel(model, settings, mesh, blocks)
    return sharded, _adamw(sharded, config.train)


def _adamw(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Matrices decay; vectors (norms, biases) don't."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [
        {"params": chosen, "weight_decay": decay}
        for chosen, decay in ((matrices, train.weight_decay), (vectors, 0.0))
        if chosen
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.beta1, train.beta2))


def monitors(
    stages: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    config: Config,
    mesh: ParallelMesh,
) -> tuple[HealthMonitor, ReplicaMonitor | None]:
    """What judges steps, and what holds copies of weights and optimizer state equal."""
    settings = asdict(config.health)
    steps, heal = settings.pop("replicas"), settings.pop("heal")
    settings["spike"] = None if config.health.spike == "ignore" else config.health.spike
    replicas = ReplicaMonitor(stages, optimizer, mesh, steps=steps, heal=heal) if steps else None
    return HealthMonitor(**settings), replicas


def learning_rate(step: int, train: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a fraction of the peak (Loshchilov and Hutter, 2017).

    A function of the step alone, which is counted from 0: nothing to save, nothing to restore.
    Steps after the schedule's end keep the rate that it ends with.
    """
    end = train.schedule_steps or train.steps
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, end - train.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return train.learning_rate * (train.final_fraction + (1.0 - train.final_fraction) * cosine)
