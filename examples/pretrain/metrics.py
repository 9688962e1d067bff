"""What a run says about itself while it goes: progress, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from boards import Boards
from build import Shape
from config import Config
from data import Corpus
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from run import Run
from torch.profiler import profile

from lamina.checkpoint import SaveReport
from lamina.collectives import Ledger
from lamina.ddp import Judgement
from lamina.models import training_flops_per_token

_RECENT = 20  # steps that the rate is averaged over
_PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12}
"""Dense bf16 operations per second by the makers' data sheets."""


class Metrics:
    """Records every step and shows it. Only the first rank does; on others nothing happens.

    Args:
        config: of the run.
        run: where to write.
        corpus: for its entropy, a yardstick.
        shape: for the number of operations per token.
        done: steps that a restored checkpoint brings; later lines of an interrupted run, which
            are about to be repeated, are dropped from metrics.jsonl.
    """

    def __init__(self, config: Config, run: Run, corpus: Corpus, shape: Shape, done: int) -> None:
        self.entropy = corpus.unigram_entropy()
        self.last_held_out: float | None = None
        self.peak_bytes = 0
        self._config, self.device, self._run = config, run.runtime.device, run
        self._active, self._traced = run.runtime.is_main, config.traced()
        self._tokens = config.train.batch_size * config.model.sequence_length
        self._flops = training_flops_per_token(shape.language, config.model.sequence_length)
        self._times: list[float] = []
        self._seconds: Counter[str] = Counter()  # of the whole run, by what they went to
        self._started = self._clock = time.perf_counter()
        self._next_line, self._done = 0.0, done
        self.records: list[dict[str, Any]] = []
        if self._active:
            path = run.directory / "metrics.jsonl"
            self.records = _kept(path, done)
            self._file = open(path, "a", buffering=1)  # noqa: SIM115 (closed by __exit__)
            self._boards = Boards(config, run, done)
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[figures]}"),
                console=Console(file=sys.stdout),
                disable=not sys.stdout.isatty(),
            )
            self._task = self._bar.add_task("", total=config.train.steps, figures="")
            self._bar.start()
            if done:
                self.say(f"continuing {run.directory} after step {done}")

    def __enter__(self) -> Metrics:
        self._started = self._clock = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if self._active:
            self._bar.stop()
            self._file.close()
            self._boards.close()

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the seconds inside as spent on `what`."""
        began = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - began

    @contextlib.contextmanager
    def watched(self, number: int) -> Iterator[None]:
        """Count how long a step's compute stands still for communication; trace it if asked."""
        step, every = number + 1, self._config.log.every
        traced = step in self._traced
        if not traced and (not self._active or step % every):
            yield
            return
        with profile() if traced else contextlib.nullcontext() as profiler, Ledger() as ledger:
            yield
        if step % every == 0:
            self._seconds["exposed"] += every * sum(record.exposed for record in ledger.records)
        if profiler is not None:
            began, traces = time.perf_counter(), self._run.directory / "traces"
            traces.mkdir(exist_ok=True)
            ledger.trace(traces / f"step-{step}-rank-{self._run.runtime.rank}.json", profiler)
            self._clock += time.perf_counter() - began  # which is not the step's

    def step(self, done: int, loss: float, norm: float, rate: float) -> None:
        """Record a finished step.

        Args:
            done: steps finished.
            loss: mean over all ranks, nats per token.
            norm: of the gradient before clipping.
            rate: the learning rate of the step.
        """
        now, self._done = time.perf_counter(), done
        self._times = [*self._times[1 - _RECENT :], now - self._clock]
        self._clock = now
        self.peak_bytes = max(self.peak_bytes, _memory(self.device))
        if not self._active:
            return
        seconds = sum(self._times) / len(self._times)
        record = {
            "step": done,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens_per_second": round(self._tokens / seconds, 1),
            "memory_bytes": self.peak_bytes,
            **self._utilisation(self._tokens / seconds),
        }
        for what in ("data", "exposed", "checkpoint"):
            record[f"{what}_share"] = round(self._seconds[what] / (now - self._started), 4)
        self._show(record, seconds)
        if done % self._config.log.every == 0:
            self._write(record)

    def judged(self, number: int, found: Judgement) -> None:
        """Record a step that did not change the weights, and why; and ranks that are slow."""
        decision = found.decision.value
        if self._active and not found.healthy:
            self._write({"step": number, "unhealthy": found.reason, "decision": decision})
            self.say(f"step {number} ({decision}): {found.reason}")
        for slow in found.stragglers if self._active else ():
            self._write({"step": number, "straggler": str(slow), "factor": slow.factor})
            self.say(f"step {number}: {slow}")

    def held_out(self, done: int, loss: float) -> None:
        """Record an evaluation: the held-out loss in nats per token."""
        self.last_held_out = loss
        self._clock = time.perf_counter()  # its time is not the next step's
        if self._active:
            self._write({"step": done, "held_out_loss": loss})
            share = loss / self.entropy
            self.say(f"step {done}: held-out loss {loss:.3f} nats, {share:.2f} of unigram entropy")

    def saved(self, save: SaveReport) -> None:
        """Record how long a checkpoint held up the loop, and leave that out of the next step."""
        self._clock = time.perf_counter()
        self._seconds["checkpoint"] += save.blocked_seconds
        if self._active:
            blocked = round(save.blocked_seconds, 4)
            self._write({"step": save.step, "checkpoint_blocked_seconds": blocked})

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._active and self._bar.disable:
            print(text, flush=True)
        elif self._active:
            self._bar.console.print(text, highlight=False)

    def finish(self, samples: Sequence[tuple[str, str]] = ()) -> None:
        """Take the bar away and show what the model has written; the last words are the report's.

        Weights & Biases prints a summary when it is closed.
        """
        if self._active:
            self._bar.stop()
            self._boards.samples(self._done, samples)
            self._boards.close()

    def _utilisation(self, tokens_per_second: float) -> dict[str, float]:
        """Model operations per second and rank, and their share of a known GPU's peak."""
        rate = self._flops * tokens_per_second / self._run.runtime.world_size
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        peak = next((peak for key, peak in _PEAKS.items() if key in name), None)
        return {"flops_per_second": rate} | ({} if peak is None else {"mfu": rate / peak})

    def _show(self, record: dict[str, Any], seconds: float) -> None:
        """Move the bar; without a terminal print a line every few seconds, and the last."""
        steps, done, now = self._config.train.steps, record["step"], time.monotonic()
        left = int((steps - done) * seconds)
        mfu, rate = record.get("mfu"), record["flops_per_second"]
        speed = f"{rate / 1e9:,.1f} GFLOP/s" if mfu is None else f"MFU {mfu:.1%}"
        shares = "  ".join(
            f"{name} {record[f'{key}_share']:.0%}"
            for name, key in (("data", "data"), ("exposed", "exposed"), ("saving", "checkpoint"))
        )
        text = (
            f"loss {record['loss']:.3f}  lr {record['learning_rate']:.1e}  "
            f"grad norm {record['grad_norm']:.2f}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"{speed}  {record['memory_bytes'] / 2**20:,.0f} MiB  {shares}  "
            f"{left // 60}:{left % 60:02d} left"
        )
        self._bar.update(self._task, completed=done, figures=text)
        if self._bar.disable and (now >= self._next_line or done == steps):
            self._next_line = now + self._config.log.line_seconds
            print(f"step {done}/{steps}  {text}", flush=True)

    def _write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        numbers = {n: v for n, v in record.items() if n != "step" and not isinstance(v, str)}
        self._boards.numbers(record["step"], numbers)


def _memory(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU; on a CPU all memory of the process, right now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def _kept(path: Path, done: int) -> list[dict[str, Any]]:
    """Rewrite metrics.jsonl without lines past `done`, or half-written ones."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            records += [record] if (record := json.loads(line))["step"] <= done else []
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records
