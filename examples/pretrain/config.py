"""What a run can be told: every field with its unit; `options.py` reads TOML and command line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.util import find_spec
from operator import attrgetter, ge, gt, le, lt
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from lamina.checkpoint import BatchPart, cut_batch
from lamina.mesh import LayoutError, ParallelLayout

# What a number must be, in words: `holds` reads them.
_BOUNDS = {"at least": ge, "at most": le, "above": gt, "below": lt}
Count = Annotated[int, "at least 1"]
OrZero = Annotated[int, "at least 0"]
NotNegative = Annotated[float, "at least 0"]
Positive = Annotated[float, "above 0"]
AboveOne = Annotated[float, "above 1"]
Fraction = Annotated[float, "at least 0 and below 1"]
Share = Annotated[float, "above 0 and below 1"]
Closed = Annotated[float, "at least 0 and at most 1"]


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    name: str = "pretrain"
    """The run writes to runs/NAME, or runs/NAME-2 and so on once that one is finished."""
    directory: str = ""
    """Directory of the run instead of one made from the name; a run that is there is continued."""
    export: str = ""  # Directory to write the trained model to, as transformers reads it
    seed: int = 1234  # Seed of the initial weights, of the order of the data and of the samples


@dataclass(frozen=True)
class DataConfig:
    """The text."""

    path: str = "stdlib"
    """Text file, directory of text files, .npy file of tokens or directory of those; 'stdlib' is
    the source text of this Python's standard library."""
    pattern: str = "**/*.py"  # Which files of a directory to read (glob)
    tokenizer: str = "bytes"  # 'bytes' (every byte is a token) or a Hugging Face tokenizer.json
    held_out: Share = 0.02
    """Fraction of the documents (of one document: of its tokens) that is never trained on."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, and what to change in it; 0 keeps a size as the architecture has it."""

    name: Annotated[str, tyro.conf.arg(aliases=("--model",))] = "gpt"
    """'gpt' (small), 'mamba-hybrid', 'vision-language', a name of lamina.models.preset_names(), or
    a directory of Hugging Face's, whose weights are trained on. A file configs/NAME.toml is read
    first."""
    num_layers: OrZero = 0  # Transformer blocks
    hidden_size: OrZero = 0  # Width of the residual stream, in elements
    num_heads: OrZero = 0  # Query heads
    num_kv_heads: OrZero = 0  # Key and value heads
    sequence_length: Count = 256  # Length of a sample, in tokens
    mtp_depth: OrZero = 0  # Tokens beyond the next one that are predicted in training
    dropout: Fraction = 0.0
    """Probability of dropping an activation while training, whatever the architecture's own is."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: Count = 400  # Optimizer steps in all
    schedule_steps: OrZero = 0
    """Step at which the learning rate ends its fall; 0 is the steps that the run was begun with,
    also where it goes on for more."""
    seconds: NotNegative = 0.0
    """Stop (with a checkpoint) after this many seconds of training; 0 is no limit. The schedule
    still counts steps."""
    batch_size: Count = 16
    """Sequences per step over all ranks. Ranks that do not divide them take unequal numbers, and
    the loss is the mean over all sequences; a pipeline (pp) takes a multiple of data-parallel ranks
    times microbatches."""
    microbatches: Count = 1
    """Forward and backward passes per step and rank; more of them need less memory."""
    reproducible: OrZero = 0
    """Above 0: each pass takes so many sequences, however many ranks share the batch, and the
    weights have the same bits on any number of ranks, under any strategy. There are then as many
    passes as that takes, and each is reduced by itself."""
    invariant: bool = False
    """With `reproducible`, whose passes it takes: the same bits for every mesh, with tp, cp, pp and
    ep too (docs/invariance.md). `replay.py` runs a step of such a run again, on other ranks."""
    learning_rate: Positive = 3e-3  # Peak learning rate of AdamW
    warmup_steps: OrZero = 40  # Steps over which the learning rate rises from 0
    final_fraction: Closed = 0.05  # Where the cosine ends, as a fraction of the peak
    weight_decay: NotNegative = 0.1  # Decoupled weight decay of matrices; vectors have none
    beta1: Fraction = 0.9  # AdamW's decay of the first moment
    beta2: Fraction = 0.95  # AdamW's decay of the second moment
    clip_norm: Positive = 1.0
    """Largest norm of the gradient over all parameters; larger ones are scaled down."""
    engine: Literal["lamina", "torch_fsdp2"] = "lamina"
    """What shards the model: Lamina's own engine, or torch's FSDP2 (always strategy 3)."""
    strategy: Literal[0, 1, 2, 3] = 3
    """What is sharded over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp8"], tyro.conf.arg(aliases=("--precision",))
    ] = "auto"
    """Dtype of compute and communication; 'auto' is bf16 on GPUs and fp32 on CPUs. 'fp8' is 'auto'
    with matrix products of blocks in FP8. Main weights, gradients and optimizer state are fp32."""


