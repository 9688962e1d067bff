"""Where a run's numbers and samples go beside its own files: TensorBoard, Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from config import Config
from run import Run, settings_of


class Boards:
    """Those that the settings ask for; on the first rank alone.

    Args:
        config: of the run.
        run: its directory.
        done: steps so far; what TensorBoard has of later ones is about to be repeated.
    """

    def __init__(self, config: Config, run: Run, done: int) -> None:
        self._events: Any = None
        self._wandb: Any = None
        if config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # here, for it takes a second

            self._events = SummaryWriter(str(run.directory / "tensorboard"), purge_step=done + 1)
        if config.log.wandb:
            import wandb

            name = run.directory / "wandb-id"  # a run that goes on is the same one there
            if not name.exists():
                name.write_text(uuid.uuid4().hex[:12])
            self._wandb = wandb.init(
                project=config.log.wandb,
                name=run.directory.name,
                id=name.read_text(),
                resume="allow",
                dir=str(run.directory),
                config=settings_of(config),
            )
            # Steps are a number like others: wandb's own may not go back, as a run does.
            self._wandb.define_metric("*", step_metric="step")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of a step."""
        for name, value in values.items() if self._events else ():
            self._events.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log({"step": step, **values})

    def samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Add what the model was given and what it wrote."""
        for number, (given, written) in enumerate(samples):
            text = "\n".join(f"    {line}" for line in f"{given}[...]{written}".splitlines())
            if self._events:  # four spaces are Markdown's sign for text as it is
                self._events.add_text(f"sample {number + 1}", text, step)
            if self._wandb:
                self._wandb.log({"step": step, f"sample {number + 1}": f"{given}[...]{written}"})

    def close(self) -> None:
        """Write what is left."""
        if self._events:
            self._events.close()
        if self._wandb:
            self._wandb.finish()
