"""What a run can be told: every field with its unit; `options.py` reads TOML and command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    name: str = "pretrain"
    """The run writes to runs/NAME, or runs/NAME-2 and so on once that one is finished."""
    directory: str = ""
    """Directory of the run instead of one made from the name; a run that is there is continued."""
    seed: int = 1234
    """Seed of the initial weights, of the order of the data and of the samples."""


@dataclass(frozen=True)
class DataConfig:
    """The text."""

    path: str = "stdlib"
    """Text file, directory of text files, .tokens shard or directory of shards; 'stdlib' is the
    source text of this Python's standard library."""
    pattern: str = "**/*.py"
    """Which files of a directory to read (glob)."""
    tokenizer: str = "bytes"
    """'bytes' (every byte is a token) or a Hugging Face tokenizer.json."""
    held_out: float = 0.02
    """Fraction of the documents (of one document: of its tokens) that is never trained on."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the GPT."""

    num_layers: int = 4
    """Transformer blocks."""
    hidden_size: int = 192
    """Width of the residual stream, in elements."""
    num_heads: int = 6
    """Query heads."""
    num_kv_heads: int = 0
    """Key and value heads; 0 is as many as query heads."""
    sequence_length: int = 256
    """Length of a sample, in tokens."""
    dropout: float = 0.0
    """Probability of dropping an activation while training."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: int = 400
    """Optimizer steps in all."""
    seconds: float = 0.0
    """Stop (with a checkpoint) after this many seconds of training; 0 is no limit. The schedule
    still counts steps."""
    batch_size: int = 16
    """Sequences per step over all ranks: a multiple of ranks times microbatches."""
    microbatches: int = 1
    """Forward and backward passes per step and rank; more of them need less memory."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 40
    """Steps over which the learning rate rises from 0."""
    final_fraction: float = 0.05
    """Where the cosine ends, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors have none."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    clip_norm: float = 1.0
    """Largest norm of the gradient over all parameters; larger ones are scaled down."""
    engine: Literal["lamina", "torch_fsdp2"] = "lamina"
    """What shards the model: Lamina's own engine, or torch's FSDP2 (always strategy 3)."""
    strategy: Literal[0, 1, 2, 3] = 3
    """What is sharded over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of compute and communication; 'auto' is bf16 on GPUs and fp32 on CPUs. Main weights,
    gradients and optimizer state are fp32."""


@dataclass(frozen=True)
class EvalConfig:
    """Held-out loss and samples."""

    every: int = 100
    """Steps between evaluations; the last step is always evaluated."""
    tokens: int = 65_536
    """Held-out text per evaluation, in tokens over all ranks."""
    samples: int = 3
    """Texts to write at the end."""
    sample_tokens: int = 200
    """Length of each, in tokens."""
    temperature: float = 0.8
    """Below 1 takes likelier tokens, above 1 less likely ones."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    every: int = 100
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """How many to keep, the newest."""


@dataclass(frozen=True)
class LogConfig:
    """What is written about the run."""

    every: int = 1
    """Steps between lines of metrics.jsonl and TensorBoard."""
    line_seconds: float = 5.0
    """Without a terminal: seconds between lines of progress."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""


@dataclass(frozen=True)
class Config:
    """Pretrain a GPT on text: python3 noxfile.py -s train -- [OPTIONS], or
    torchrun --nproc-per-node=2 examples/pretrain/train.py [OPTIONS].

    Defaults come from configs/cpu.toml or configs/gpu.toml, whichever fits the machine, or from a
    file of your own: --config FILE.toml. Options on the command line come last.
    """

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


def check(config: Config, ranks: int) -> None:
    """Refuse settings that can't run, before anything is started.

    Raises:
        ValueError: with the arithmetic and what to change.
    """
    per_pass = ranks * config.train.microbatches
    if config.train.batch_size % per_pass:
        below = config.train.batch_size // per_pass * per_pass
        raise ValueError(
            f"--train.batch-size {config.train.batch_size} is not divisible by {ranks} ranks x "
            f"{config.train.microbatches} microbatches = {per_pass}: take {below or per_pass} or "
            f"{below + per_pass}"
        )
    for name, value, least in (
        ("train.steps", config.train.steps, 1),
        ("train.microbatches", config.train.microbatches, 1),
        ("model.sequence-length", config.model.sequence_length, 1),
        ("eval.every", config.eval.every, 1),
        ("checkpoint.every", config.checkpoint.every, 1),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("log.every", config.log.every, 1),
    ):
        if value < least:
            raise ValueError(f"--{name} {value}: it must be at least {least}")
    if config.train.engine == "torch_fsdp2" and config.train.strategy != 3:
        raise ValueError(
            f"--train.strategy {config.train.strategy}: torch's FSDP2 shards everything (3); use "
            "--train.engine lamina for the others"
        )
    if not 0.0 < config.data.held_out < 1.0:
        raise ValueError(f"--data.held-out {config.data.held_out}: it must be between 0 and 1")