@dataclass(frozen=True)
class EvalConfig:
    """Held-out loss and samples."""

    every: Count = 100  # Steps between evaluations; the last step is always evaluated
    tokens: Count = 65_536  # Held-out text per evaluation, in tokens over all ranks
    samples: OrZero = 3  # Texts to write at the end
    prompt: str = ""
    """What they begin with, instead of held-out text; a run that is finished writes and shows them
    from its checkpoint."""
    sample_tokens: Count = 200  # Length of each, in tokens
    temperature: NotNegative = 0.8  # Below 1 takes likelier tokens, above 1 less likely ones


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    every: Count = 100  # Steps between checkpoints; the last step always has one
    keep: Count = 2  # How many to keep, the newest
    scrub: NotNegative = (
        8.0  # MiB per second of kept checkpoints to read again, to find rot; 0 for none
    )


@dataclass(frozen=True)
class HealthConfig:
    """What becomes of a step whose loss or gradient norm is not finite, or spikes; copies."""

    nonfinite: Literal["stop", "skip", "back"] = "stop"
    """'skip' leaves the weights as they are; 'back' returns to the last healthy checkpoint and
    passes over the batches since then."""
    spike: Literal["ignore", "stop", "skip", "back"] = "skip"  # The same, for a spike
    limit: Positive = 10.0
    """A spike of the loss is so many deviations above the median of the last 64 steps, one of the
    norm ten times as many."""
    patience: Count = 10  # Stop after so many unhealthy steps in a row, whatever else is set
    replicas: OrZero = 64
    """Compare what several ranks hold copies of (weights, optimizer state): every byte once in so
    many steps. 0 compares nothing."""
    heal: bool = False  # Replace a copy that differs from most others; otherwise stop
    slow: AboveOne = 1.5
    """A rank is named that takes more than so many times as long as the others, waits for them
    aside, ..."""
    slow_steps: Count = 64  # ... for so many steps on end


@dataclass(frozen=True)
class LogConfig:
    """What is written about the run."""

    every: Count = 1  # Steps between lines of metrics.jsonl and TensorBoard
    line_seconds: NotNegative = 5.0  # Without a terminal: seconds between lines of progress
    tensorboard: bool = True  # Write TensorBoard events beside metrics.jsonl
    wandb: str = ""
    """Project of Weights & Biases to write the same to, if wandb is installed; WANDB_MODE=offline
    keeps it in the run's directory."""
    trace: tuple[int, ...] = ()
    """Steps to trace, such as 20 21: each rank writes traces/step-20-rank-0.json, for Perfetto."""


@dataclass(frozen=True)
class PlanConfig:
    """What --dry-run plans for. A run itself takes the GPUs that are there."""

    gpu: str = "h100-80gb"  # The profile of a GPU, as python -m lamina.models.plan has them
    ranks: OrZero = 0
    """Those of --ranks come first; if the mesh does not allow these, it is the fewest."""


