"""What a run says about itself while it goes: progress, metrics.jsonl, TensorBoard, W&B."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from build import Shape, whole_size
from data import Corpus
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from run import Run
from torch.profiler import profile

from lamina.checkpoint import CheckpointManager, SaveReport
from lamina.collectives import Ledger
from lamina.ddp import Judgement
from lamina.models import training_flops_per_token

_RECENT = 20  # steps that the rate is averaged over
_PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12}
"""Dense bf16 operations per second by the makers' data sheets."""


class Metrics:
    """Records every step and shows it, on the first rank.

    `done` steps come with a restored checkpoint. Later lines of an interrupted run, which are about
    to be repeated, are dropped from metrics.jsonl. The entropy of the corpus is a yardstick.
    """

    def __init__(self, run: Run, corpus: Corpus, shape: Shape, done: int) -> None:
        self.entropy, self.parameters = corpus.unigram_entropy(), whole_size(shape)
        self.last_held_out: float | None = None
        self.peak_bytes, self.records = 0, list[dict[str, Any]]()
        self._run, self._log, self._main = run, run.config.log, run.runtime.is_main
        self._total, length = run.config.train.steps, run.config.model.sequence_length
        self._tokens = run.config.train.batch_size * length
        self._flops = training_flops_per_token(shape.language, length)
        self._times = deque[float](maxlen=_RECENT)
        self._seconds = Counter[str]()  # of the whole run, by what they went to
        self._done, self._next_line = done, 0.0
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", table_column=Column()),  # in several lines
            console=Console(quiet=not self._main),
            disable=not (self._main and sys.stdout.isatty()),
        )  # fmt: skip
        self._task = self._bar.add_task("", total=self._total, figures="")
        if self._main:
            path = run.directory / "metrics.jsonl"
            self.records = _kept(path, done)
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed by __exit__)
            self._boards = Boards(run, done)

    def __enter__(self) -> Metrics:
        self._bar.start()
        if self._done:
            self.say(f"continuing {self._run.directory} after step {self._done}")
        self._started = self._clock = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        if self._main:
            self._file.close()
            self._boards.close()

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        plain = {"markup": False, "highlight": False, "emoji": False}
        self._bar.console.print(text, soft_wrap=True, **plain)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the seconds inside as spent on `what`."""
        began = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - began

    @contextlib.contextmanager
    def watched(self, number: int, checkpoints: CheckpointManager) -> Iterator[None]:
        """Count how long a step's compute stands still for communication; trace it if asked.

        An error of its numbers is told with the step, the newest checkpoint and the remedy.
        """
        step, every = number + 1, self._log.every
        traced, counted = step in self._log.trace, self._main and step % every == 0
        ledger = Ledger() if traced or counted else contextlib.nullcontext()
        try:
            with profile() if traced else contextlib.nullcontext() as profiler, ledger:
                yield
        except FloatingPointError as error:
            newest = checkpoints.latest() or 0
            raise FloatingPointError(
                f"step {step}: {error}; the newest checkpoint is of step {newest}: lower "
                "--train.learning-rate"
            ) from None
        if counted:
            self._seconds["exposed"] += every * sum(record.exposed for record in ledger.records)
        if profiler is not None:
            began, traces = time.perf_counter(), self._run.directory / "traces"
            traces.mkdir(exist_ok=True)
            ledger.trace(traces / f"step-{step}-rank-{self._run.runtime.rank}.json", profiler)
            self._clock += time.perf_counter() - began  # which is not the step's

    def step(self, done: int, found: Judgement, rate: float) -> None:
        """Record a finished step: how many there are now, its loss and norm, its learning rate."""
        now, self._done = time.perf_counter(), done
        self._times.append(now - self._clock)
        self._clock = now
        seconds, runtime = sum(self._times) / len(self._times), self._run.runtime
        flops = self._flops * self._tokens / seconds / runtime.world_size
        record = {
            "step": done,
            "loss": found.loss,
            "grad_norm": found.norm,
            "learning_rate": rate,
            "tokens_per_second": round(self._tokens / seconds, 1),
            "memory_bytes": self.memory(),
            "flops_per_second": flops,  # of the model, per rank
        }
        name = torch.cuda.get_device_name() if runtime.device.type == "cuda" else ""
        peaks = [peak for key, peak in _PEAKS.items() if key in name]
        record |= {"mfu": flops / peaks[-1]} if peaks else {}
        for what in ("data", "exposed", "checkpoint"):
            record[f"{what}_share"] = round(self._seconds[what] / (now - self._started), 4)
        self._show(record, int((self._total - done) * seconds))
        if done % self._log.every == 0:
            self._write(record)

    def judged(self, number: int, found: Judgement) -> None:
        """Record a step that did not change the weights, and why; and ranks that are slow."""
        decision = found.decision.value
        if not found.healthy:
            self._write({"step": number, "unhealthy": found.reason, "decision": decision})
            self.say(f"step {number} ({decision}): {found.reason}")
        for slow in found.stragglers:
            self._write({"step": number, "straggler": str(slow), "factor": slow.factor})
            self.say(f"step {number}: {slow}")
        if found.network:
            self._write({"step": number, "network": found.network})
            self.say(f"step {number}: {found.network}")

    def held_out(self, done: int, loss: float) -> None:
        """Record an evaluation: the held-out loss in nats per token."""
        self.last_held_out, share = loss, loss / self.entropy
        self._clock = time.perf_counter()  # its time is not the next step's
        self._write({"step": done, "held_out_loss": loss})
        self.say(f"step {done}: held-out loss {loss:.3f} nats, {share:.2f} of unigram entropy")

    def saved(self, save: SaveReport) -> None:
        """Record how long a checkpoint held up the loop, and leave that out of the next step."""
        self._clock, blocked = time.perf_counter(), save.blocked_seconds
        self._seconds["checkpoint"] += blocked
        self._write({"step": save.step, "checkpoint_blocked_seconds": round(blocked, 4)})

    def finish(self, samples: list[tuple[str, str]]) -> None:
        """Take the bar away and log what the model has written; the last words are the report's.

        Weights & Biases prints a summary when it is closed.
        """
        self._bar.stop()
        self.memory()
        texts = {f"sample {n}": f"{given}[...]{text}" for n, (given, text) in enumerate(samples, 1)}
        if self._main:
            if texts:
                self._boards.add({"step": self._done, **texts})
            self._boards.close()

    def memory(self) -> int:
        """Peak bytes of tensors on a GPU; on a CPU of all memory of the process, as last seen."""
        device = self._run.runtime.device
        on_gpu = device.type == "cuda" and torch.cuda.max_memory_allocated(device)
        self.peak_bytes = max(self.peak_bytes, on_gpu or psutil.Process().memory_info().rss)
        return self.peak_bytes

    def _write(self, record: dict[str, Any]) -> None:
        if self._main:
            self.records.append(record)
            self._file.write(json.dumps(record) + "\n")
            self._boards.add(record)

    def _show(self, record: dict[str, Any], left: int) -> None:
        """Move the bar; without a terminal print a line every few seconds, and the last."""
        mfu, rate, done = record.get("mfu"), record["flops_per_second"], record["step"]
        speed = f"{rate / 1e9:,.1f} GFLOP/s" if mfu is None else f"MFU {mfu:.1%}"
        text = (
            f"loss {record['loss']:.3f}  lr {record['learning_rate']:.1e}  "
            f"grad norm {record['grad_norm']:.2f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{speed}  {record['memory_bytes'] / 2**20:,.0f} MiB  data {record['data_share']:.0%}  "
            f"exposed {record['exposed_share']:.0%}  saving {record['checkpoint_share']:.0%}  "
            f"{left // 60}:{left % 60:02d} left"
        )
        self._bar.update(self._task, completed=done, figures=text)
        now = time.monotonic()
        if self._bar.disable and (now >= self._next_line or done == self._total):
            self._next_line = now + self._log.line_seconds
            self.say(f"step {done}/{self._total}  {text}")


def _kept(path: Path, done: int) -> list[dict[str, Any]]:
    """Rewrite metrics.jsonl without lines past `done`, or half-written ones."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records += [record] if (record := json.loads(line))["step"] <= done else []
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


