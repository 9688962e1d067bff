"""What a run says about itself while it goes: progress, metrics.jsonl, TensorBoard, loss.png."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from config import Config
from data import Corpus
from plot import draw
from progress import Bar, Lines
from run import Run

from lamina.checkpoint import SaveReport
from lamina.mesh import Runtime

_RECENT = 20  # steps that the rate is averaged over


class Metrics:
    """Records every step and shows it. Only the first rank does; on others nothing happens.

    Args:
        config: of the run.
        runtime: this rank's.
        run: where to write.
        corpus: for the entropy line in the plot.
        done: steps that a restored checkpoint brings; later lines of an interrupted run, which
            are about to be repeated, are dropped from metrics.jsonl.
    """

    def __init__(
        self, config: Config, runtime: Runtime, run: Run, corpus: Corpus, done: int
    ) -> None:
        self.entropy = corpus.unigram_entropy()
        self.last_held_out: float | None = None
        self.peak_bytes = 0
        self._config, self._device, self._run = config, runtime.device, run
        self._active = runtime.is_main
        self._tokens = config.train.batch_size * config.model.sequence_length
        self._times: list[float] = []
        self._clock = time.perf_counter()
        if self._active:
            self._records = _kept(run.metrics, done)
            self._file = open(run.metrics, "a", buffering=1)  # noqa: SIM115 (closed by __exit__)
            self._board = _board(run, done) if config.log.tensorboard else None
            shows = Bar if sys.stdout.isatty() else Lines
            self._progress = shows(config.train.steps, done, config.log.line_seconds)
            if done:
                self._progress.say(f"continuing {run.directory} after step {done}")

    def __enter__(self) -> Metrics:
        self._clock = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active:
            self._progress.close()
            self._file.close()
            if self._board:
                self._board.close()

    def step(self, done: int, loss: float, norm: float, rate: float) -> None:
        """Record a finished step.

        Args:
            done: steps finished.
            loss: mean over all ranks, nats per token.
            norm: of the gradient before clipping.
            rate: the learning rate of the step.
        """
        now = time.perf_counter()
        self._times = [*self._times[1 - _RECENT :], now - self._clock]
        self._clock = now
        self.peak_bytes = max(self.peak_bytes, _memory(self._device))
        if not self._active:
            return
        record = {
            "step": done,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens_per_second": round(self._tokens * len(self._times) / sum(self._times), 1),
            "memory_bytes": self.peak_bytes,
        }
        self._progress.show(record, sum(self._times) / len(self._times))
        if done % self._config.log.every == 0:
            self._write(record)

    def held_out(self, done: int, loss: float) -> None:
        """Record an evaluation: the held-out loss in nats per token."""
        self.last_held_out = loss
        self._clock = time.perf_counter()  # its time is not the next step's
        if self._active:
            self._write({"step": done, "held_out_loss": loss})
            share = loss / self.entropy
            self._progress.say(
                f"step {done}: held-out loss {loss:.3f} nats, {share:.2f} of unigram entropy"
            )

    def saved(self, save: SaveReport) -> None:
        """Record how long a checkpoint held up the loop, and leave that out of the next step."""
        self._clock = time.perf_counter()
        if self._active:
            blocked = round(save.blocked_seconds, 4)
            self._write({"step": save.step, "checkpoint_blocked_seconds": blocked})

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        if self._active:
            self._progress.say(text)

    def finish(self) -> None:
        """Draw the plot and take the progress away."""
        if self._active:
            self._progress.close()
            draw(self._records, self.entropy, self._run.plot)

    def _write(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        self._file.write(json.dumps(record) + "\n")
        if self._board:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])


def _memory(device: torch.device) -> int:
    """Peak bytes of tensors on a GPU; on a CPU all memory of the process, right now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def _kept(path: Path, done: int) -> list[dict[str, Any]]:
    """Rewrite metrics.jsonl without lines past `done`, or half-written ones."""
    records = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["step"] <= done:
                records.append(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def _board(run: Run, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # here, for it takes a second to import

    return SummaryWriter(str(run.directory / "tensorboard"), purge_step=done + 1)