@dataclass(frozen=True)
class Config:
    """Pretrain a language model on text: python3 noxfile.py -s train -- [OPTIONS], or
    torchrun --nproc-per-node=2 examples/pretrain/train.py [OPTIONS].

    Defaults come from configs/cpu.toml or configs/gpu.toml, whichever fits the machine, from
    configs/NAME.toml with --model NAME, or from a file of your own: --config FILE.toml. Options on
    the command line come last.
    """

    mesh: str = "dp_shard=-1"
    """Ranks per axis: tp=2,pp=2,dp_shard=-1. Axes are dp_replicate, dp_shard, cp, tp, pp, ep and
    expert_tp; one of them may be -1, which takes the ranks that the others leave."""
    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble",
        "zbv_zero_bubble", "dualpipev",
    ] = "1f1b"  # fmt: skip
    """In which order pipeline stages (pp) run microbatches."""
    recompute: Literal["none", "selective", "full", "offload"] = "none"
    """Activations: keep all, compute cheap ones or whole blocks again, or keep them on the host."""
    compile: bool = False  # Compile the blocks (torch.compile)
    tiny: bool = False
    """Keep the architecture's kinds of layers and shrink everything else, to try it in seconds."""
    dry_run: bool = False
    """Say what each rank would hold, compute and send, without a GPU, weights or other ranks."""
    ranks: OrZero = 0
    """Ranks that `-s train` starts, by default one per GPU, or two; with --dry-run those of the run
    in question, by default the fewest that the mesh allows."""
    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    log: LogConfig = field(default_factory=LogConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def layout(self) -> ParallelLayout:
        """The axes of `mesh`."""
        try:
            pairs = [pair.split("=") for pair in self.mesh.split(",")]
            return ParallelLayout(**{name.strip(): int(size) for name, size in pairs})
        except (ValueError, TypeError, LayoutError) as error:
            raise ValueError(f"--mesh {self.mesh}: {error}; write tp=2,pp=2,dp_shard=-1") from None

    def parts(self, rank: int, ranks: int) -> list[BatchPart]:
        """What one of the data-parallel ranks takes of each batch, pass by pass."""
        train = self.train
        sizes = {"microbatches": train.microbatches, "size": train.reproducible}
        return cut_batch(train.batch_size, rank, ranks, **sizes)


def _limits(kind: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(hint):
            yield from _limits(hint, f"{prefix}{name}.")
        for limits in getattr(hint, "__metadata__", ()):
            if isinstance(limits, str):
                yield prefix + name, limits


LIMITS = dict(_limits(Config))
"""What each number must be, by its name on the command line."""


def holds(limits: str, number: float) -> bool:
    """Whether a number is within limits; NaN and infinity are within none."""
    bounds = re.findall(r"(at least|at most|above|below) (\d)", limits)
    return math.isfinite(number) and all(_BOUNDS[word](number, int(n)) for word, n in bounds)


def check(config: Config, ranks: int) -> None:
    """Refuse settings that can't run, before anything is started.

    What depends on the architecture, `TransformerConfig` and `GPTModel` refuse themselves.

    Raises:
        ValueError: with the limit or the arithmetic, and what to change.
    """
    for name, limits in LIMITS.items():
        value, option = attrgetter(name)(config), f"--{name.replace('_', '-')}"
        if not holds(limits, value):
            works = f"{option} {attrgetter(name)(Config())}"
            raise ValueError(f"{option} {value}: it must be {limits}, such as {works}")
    if config.log.wandb and find_spec("wandb") is None:
        raise ValueError(f"--log.wandb {config.log.wandb}: wandb is missing; pip install wandb")
    try:
        layout = config.layout().validate(ranks)
    except LayoutError as error:
        raise ValueError(f"--mesh {config.mesh}: {error}") from None
    copies = layout.dp_replicate * layout.dp_shard
    per_pass = copies * (config.train.reproducible or config.train.microbatches)
    if layout.pp > 1 and config.train.batch_size % per_pass:
        below = max(per_pass, config.train.batch_size // per_pass * per_pass)
        raise ValueError(
            f"--train.batch-size {config.train.batch_size} is not divisible by {copies} ranks x "
            f"{config.train.microbatches} microbatches = {per_pass}: a pipeline takes equal "
            f"microbatches; take {below} or {below + per_pass}"
        )
    if config.ranks and config.ranks != ranks:
        raise ValueError(
            f"--ranks {config.ranks}: torchrun has started {ranks}, and --ranks is for -s train "
            "and --dry-run; leave it out, or start torchrun with "
            f"--nproc-per-node={config.ranks}"
        )
    if config.train.invariant and not config.train.reproducible:
        raise ValueError(
            "--train.invariant with --train.reproducible 0: passes are then of the mesh; say how "
            "many sequences a pass takes, as in --train.reproducible 1"
        )
    if config.train.reproducible:
        one = layout.dp_replicate * layout.dp_shard == ranks and layout.ep * layout.expert_tp == 1
        one = one or config.train.invariant
        # With invariant=True random numbers follow from a token's place in the run.
        drawn_by_rank = config.model.dropout and not config.train.invariant
        if config.train.engine != "lamina" or drawn_by_rank or not one:
            raise ValueError(
                f"--train.reproducible {config.train.reproducible} with --train.engine "
                f"{config.train.engine}, --mesh {config.mesh} and --model.dropout "
                f"{config.model.dropout:g}: it needs Lamina's engine, axes dp_replicate and "
                "dp_shard alone, and dropout 0, which draws numbers for each rank; with "
                "--train.invariant axes and dropout are free"
            )
    if config.train.engine == "torch_fsdp2" and (config.train.strategy, layout.pp) != (3, 1):
        raise ValueError(
            f"--train.strategy {config.train.strategy} and pp={layout.pp}: torch's FSDP2 shards "
            "everything (3), and pipelines are Lamina's; use --train.engine lamina for the others"
        )


@dataclass(frozen=True)
class Unused:
    """A setting that differs from its default and does nothing, because of another one."""

    name: str
    because: str
    """The other setting and its value."""

    def __str__(self) -> str:
        return f"--{self.name.replace('_', '-')} does nothing: {self.because}"


def unused(config: Config, device_type: str) -> list[Unused]:
    """Settings that others switch off: they are said before a run starts."""
    changed = {name for name, value in _values(config) if value != _DEFAULTS[name]}
    return [
        Unused(name, because)
        for because, names in _switches(config, device_type)
        for name in names
        if name in changed
    ]


def _switches(config: Config, device_type: str) -> Iterator[tuple[str, list[str]]]:
    """What is set so that others do nothing, in words, and which those are."""
    train, health = config.train, config.health
    texts = ["eval.prompt", "eval.sample_tokens", "eval.temperature"]
    if config.layout().pp == 1:
        yield f"--mesh {config.mesh} has no pipeline (pp)", ["schedule"]
    elif config.eval.samples:
        why = (
            f"--mesh {config.mesh}: a pipeline (pp) writes no samples, as no rank has a whole model"
        )
        yield why, ["eval.samples", *texts]
    if config.eval.samples == 0:
        yield "--eval.samples 0 writes none", texts
    if train.reproducible:
        yield f"--train.reproducible {train.reproducible} sets the passes", ["train.microbatches"]
    if train.warmup_steps >= (end := train.schedule_steps or train.steps):
        why = f"--train.warmup-steps {train.warmup_steps} are not below the schedule's {end}"
        yield why, ["train.final_fraction"]
    if config.recompute == "offload" and device_type == "cpu":
        yield "a run on CPUs has its activations in host memory already", ["recompute"]
    if config.run.directory:
        yield f"--run.directory {config.run.directory} is the run's place", ["run.name"]
    if health.replicas == 0:
        yield "--health.replicas 0 compares no copies", ["health.heal"]
    if health.spike == "ignore":
        yield "--health.spike ignore looks for none", ["health.limit"]
    if {health.spike, health.nonfinite} <= {"ignore", "stop"}:
        why = f"--health.nonfinite {health.nonfinite} and --health.spike {health.spike}"
        yield f"{why} pass over no step", ["health.patience"]
    source = Path(config.data.path)
    if source.is_file() or config.data.path == "stdlib":
        yield f"--data.path {source} says which files", ["data.pattern"]
    elif any(source.glob("*.npy")):
        yield f"--data.path {source} holds files of tokens", ["data.pattern"]
        if any(source.glob("held-out*.npy")):
            yield f"--data.path {source} has files held-out*", ["data.held_out"]
    if config.log.trace and min(config.log.trace) > train.steps:
        yield f"--train.steps {train.steps} end before", ["log.trace"]
    if config.dry_run and config.train.engine != "lamina":
        yield "--dry-run plans with Lamina's engine", ["train.engine"]


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for setting in fields(section):
        value = getattr(section, setting.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{setting.name}.")
        else:
            yield prefix + setting.name, value


_DEFAULTS = dict(_values(Config()))