class Boards:
    """TensorBoard and Weights & Biases, if the settings ask for them; on the first rank alone.

    What TensorBoard has of steps after `done` is about to be repeated.
    """

    def __init__(self, run: Run, done: int) -> None:
        self._events: Any = None
        self._wandb: Any = None
        if run.config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # here, for it takes a second

            self._events = SummaryWriter(str(run.directory / "tensorboard"), purge_step=done + 1)
        if project := run.config.log.wandb:
            import wandb

            name = run.directory / "wandb-id"  # a run that goes on is the same one there
            if not name.exists():
                name.write_text(uuid.uuid4().hex[:12])
            self._wandb = wandb.init(
                project=project, name=run.directory.name, id=name.read_text(), resume="allow",
                dir=str(run.directory), config=run.settings(),
            )  # fmt: skip
            # Steps are a number like others: wandb's own may not go back, as a run does.
            self._wandb.define_metric("*", step_metric="step")

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the numbers and texts of a step, which is one of them."""
        for name, value in values.items() if self._events else ():
            if isinstance(value, str):  # four spaces are Markdown's sign for text as it is
                text = textwrap.indent(value, "    ", lambda line: True)
                self._events.add_text(name, text, values["step"])
            elif name != "step":
                self._events.add_scalar(name, value, values["step"])
        if self._wandb:
            self._wandb.log(values)

    def close(self) -> None:
        """Write what is left."""
        if self._events:
            self._events.close()
        if self._wandb:
            self._wandb.finish()
